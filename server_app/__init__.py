"""The server's half as a Flower app. Here and in `client_app/` alone is Flower imported."""
