"""temporary"""
from dataclasses import dataclass

import torch

from fedveil.errors import WireError
from fedveil.wire.codec import numel, raw, view


@dataclass(frozen=True)
class Dense:
    dtype: torch.dtype = torch.float32
    @property
    def name(self): return f"dense {str(self.dtype).removeprefix('torch.')}"
    def shape(self, value):
        if value.dtype != self.dtype: raise WireError(f"expected dtype {self.dtype}, found {value.dtype}")
        return tuple(value.shape)
    def encode(self, value): return [raw(value)]
    def decode(self, data, shape): return view(data, self.dtype, shape)
    def nbytes(self, shape): return numel(shape) * self.dtype.itemsize
