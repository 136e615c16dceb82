"""FedProx.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks. MLSys 2020.
https://arxiv.org/abs/1812.06127

FedAvg, in which a term of the loss pulls each client's weights back to those that the server sent.

| paper | code | shape, unit |
|---|---|---|
| w^t | what was received | every tensor of the adapter |
| mu | `mu` | loss over squared weight |
| F_k | the client's training loss | nats |
| n_k, m_t | `num_examples`, their sum over the cohort | examples |

    h_k(w; w^t) = F_k(w) + mu / 2 ||w - w^t||^2                     (Eq. 2; squared: its gradient is mu (w - w^t))
    w_k^{t+1} ~ argmin_w h_k(w; w^t)                                (Algorithm 2, client: the local epochs of `train.*`)
    w^{t+1}   = sum_k (n_k / m_t) w_k^{t+1}                         (server)

The term is added once a step, whatever train.accumulate is. With LoRA it pulls A and B each, not their product.

A client shares: all trained weights, which a term of the loss pulls back to those received. With it stays: nothing.

The client learns: the global weights of every round it takes part in.
The server learns: each client's trained weights, in full, as under FedAvg. They are nearer to what it sent.

Formal guarantees: none by itself (epsilon is infinite); with `dp.*` those of `fedveil.privacy.dp_sgd`: the term depends
on no row, so its gradient is added after the noise.

| case | result |
|---|---|
| mu = 0 | FedAvg, bit for bit |
| one step a participation | FedAvg: at w = w^t the term has no gradient |
| no upload | the weights stay, bit for bit |
| reported losses | of F_k alone |

Differences from the paper: AdamW, which scales the term's gradient as it does the loss's, so mu means another strength
than under SGD. The paper draws devices with probabilities n_k / n and then takes a plain mean; here the cohort is drawn
evenly and the mean is weighted. A gamma-inexact solution is what `train.*` asks for; a site that is slow does not stop
early. The paper's text was not at hand; the formula agrees with Flower's account of it, whose code lacks the square.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from fedveil.adapters.kinds import AnyAdapter
from fedveil.adapters.lora import Lora
from fedveil.algebra.coded import Uploads
from fedveil.contract.budget import check_number
from fedveil.contract.layout import Layout, Payload
from fedveil.contract.method import Method, RoundContext, State
from fedveil.contract.spec import Spec, Weights
from fedveil.contract.sums import Sums, Terms, weighted
from fedveil.contract.trainer import Penalty, Trainer
from fedveil.rng import Stream
from fedveil.wire.payloads import WireDtype, as_spec, cast_to, dense_fields, tensors_of


@final
@dataclass(frozen=True)
class FedProx(Method):
    """Everyone shares everything, and is pulled back to what was sent.

    Attributes:
        mu: weight of the proximal term; 0 is FedAvg.
        adapter: what is trained: LoRA factors or all weights.
        wire_dtype: dtype on the wire, both ways; sums are fp32 whatever it is.
        upload_bits: bits of the codes in which a client sends its weights, 2 to 8, with a scale for every 256 weights;
            0: uncoded.
    """

    mu: float = 0.01
    adapter: AnyAdapter = field(default_factory=Lora)
    wire_dtype: WireDtype = "float32"
    upload_bits: int = 0

    def __post_init__(self) -> None:
        check_number("mu", self.mu, zero=True)
        self._uploads  # noqa: B018  # it checks the bits

    @property
    def _uploads(self) -> Uploads:
        return Uploads(self.wire_dtype, self.upload_bits)

    def init(self, spec: Spec, weights: Weights, rng: Stream) -> State:
        """w^0: the adapter's initial weights."""
        return State(dict(weights))

    def broadcast(self, server: State, ctx: RoundContext) -> Payload:
        """w^t, the same for every client."""
        return Payload(cast_to(server.tensors, self.wire_dtype))

    def client(
        self, private: State | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[State | None, Payload]:
        """Local epochs on Eq. 2 from w^t; nothing is kept."""
        start = as_spec(tensors_of(down), trainer.spec)
        trained = trainer.train(start, penalty=_proximal(self.mu, start) if self.mu else None).weights
        return None, Payload(self._uploads.sent(trained))

    def terms(self, payload: Payload, num_examples: int, spec: Spec, ctx: RoundContext) -> Terms:
        """n_k w_k, and n_k."""
        return weighted(self._uploads.opened(payload), num_examples)

    def settle(self, server: State, sums: Sums, ctx: RoundContext) -> State:
        """The mean."""
        return State(sums.means(server.tensors))

    def layout(self, spec: Spec) -> Layout:
        """Every tensor, both ways."""
        return Layout(dense_fields(spec, "down", self.wire_dtype) + self._uploads.fields(spec))


def _proximal(mu: float, centre: Weights) -> Penalty:
    """mu / 2 ||w - centre||^2; the centre is taken to where the weights are once."""
    there: dict[str, Tensor] = {}

    def penalty(now: Weights) -> Tensor:
        if not there:
            there.update({name: centre[name].to(w) for name, w in now.items()})
        return mu / 2 * torch.stack([(w - there[name]).square().sum() for name, w in now.items()]).sum()

    return penalty
