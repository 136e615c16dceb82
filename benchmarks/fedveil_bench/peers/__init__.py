"""Presets that run the same work in peer systems' own programs."""
