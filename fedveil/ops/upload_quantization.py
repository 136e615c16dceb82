"""The form of a client's trained tensors on the wire: dense, or as few-bit codes with a scale per 256 weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor

from fedveil.contract.codec import QuantizedTensor, Value
from fedveil.contract.layout import Payload, WireField
from fedveil.contract.param_spec import Spec, Weights
from fedveil.ops.quantization import BlockQuantizer
from fedveil.wire.payloads import WireDtype, cast_to, dense_fields, payload_tensors


@dataclass(frozen=True)
class UploadQuantization:
    """The form of a method's uploads.

    Attributes:
        dtype: dtype of weights that are not quantized.
        bits: bits per code, 2 to 8; 0 means no codes. Raises ConfigError for another number.
    """

    dtype: WireDtype
    bits: int = 0

    def __post_init__(self) -> None:
        if self.bits:
            self._coder  # noqa: B018  # this access checks upload_bits

    @property
    def _coder(self) -> BlockQuantizer:
        return BlockQuantizer("absmax", self.bits)

    def sent(self, weights: Mapping[str, Tensor]) -> dict[str, Value]:
        """Return the values for the payload. Raises TaskError for values to quantize that are not finite."""
        if self.bits:
            return {name: self._coder.quantise(w) for name, w in weights.items()}
        return dict(cast_to(weights, self.dtype))

    def opened(self, payload: Payload) -> Weights:
        """Return the weights in a payload; decoded codes are fp32, at most half a step of their block off."""
        if self.bits:
            return {
                name: self._coder.dequantise(cast(QuantizedTensor, value)) for name, value in payload.fields.items()
            }
        return payload_tensors(payload)

    def fields(self, spec: Spec, variants: tuple[str, ...] = (), when: str = "always") -> tuple[WireField, ...]:
        """Return one field for each tensor of `spec`."""
        dense = dense_fields(spec, "up", self.dtype, variants, when)
        return tuple(replace(f, codec=self._coder.codec) for f in dense) if self.bits else dense
