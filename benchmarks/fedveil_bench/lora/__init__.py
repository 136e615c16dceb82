"""Presets of LoRA's methods beside one another."""
