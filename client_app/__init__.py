"""The site's half as a Flower app."""
