"""Ditto.

Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization. ICML 2021.
https://arxiv.org/abs/2012.04221

FedAvg plus a personal model at each client, which a loss term pulls toward the global model.

| paper | code | shape, unit |
|---|---|---|
| w^t | `server.tensors`; the received weights | every tensor of the adapter |
| v_k | the private state | every tensor of the adapter |
| lambda | `strength` | loss per squared weight |
| F_k | the client's training loss | nats |
| n_k, m_t | `num_examples`, their sum over the cohort | examples |

    h_k(v; w^t) = F_k(v) + lambda / 2 ||v - w^t||^2                              (Ditto's objective)
    v_k <- local epochs on h_k, from v_k as last trained                         (Algorithm 1, client)
    w_k <- local epochs on F_k, from w^t                                         (Algorithm 1, client)
    w^{t+1} = sum_k (n_k / m_t) w_k                                              (Algorithm 1, server)

A client shares: all trained weights of the global model. A client keeps: its own model v_k.

The client learns: the global weights of every round it takes part in.
The server learns: each client's trained w_k in full, as under FedAvg, and n_k. It never gets v_k, and w_k does not
depend on v_k.

Formal guarantees: none by itself (epsilon is infinite); with `dp.*`, see `fedveil.privacy.dp_sgd`. Both training
passes use noisy steps and are charged.

| case | result |
|---|---|
| the server's model and the uploads | the same as FedAvg's, bit for bit, if training draws the same batches |
| lambda = 0 | the client trains v_k alone, starting from the first weights it received |
| newcomer | v_k starts from w^t |
| a site that lost its private state | treated as a newcomer |
| no upload | w stays unchanged, bit for bit |
| reported losses | the losses of w_k; training v_k reports nothing |

Differences from the paper: the optimizer is AdamW, which scales the gradient of the term along with the gradient of the
loss. `train.*` sets the local work on each of the two models, so a client round takes twice as long as under FedAvg;
the paper's s steps on v_k and r steps on w_k are equal here. The paper sends w_k - w^t and takes a plain mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from fedveil.adapters.adapter_types import AnyAdapter
from fedveil.adapters.lora import LoraAdapter
from fedveil.contract.contributions import AggregateSums
from fedveil.contract.layout import Payload
from fedveil.contract.method import FederatedState, RoundContext
from fedveil.contract.param_spec import Weights
from fedveil.contract.privacy import check_number
from fedveil.contract.trainer import Trainer
from fedveil.ops.proximal import proximal_penalty
from fedveil.ops.weight_averaging import WeightAveragingMethod
from fedveil.wire.payloads import WireDtype, as_spec, payload_tensors

__all__ = ["Ditto"]


@final
@dataclass(frozen=True)
class Ditto(WeightAveragingMethod):
    """Every client shares all trained weights, and keeps a personal model close to the global one.

    Attributes:
        strength: lambda, the weight of the term that pulls a client's own model toward the global one.
        adapter: the trained parameters: LoRA factors or all weights.
        wire_dtype: dtype on the wire in both directions; sums are always fp32.
        upload_bits: bits per uploaded weight, 2 to 8, with one scale per 256 weights; 0 disables quantization.
    """

    strength: float = 0.1
    adapter: AnyAdapter = field(default_factory=LoraAdapter)
    wire_dtype: WireDtype = "float32"
    upload_bits: int = 0

    def __post_init__(self) -> None:
        check_number("strength", self.strength, zero=True)
        self._uploads  # noqa: B018  # this access checks upload_bits

    @property
    def trainings(self) -> int:
        """Return the number of training passes in a client round."""
        return 2

    @property
    def keeps_private_state(self) -> bool:
        """Return True: a client's own model stays at the site."""
        return True

    def client(
        self, private: FederatedState | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[FederatedState | None, Payload]:
        """Run Algorithm 1's client: train v_k and keep it, then train w_k and send it."""
        start = as_spec(payload_tensors(down), trainer.spec)
        own = as_spec(private.tensors, trainer.spec) if private else start
        own = dict(trainer.train(own, penalty=proximal_penalty(self.strength, start)).weights)
        trained = trainer.train(start).weights  # last, so that the client round reports this training
        return FederatedState(own), Payload(self._uploads.sent(trained))

    def server_update(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> FederatedState:
        """Return w^{t+1}, the mean."""
        return FederatedState(sums.means(server.tensors))

    def models(
        self, server: FederatedState, private: FederatedState | None = None, down: Payload | None = None
    ) -> Mapping[str, Weights]:
        """Return the server's model w; with `private` also that client's v_k."""
        return {"server": server.tensors, **({"client": private.tensors} if private is not None else {})}
