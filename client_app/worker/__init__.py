"""The warm process of a site."""
