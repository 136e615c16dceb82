"""Functions on tensors: sums, masks, quantization and optimizer steps. They use no files, network or models."""
