"""FedPGP.

Cui, Li, Wang, Shi: Harmonizing Generalization and Personalization in Federated Prompt Learning. ICML 2024.
https://arxiv.org/abs/2405.09771

Each client trains a shared prompt, which the server averages, plus a low-rank part that stays with the client. A
contrastive term keeps the shared prompt general.

| paper | code | shape, unit |
|---|---|---|
| p_G | `prompt` | b x d (length x width), entries of token embeddings |
| U_i, V_i | `prompt.u`, `prompt.v` | b x k and k x d; stay with client i |
| mu, tau | `adapter.contrast`, `adapter.temperature` | weight and temperature of the contrastive term |
| n_i, n | `num_examples`, their sum over the cohort | examples |

    p_i = p_G + U_i V_i                                                          (1)
    loss = cross entropy of p_i + mu R                                           (2; R: 3 of `fedveil.adapters.prompts`)
    (p_G, U_i, V_i) <- local epochs from (p_G of the round, U_i and V_i as kept) (3, client)
    p_G <- sum_i (n_i / n) p_G^i                                                 (4, server)

With `adapter = {form = "factored", contrast = 0.0}` there is no such term: Tran et al. (DP-FPL, ICLR 2025) ran it so.

A client shares: one prompt. With it stays: a low-rank part that is added to it.

The client learns: the shared prompt of every round it takes part in.
The server learns: each client's trained shared prompt, in full, and n_i. It never gets U_i or V_i.

Formal guarantees: none (epsilon is infinite). By construction: no message has a field for U_i or V_i.

| case | result |
|---|---|
| newcomer, or a site that lost its private state | the site draws U_i and V_i from N(0, std^2) |
| server's own model | p_G, with zeros for U_i and V_i |
| no upload | p_G stays, bit for bit |

Differences from the paper: AdamW instead of SGD; the mean is over the cohort of the round, and with cohort.fraction = 1
over all clients, as in the paper's round 0. The gradient of R flows through both of its trained texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from fedveil.adapters import prompts, shared_prompt
from fedveil.adapters.prompt import Prompt
from fedveil.contract.layout import Layout, Payload
from fedveil.contract.method import Method, RoundContext, State
from fedveil.contract.spec import Spec, Weights
from fedveil.contract.sums import Sums, Terms, weighted
from fedveil.contract.trainer import Trainer
from fedveil.rng import Stream
from fedveil.wire.payloads import WireDtype, tensors_of


@final
@dataclass(frozen=True)
class FedPGP(Method):
    """A shared prompt, and a low-rank part that each client keeps.

    Attributes:
        adapter: a prompt of the form "factored". Its contrast (mu) is 1 where no adapter is given.
        wire_dtype: dtype on the wire, both ways; sums are fp32 whatever it is.
    """

    adapter: Prompt = field(default_factory=lambda: Prompt(form="factored", contrast=1.0))
    wire_dtype: WireDtype = "float32"

    def __post_init__(self) -> None:
        prompts.check_form(self.adapter, ("factored",))

    def init(self, spec: Spec, weights: Weights, rng: Stream) -> State:
        """p_G, drawn once for all clients."""
        return State(shared_prompt.alone(self.adapter, weights))

    def broadcast(self, server: State, ctx: RoundContext) -> Payload:
        """The shared prompt, the same for every client."""
        return shared_prompt.broadcast(server, self.wire_dtype)

    def client(
        self, private: State | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[State | None, Payload]:
        """Eq. 3: p_G is sent, the factors are kept."""
        return shared_prompt.client(self.adapter, private, down, trainer, ctx, self.wire_dtype)

    def terms(self, payload: Payload, num_examples: int, spec: Spec, ctx: RoundContext) -> Terms:
        """n_k times the shared prompt, and n_k."""
        return weighted(tensors_of(payload), num_examples)

    def settle(self, server: State, sums: Sums, ctx: RoundContext) -> State:
        """Eq. 4."""
        return shared_prompt.settled(self.adapter, server, sums)

    def deployed(
        self, server: State, private: State | None = None, down: Payload | None = None
    ) -> Mapping[str, Weights]:
        """The shared prompt alone, and with a client's own part where that is given."""
        return shared_prompt.deployed(server, private)

    def layout(self, spec: Spec) -> Layout:
        """The shared prompt, both ways."""
        return shared_prompt.layout(spec, self.wire_dtype)
