"""How a client sends trained tensors: as they are, or as codes of a few bits with a scale for every 256 weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor

from fedveil.algebra.quantise import Quantiser
from fedveil.contract.codec import Coded, Value
from fedveil.contract.layout import Field, Payload
from fedveil.contract.spec import Spec, Weights
from fedveil.wire.payloads import WireDtype, cast_to, dense_fields, tensors_of


@dataclass(frozen=True)
class Uploads:
    """The form of a method's uploads.

    Attributes:
        dtype: of weights that are not coded.
        bits: of a code, 2 to 8; 0: no codes. Raises ConfigError for another number.
    """

    dtype: WireDtype
    bits: int = 0

    def __post_init__(self) -> None:
        if self.bits:
            self._coder  # noqa: B018  # it checks the bits

    @property
    def _coder(self) -> Quantiser:
        return Quantiser("absmax", self.bits)

    def sent(self, weights: Mapping[str, Tensor]) -> dict[str, Value]:
        """What is put into the payload. Raises TaskError for values to code that are not finite."""
        if self.bits:
            return {name: self._coder.quantise(w) for name, w in weights.items()}
        return dict(cast_to(weights, self.dtype))

    def opened(self, payload: Payload) -> Weights:
        """The weights in a payload; of codes fp32, and off by at most half a step of their block."""
        if self.bits:
            return {name: self._coder.dequantise(cast(Coded, value)) for name, value in payload.fields.items()}
        return tensors_of(payload)

    def fields(self, spec: Spec, variants: tuple[str, ...] = (), when: str = "always") -> tuple[Field, ...]:
        """One field for each tensor of `spec`."""
        dense = dense_fields(spec, "up", self.dtype, variants, when)
        return tuple(replace(f, codec=self._coder.codec) for f in dense) if self.bits else dense
