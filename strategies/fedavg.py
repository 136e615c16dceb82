"""FedAvg.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data. AISTATS 2017. https://arxiv.org/abs/1602.05629. With LoRA factors as the weights it is FedIT (Zhang et al. 2023).

| paper | code | shape, unit |
|---|---|---|
| w_t | `server.tensors` | every tensor of the adapter |
| n_k | `upload.num_examples` | examples of client k |
| m_t | sum of n_k over the cohort | examples |

    w_{t+1}^k = ClientUpdate(k, w_t)                (Algorithm 1, client)
    w_{t+1}   = sum_k (n_k / m_t) w_{t+1}^k         (Algorithm 1, server)

The client learns: the global weights of every round it takes part in.
The server learns: each client's trained weights, in full. It is the undefended baseline.

Formal guarantees: none.

| case | result |
|---|---|
| no upload | the weights stay, bit for bit |
| one upload | its weights, bit for bit |
| LoRA factors | A and B are averaged apart: mean(B) mean(A) is not mean(B A), see `fedveil.algebra.factors.aggregation_gap` |

Differences from the paper: AdamW or SGD is the task's choice; the mean is over the cohort of the round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import final

from fedveil.adapters.kinds import AnyAdapter
from fedveil.adapters.lora import Lora
from fedveil.algebra.mean import WeightedMean
from fedveil.contract.layout import Layout, Payload
from fedveil.contract.method import Method, RoundContext, State, Upload
from fedveil.contract.spec import Spec, Weights
from fedveil.contract.trainer import Local
from fedveil.rng import Stream
from fedveil.wire.payloads import WireDtype, as_spec, cast_to, dense_fields, tensors_of


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
        self, private: State | None, down: Payload, local: Local, ctx: RoundContext
    ) -> tuple[State | None, Payload]:
        """ClientUpdate: local epochs from w_t; nothing is kept."""
        received = tensors_of(down)
        trained = local.train(as_spec(received, local.spec)).weights
        return None, Payload(cast_to(trained, self.wire_dtype))

    def aggregate(self, server: State, uploads: Iterator[Upload]) -> State:
        """sum_k (n_k / m_t) w^k."""
        mean = WeightedMean()
        for upload in uploads:
            mean.add(tensors_of(upload.payload), upload.num_examples)
        return State(mean.result(server.tensors))

    def deployed(
        self, server: State, private: State | None = None, down: Payload | None = None
    ) -> Mapping[str, Weights]:
        """One model: the server's."""
        return {"server": server.tensors}

    def layout(self, spec: Spec) -> Layout:
        """Every tensor, both ways."""
        return Layout(dense_fields(spec, "down", self.wire_dtype) + dense_fields(spec, "up", self.wire_dtype))
