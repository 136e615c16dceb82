"""Flower as it comes, with nothing to train."""
