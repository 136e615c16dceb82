"""Presets and their committed results."""
