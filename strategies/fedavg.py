"""FedAvg.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data. AISTATS 2017. https://arxiv.org/abs/1602.05629. With LoRA factors as weights, it is FedIT (Zhang et al. 2023).

| paper | code | shape, unit |
|---|---|---|
| w_t | `server.tensors` | every tensor of the adapter |
| n_k | `num_examples` | examples of client k |
| m_t | sum of n_k over the cohort | examples |

    w_{t+1}^k = ClientUpdate(k, w_t)                (Algorithm 1, client)
    w_{t+1}   = sum_k (n_k / m_t) w_{t+1}^k         (Algorithm 1, server)

A client shares: all trained weights (LoRA factors or the whole model). A client keeps: nothing.

The client learns: the global weights of every round it takes part in.
The server learns: each client's trained weights, in full. With `dp.*`, they come from noisy training steps.

Formal guarantees: none by itself (epsilon is infinite); with `dp.*`, see `fedveil.privacy.dp_sgd`.

| case | result |
|---|---|
| no upload | the weights stay unchanged, bit for bit |
| one upload | its weights, bit for bit |
| `upload_bits` | a mean of decoded weights, each off by at most half a quantization step; no error feedback |
| LoRA factors | A and B are averaged separately, and mean(B) mean(A) is not mean(B A): see `aggregation_gap` of
  `fedveil.ops.lora_algebra` |

Differences from the paper: the optimizer is AdamW instead of SGD; the mean is over the round's cohort.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from fedveil.adapters.adapter_types import AnyAdapter
from fedveil.adapters.lora import LoraAdapter
from fedveil.contract.contributions import AggregateSums
from fedveil.contract.layout import Payload
from fedveil.contract.method import FederatedState, RoundContext
from fedveil.contract.trainer import Trainer
from fedveil.ops.weight_averaging import WeightAveragingMethod
from fedveil.wire.payloads import WireDtype, lazy_spec, payload_tensors

__all__ = ["FedAvg"]


@final
@dataclass(frozen=True)
class FedAvg(WeightAveragingMethod):
    """Every client shares all trained weights.

    Attributes:
        adapter: the trained parameters: LoRA factors or all weights.
        wire_dtype: dtype on the wire in both directions; sums are always fp32.
        upload_bits: bits per uploaded weight, 2 to 8, with one scale per 256 weights; 0 disables quantization.
    """

    adapter: AnyAdapter = field(default_factory=LoraAdapter)
    wire_dtype: WireDtype = "float32"
    upload_bits: int = 0

    def client(
        self, private: FederatedState | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[FederatedState | None, Payload]:
        """Run ClientUpdate: local epochs from w_t, without private state."""
        trained = trainer.train(lazy_spec(payload_tensors(down), trainer.spec)).weights
        return None, Payload(self._uploads.sent(trained))

    def server_update(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> FederatedState:
        """Return w_(t+1) = sum_k (n_k / m_t) w^k."""
        return FederatedState(sums.means(server.tensors))
