"""The client and server sides of methods whose clients share one prompt and keep the other parts (FedOTP, FedPGP).

    all parts <- local epochs from (the round's shared prompt, the client's stored private parts)   client
    shared <- sum_i (n_i / n) shared^i                                                              server

The server's state contains neutral tensors for the private parts, so its model uses only the shared prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

from fedveil.adapters.prompt import PromptAdapter
from fedveil.adapters.prompt_tensors import SHARED
from fedveil.contract.contributions import AggregateSums, ClientContributions, weighted_contributions
from fedveil.contract.layout import MessageLayout, Payload
from fedveil.contract.method import FederatedState, Method, RoundContext
from fedveil.contract.param_spec import Spec, Weights
from fedveil.contract.trainer import Trainer
from fedveil.ops.upload_quantization import UploadQuantization
from fedveil.rng import RandomStream
from fedveil.wire.payloads import WireDtype, as_spec, cast_to, dense_fields, payload_tensors

T = TypeVar("T")


def shared_names(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the shared entry, which the server averages."""
    return {SHARED: tensors[SHARED]}


def private_names(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the entries that stay at a site."""
    return {name: t for name, t in tensors.items() if name != SHARED}


def private_state(adapter: PromptAdapter, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all tensors, with neutral private parts: the model then depends only on the shared prompt.

    The private parts are zeros, or for the form "transport", copies of the shared prompt. `tensors` provides the shared
    prompt and the shapes of the private parts.
    """
    prompt = tensors[SHARED]
    if adapter.form == "transport":
        return {SHARED: prompt, "prompt.local": prompt.clone()}
    return {SHARED: prompt} | {name: torch.zeros_like(w) for name, w in private_names(tensors).items()}


def start_state(
    adapter: PromptAdapter,
    private: FederatedState | None,
    received: Mapping[str, Tensor],
    spec: Spec,
    stream: RandomStream,
) -> dict[str, Tensor]:
    """Return a site's tensors for a round: the received shared prompt, and its private parts, stored or newly drawn."""
    shapes = {name: tensor.shape for name, tensor in spec.items()}
    own_tensors = private.tensors if private is not None else private_names(adapter.draw(shapes, stream, {}))
    return as_spec({**own_tensors, **shared_names(received)}, spec)


class SharedPromptMethod(Method):
    """Base class for methods that share one prompt and keep the other parts at the site.

    It is not a dataclass: each method declares its own fields.

    Attributes:
        adapter: the prompt adapter, in a form that has private parts.
        wire_dtype: dtype on the wire in both directions; sums are always fp32.
        upload_bits: bits per entry of the uploaded prompt, 2 to 8, with one scale per 256 entries; 0 disables
            quantization.
    """

    adapter: PromptAdapter
    wire_dtype: WireDtype
    upload_bits: int

    def __post_init__(self) -> None:
        self._uploads  # noqa: B018  # this access checks upload_bits

    @property
    def _uploads(self) -> UploadQuantization:
        return UploadQuantization(self.wire_dtype, self.upload_bits)

    @property
    def stale_upload_conflict(self) -> str:
        """Return "": late uploads are allowed, because an upload is the received prompt, moved by training."""
        return ""

    @property
    def keeps_private_state(self) -> bool:
        """Return True: the private parts stay at the site."""
        return True

    def init(self, spec: Spec, weights: Weights, rng: RandomStream) -> FederatedState:
        """Return the shared prompt, drawn once for all clients."""
        return FederatedState(private_state(self.adapter, weights))

    def broadcast(self, server: FederatedState, ctx: RoundContext) -> Payload:
        """Return the shared prompt, the same for every client."""
        return Payload(cast_to(shared_names(server.tensors), self.wire_dtype))

    def client(
        self, private: FederatedState | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[FederatedState | None, Payload]:
        """Train all parts for the local epochs; send the shared prompt and store the private parts."""
        start = start_state(self.adapter, private, payload_tensors(down), trainer.spec, ctx.rng("init"))
        trained = trainer.train(start).weights
        return FederatedState(private_names(trained)), Payload(self._uploads.sent(shared_names(trained)))

    def contributions(self, payload: Payload, num_examples: int, spec: Spec, ctx: RoundContext) -> ClientContributions:
        """Return n_i times the shared prompt, and n_i."""
        return weighted_contributions(self._uploads.opened(payload), num_examples)

    def server_update(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> FederatedState:
        """Return the weighted mean of the shared prompts."""
        means = sums.means(shared_names(server.tensors))
        return FederatedState(private_state(self.adapter, {**server.tensors, **means}))

    def models(
        self, server: FederatedState, private: FederatedState | None = None, down: Payload | None = None
    ) -> Mapping[str, Weights]:
        """Return the model with only the shared prompt and, if `private` is given, the one with the client's parts."""
        neutral = private_state(self.adapter, server.tensors)
        clients = {"client": {**neutral, **private.tensors}} if private is not None else {}
        return {"server": neutral, **clients}

    def layout(self, spec: Spec) -> MessageLayout:
        """Return the shared prompt as the only field, in both directions."""
        shared = shared_names(spec)
        return MessageLayout(dense_fields(shared, "down", self.wire_dtype) + self._uploads.fields(shared))
