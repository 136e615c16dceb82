"""Presets for comparing LoRA methods."""
