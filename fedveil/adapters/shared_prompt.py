"""Both halves of methods whose clients share one prompt and keep their other parts (FedOTP, FedPGP).

    all parts <- local epochs from (the shared prompt of the round, the own parts as kept)        client
    shared <- sum_i (n_i / n) shared^i                                                            server

The server's state has tensors for the own parts too, such that its model is that of the shared prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

from fedveil.adapters.prompt import Prompt
from fedveil.adapters.prompts import SHARED
from fedveil.contract.layout import Layout, Payload
from fedveil.contract.method import RoundContext, State
from fedveil.contract.spec import Spec, Weights
from fedveil.contract.sums import Sums
from fedveil.contract.trainer import Trainer
from fedveil.rng import Stream
from fedveil.wire.payloads import WireDtype, as_spec, cast_to, dense_fields, tensors_of

T = TypeVar("T")


def shared(tensors: Mapping[str, T]) -> dict[str, T]:
    """The entry that is averaged."""
    return {SHARED: tensors[SHARED]}


def own(tensors: Mapping[str, T]) -> dict[str, T]:
    """The entries that stay at a site."""
    return {name: t for name, t in tensors.items() if name != SHARED}


def alone(adapter: Prompt, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors, such that the model is that of the shared prompt.

    The own parts are zeros, or for the form "transport" equal to the shared prompt.

    `tensors` gives the shared prompt and the shapes of the own parts.
    """
    prompt = tensors[SHARED]
    if adapter.form == "transport":
        return {SHARED: prompt, "prompt.local": prompt.clone()}
    return {SHARED: prompt} | {name: torch.zeros_like(w) for name, w in own(tensors).items()}


def start(
    adapter: Prompt, private: State | None, received: Mapping[str, Tensor], spec: Spec, stream: Stream
) -> dict[str, Tensor]:
    """Where a site starts: with the shared prompt as received, and its own parts as kept or, the first time, drawn."""
    shapes = {name: tensor.shape for name, tensor in spec.items()}
    kept = private.tensors if private is not None else own(adapter.draw(shapes, stream, {}))
    return as_spec({**kept, **shared(received)}, spec)


def broadcast(server: State, dtype: WireDtype) -> Payload:
    """The shared prompt, the same for every client."""
    return Payload(cast_to(shared(server.tensors), dtype))


def client(
    adapter: Prompt, private: State | None, down: Payload, trainer: Trainer, ctx: RoundContext, dtype: WireDtype
) -> tuple[State, Payload]:
    """Local epochs on all parts; the shared prompt is sent, the others are kept."""
    trained = trainer.train(start(adapter, private, tensors_of(down), trainer.spec, ctx.rng("init"))).weights
    return State(own(trained)), Payload(cast_to(shared(trained), dtype))


def settled(adapter: Prompt, server: State, sums: Sums) -> State:
    """The weighted mean of the shared prompts."""
    return State(alone(adapter, {**server.tensors, **sums.means(shared(server.tensors))}))


def deployed(server: State, private: State | None) -> Mapping[str, Weights]:
    """The shared prompt alone, and with a client's own parts where these are given."""
    clients = {"client": {**server.tensors, **private.tensors}} if private is not None else {}
    return {"server": server.tensors, **clients}


def layout(spec: Spec, dtype: WireDtype) -> Layout:
    """The shared prompt, both ways."""
    return Layout(dense_fields(shared(spec), "down", dtype) + dense_fields(shared(spec), "up", dtype))
