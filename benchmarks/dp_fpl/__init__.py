"""Presets of DP-FPL."""
