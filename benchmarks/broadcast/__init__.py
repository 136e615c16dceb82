"""Presets of hostile broadcasts."""
