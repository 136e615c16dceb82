"""Presets of random binary weights."""
