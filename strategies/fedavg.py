"""FedAvg.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data. AISTATS 2017. https://arxiv.org/abs/1602.05629. With LoRA factors as the weights it is FedIT (Zhang et al. 2023).

| paper | code | shape, unit |
|---|---|---|
| w_t | `server.tensors` | every tensor of the adapter |
| n_k | `num_examples` | examples of client k |
| m_t | sum of n_k over the cohort | examples |

    w_{t+1}^k = ClientUpdate(k, w_t)                (Algorithm 1, client)
    w_{t+1}   = sum_k (n_k / m_t) w_{t+1}^k         (Algorithm 1, server)

A client shares: all trained weights (LoRA factors or the whole model). With it stays: nothing.

The client learns: the global weights of every round it takes part in.
The server learns: each client's trained weights, in full. It is the undefended baseline.

Formal guarantees: none.

| case | result |
|---|---|
| no upload | the weights stay, bit for bit |
| one upload | its weights, bit for bit |
| LoRA factors | A and B are averaged apart, and mean(B) mean(A) is not mean(B A): see `aggregation_gap` of
  `fedveil.algebra.factors` |

Differences from the paper: AdamW instead of SGD; the mean is over the cohort of the round.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from fedveil.adapters.kinds import AnyAdapter
from fedveil.adapters.lora import Lora
from fedveil.contract.layout import Layout, Payload
from fedveil.contract.method import Method, RoundContext, State
from fedveil.contract.spec import Spec, Weights
from fedveil.contract.sums import Sums, Terms, weighted
from fedveil.contract.trainer import Trainer
from fedveil.rng import Stream
from fedveil.wire.payloads import WireDtype, cast_to, dense_fields, lazy_spec, tensors_of


@final
@dataclass(frozen=True)
class FedAvg(Method):
    """Everyone shares everything.

    Attributes:
        adapter: what is trained: LoRA factors or all weights.
        wire_dtype: dtype on the wire, both ways; sums are fp32 whatever it is.
    """

    adapter: AnyAdapter = field(default_factory=Lora)
    wire_dtype: WireDtype = "float32"

    def init(self, spec: Spec, weights: Weights, rng: Stream) -> State:
        """w_0: the adapter's initial weights."""
        return State(dict(weights))

    def broadcast(self, server: State, ctx: RoundContext) -> Payload:
        """w_t, the same for every client."""
        return Payload(cast_to(server.tensors, self.wire_dtype))

    def client(
        self, private: State | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[State | None, Payload]:
        """ClientUpdate: local epochs from w_t; nothing is kept."""
        trained = trainer.train(lazy_spec(tensors_of(down), trainer.spec)).weights
        return None, Payload(cast_to(trained, self.wire_dtype))

    def terms(self, payload: Payload, num_examples: int, spec: Spec, ctx: RoundContext) -> Terms:
        """n_k w^k, and n_k."""
        return weighted(tensors_of(payload), num_examples)

    def settle(self, server: State, sums: Sums, ctx: RoundContext) -> State:
        """w_(t+1) = sum_k (n_k / m_t) w^k."""
        return State(sums.means(server.tensors))

    def layout(self, spec: Spec) -> Layout:
        """Every tensor, both ways."""
        return Layout(dense_fields(spec, "down", self.wire_dtype) + dense_fields(spec, "up", self.wire_dtype))
