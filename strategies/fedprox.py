"""FedProx.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks. MLSys 2020.
https://arxiv.org/abs/1812.06127

FedAvg with a loss term that pulls each client's weights back toward the received weights.

| paper | code | shape, unit |
|---|---|---|
| w^t | the received weights | every tensor of the adapter |
| mu | `mu` | loss per squared weight |
| F_k | the client's training loss | nats |
| n_k, m_t | `num_examples`, their sum over the cohort | examples |

    h_k(w; w^t) = F_k(w) + mu / 2 ||w - w^t||^2                     (Eq. 2; squared: its gradient is mu (w - w^t))
    w_k^{t+1} ~ argmin_w h_k(w; w^t)                                (Algorithm 2, client: the local epochs of `train.*`)
    w^{t+1}   = sum_k (n_k / m_t) w_k^{t+1}                         (server)

The trainer adds the term once per step, whatever train.gradient-accumulation-steps is. With LoRA, the term pulls A and
B separately, not their product.

A client shares: all trained weights, which a term of the loss pulls back to those received. A client keeps:
nothing.

The client learns: the global weights of every round it takes part in.
The server learns: each client's trained weights, in full, as under FedAvg. They are pulled toward the weights that it
sent.

Formal guarantees: none by itself (epsilon is infinite); with `dp.*`, see `fedveil.privacy.dp_sgd`. The term
depends on no example, so its gradient is added after the noise.

| case | result |
|---|---|
| mu = 0 | FedAvg, bit for bit |
| one step per round | FedAvg: at w = w^t the term has no gradient |
| no upload | the weights stay unchanged, bit for bit |
| reported losses | F_k, without the term |

Differences from the paper: the optimizer is AdamW. It scales the gradient of the term along with the gradient of the
loss, so the same mu pulls differently than under SGD. The paper draws devices with probabilities n_k / n and then
takes a plain mean. Here the cohort is drawn uniformly and the mean is weighted. `train.*` sets the local work (the
paper's gamma-inexact solution); a slow site does not stop early. The paper's text was not available. The formula
agrees with Flower's documentation, although Flower's code lacks the square.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from fedveil.adapters.adapter_types import AnyAdapter
from fedveil.adapters.lora import LoraAdapter
from fedveil.contract.contributions import AggregateSums
from fedveil.contract.layout import Payload
from fedveil.contract.method import FederatedState, RoundContext
from fedveil.contract.privacy import check_number
from fedveil.contract.trainer import Trainer
from fedveil.ops.proximal import proximal_penalty
from fedveil.ops.weight_averaging import WeightAveragingMethod
from fedveil.wire.payloads import WireDtype, as_spec, payload_tensors

__all__ = ["FedProx"]


@final
@dataclass(frozen=True)
class FedProx(WeightAveragingMethod):
    """Every client shares all trained weights, which a loss term pulls back toward the received weights.

    Attributes:
        mu: weight of the proximal term; 0 is FedAvg.
        adapter: the trained parameters: LoRA factors or all weights.
        wire_dtype: dtype on the wire in both directions; sums are always fp32.
        upload_bits: bits per uploaded weight, 2 to 8, with one scale per 256 weights; 0 disables quantization.
    """

    mu: float = 0.01
    adapter: AnyAdapter = field(default_factory=LoraAdapter)
    wire_dtype: WireDtype = "float32"
    upload_bits: int = 0

    def __post_init__(self) -> None:
        check_number("mu", self.mu, zero=True)
        self._uploads  # noqa: B018  # this access checks upload_bits

    def client(
        self, private: FederatedState | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[FederatedState | None, Payload]:
        """Train on Eq. 2 from w^t, without private state."""
        start = as_spec(payload_tensors(down), trainer.spec)
        trained = trainer.train(start, penalty=proximal_penalty(self.mu, start)).weights
        return None, Payload(self._uploads.sent(trained))

    def server_update(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> FederatedState:
        """Return the mean."""
        return FederatedState(sums.means(server.tensors))
