"""Dense payloads: helper functions shared by most methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast

import torch
from torch import Tensor

from fedveil.contract.layout import Direction, Payload, WireField
from fedveil.contract.param_spec import MadeWeights, Spec, Weights
from fedveil.wire.dense import DenseCodec

__all__ = ["WireDtype", "as_spec", "cast_to", "dense_fields", "lazy_spec", "payload_tensors"]

WireDtype = Literal["float32", "bfloat16", "float16"]


def dense_fields(
    spec: Spec,
    direction: Direction,
    dtype: WireDtype,
    variants: tuple[str, ...] = (),
    when: str = "always",
    prefix: str = "",
) -> tuple[WireField, ...]:
    """Return one dense field per tensor in `spec`."""
    codec = DenseCodec(getattr(torch, dtype))
    return tuple(WireField(prefix + n, direction, codec, t.shape, "weight", variants, when) for n, t in spec.items())


def cast_to(weights: Mapping[str, Tensor], dtype: WireDtype) -> dict[str, Tensor]:
    """Return the weights in the wire's dtype, or the same tensors if they already have it."""
    return {name: w.to(getattr(torch, dtype)) for name, w in weights.items()}


def payload_tensors(payload: Payload) -> Weights:
    """Return the fields of a payload that contains only dense tensors."""
    return cast(Weights, payload.fields)


def as_spec(weights: Weights, spec: Spec) -> dict[str, Tensor]:
    """Return received weights in the spec's dtypes."""
    return {name: w.to(spec[name].dtype) for name, w in weights.items()}


def lazy_spec(weights: Weights, spec: Spec, device: torch.device | None = None) -> Weights:
    """Cast like `as_spec`, at every access: no copy is kept, and a message on disk is read tensor by tensor.

    With a `device`, tensors are copied there in the received dtype and then cast.
    """
    return MadeWeights(weights, lambda name: weights[name].to(device).to(spec[name].dtype))
