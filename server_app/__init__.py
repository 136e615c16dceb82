"""The server side as a Flower app. Of the folders in the app's bundle, only this and `client_app/` import Flower."""
