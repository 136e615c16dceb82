"""Presets for the device memory that training uses."""
