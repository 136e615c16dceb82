"""Presets for hostile broadcasts."""
