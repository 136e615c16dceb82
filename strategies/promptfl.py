"""PromptFL.

Guo, Guo, Wang, Tang, Xu: PromptFL: Let Federated Participants Cooperatively Learn Prompts Instead of Models. IEEE
Transactions on Mobile Computing 2023. https://arxiv.org/abs/2208.11625. The prompt follows CoOp (Zhou et al. 2022).

All clients train one prompt, which precedes the class names of a frozen CLIP model. The server averages it just as
FedAvg averages weights.

| paper | code | shape, unit |
|---|---|---|
| P_t | `prompt` | length x width, entries of token embeddings |
| n_k, n | `num_examples`, their sum over the cohort | examples |

    P_t^k   = local epochs from P_t, the model frozen       (client)
    P_{t+1} = sum_k (n_k / n) P_t^k                         (server)

A client shares: one prompt before a frozen CLIP's class names. A client keeps: nothing.

The client learns: the shared prompt of every round it takes part in.
The server learns: each client's trained prompt, in full, and n_k.

Formal guarantees: none (epsilon is infinite).

| case | result |
|---|---|
| no upload | the prompt stays unchanged, bit for bit |
| the same adapter under FedAvg | the same run, bit for bit |

Differences from the paper: the optimizer is AdamW instead of SGD with learning rate 0.001; the mean is over the round's
cohort.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from fedveil.adapters import prompt_tensors
from fedveil.adapters.prompt import PromptAdapter
from fedveil.contract.contributions import AggregateSums
from fedveil.contract.layout import Payload
from fedveil.contract.method import FederatedState, RoundContext
from fedveil.contract.trainer import Trainer
from fedveil.ops.weight_averaging import WeightAveragingMethod
from fedveil.wire.payloads import WireDtype, as_spec, payload_tensors

__all__ = ["PromptFL"]


@final
@dataclass(frozen=True)
class PromptFL(WeightAveragingMethod):
    """All clients share one prompt.

    Attributes:
        adapter: a prompt of form "one".
        wire_dtype: dtype on the wire in both directions; sums are always fp32.
        upload_bits: bits per uploaded weight, 2 to 8, with one scale per 256 weights; 0 disables quantization.
    """

    adapter: PromptAdapter = field(default_factory=PromptAdapter)
    wire_dtype: WireDtype = "float32"
    upload_bits: int = 0

    def __post_init__(self) -> None:
        prompt_tensors.check_form(self.adapter, ("one",))
        self._uploads  # noqa: B018  # this access checks upload_bits

    def client(
        self, private: FederatedState | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[FederatedState | None, Payload]:
        """Train from P_t, without private state."""
        trained = trainer.train(as_spec(payload_tensors(down), trainer.spec)).weights
        return None, Payload(self._uploads.sent(trained))

    def server_update(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> FederatedState:
        """Return sum_k (n_k / n) P^k."""
        return FederatedState(sums.means(server.tensors))
