"""The server side as a Flower app. In the app's bundle, only this folder and `client_app/` import Flower."""
