"""Tensors in, tensors out: means, masks, codes, steps. No file, no network, no model."""
