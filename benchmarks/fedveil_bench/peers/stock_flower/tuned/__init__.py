"""Flower and PEFT as they come: the same LoRA training on the same rows."""
