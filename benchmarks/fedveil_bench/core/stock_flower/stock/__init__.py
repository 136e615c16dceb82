"""Unmodified Flower, with nothing to train."""
