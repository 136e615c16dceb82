"""PromptFL.

Guo, Guo, Wang, Tang, Xu: PromptFL: Let Federated Participants Cooperatively Learn Prompts Instead of Models. IEEE
Transactions on Mobile Computing 2023. https://arxiv.org/abs/2208.11625. The prompt is that of CoOp (Zhou et al. 2022).

All clients train one prompt, which stands before the class names of a frozen CLIP; the server averages it as FedAvg
averages weights.

| paper | code | shape, unit |
|---|---|---|
| P_t | `prompt` | length x width, entries of token embeddings |
| n_k, n | `num_examples`, their sum over the cohort | examples |

    P_t^k   = local epochs from P_t, the model frozen       (client)
    P_{t+1} = sum_k (n_k / n) P_t^k                         (server)

A client shares: one prompt before a frozen CLIP's class names. With it stays: nothing.

The client learns: the shared prompt of every round it takes part in.
The server learns: each client's trained prompt, in full, and n_k.

Formal guarantees: none (epsilon is infinite).

| case | result |
|---|---|
| no upload | the prompt stays, bit for bit |
| the same adapter under FedAvg | the same run, bit for bit |

Differences from the paper: AdamW instead of SGD with rate 0.001; the mean is over the cohort of the round.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from fedveil.adapters import prompts
from fedveil.adapters.prompt import Prompt
from fedveil.contract.layout import Layout, Payload
from fedveil.contract.method import Method, RoundContext, State
from fedveil.contract.spec import Spec, Weights
from fedveil.contract.sums import Sums, Terms, weighted
from fedveil.contract.trainer import Trainer
from fedveil.rng import Stream
from fedveil.wire.payloads import WireDtype, as_spec, cast_to, dense_fields, tensors_of


@final
@dataclass(frozen=True)
class PromptFL(Method):
    """One shared prompt.

    Attributes:
        adapter: a prompt of the form "one".
        wire_dtype: dtype on the wire, both ways; sums are fp32 whatever it is.
    """

    adapter: Prompt = field(default_factory=Prompt)
    wire_dtype: WireDtype = "float32"

    def __post_init__(self) -> None:
        prompts.check_form(self.adapter, ("one",))

    def init(self, spec: Spec, weights: Weights, rng: Stream) -> State:
        """P_0."""
        return State(dict(weights))

    def broadcast(self, server: State, ctx: RoundContext) -> Payload:
        """P_t, the same for every client."""
        return Payload(cast_to(server.tensors, self.wire_dtype))

    def client(
        self, private: State | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[State | None, Payload]:
        """Local epochs from P_t; nothing is kept."""
        trained = trainer.train(as_spec(tensors_of(down), trainer.spec)).weights
        return None, Payload(cast_to(trained, self.wire_dtype))

    def terms(self, payload: Payload, num_examples: int, spec: Spec, ctx: RoundContext) -> Terms:
        """n_k P^k, and n_k."""
        return weighted(tensors_of(payload), num_examples)

    def settle(self, server: State, sums: Sums, ctx: RoundContext) -> State:
        """sum_k (n_k / n) P^k."""
        return State(sums.means(server.tensors))

    def layout(self, spec: Spec) -> Layout:
        """The prompt, both ways."""
        return Layout(dense_fields(spec, "down", self.wire_dtype) + dense_fields(spec, "up", self.wire_dtype))
