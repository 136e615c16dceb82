"""Presets that compare LoRA methods."""
