"""Presets for random binary weights."""
