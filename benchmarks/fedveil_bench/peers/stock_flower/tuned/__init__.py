"""Unmodified Flower and PEFT: the same LoRA training on the same rows."""
