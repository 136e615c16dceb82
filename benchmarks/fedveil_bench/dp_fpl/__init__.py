"""Presets for DP-FPL."""
