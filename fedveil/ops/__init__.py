"""Functions on tensors: sums, masks, quantization and optimizer steps, without files, network or models."""
