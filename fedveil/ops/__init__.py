"""Functions from tensors to tensors: sums, masks, codes, steps. They touch no file, network or model."""
