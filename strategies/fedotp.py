"""FedOTP.

Li, Huang, Wang, Shi: Global and Local Prompts Cooperation via Optimal Transport for Federated Learning. CVPR 2024.
https://arxiv.org/abs/2403.00041

Each client trains two prompts: a shared one, which the server averages, and a local one. An image is scored by optimal
transport between its patches and the texts of the two prompts.

| paper | code | shape, unit |
|---|---|---|
| p_g | `prompt` | length x width, entries of token embeddings |
| p_{l,i} | `prompt.local` | the same; stays with client i |
| T, gamma | `prompts.plan`, `adapter.mass` | patches x 2; the fraction of the patches' mass that is transported |
| n_i, n | `num_examples`, their sum over the cohort | examples |

    logit_c = s sum T o <patches, texts of c>,  T by unbalanced transport           (1, 2 of `fedveil.adapters.prompts`)
    (p_g, p_{l,i}) <- local epochs on both from (p_g of the round, p_{l,i} as kept) (3, client)
    p_g <- sum_i (n_i / n) p_g^i                                                    (4, server)

With `adapter = {form = "sum"}` there is no transport: the text has the context p_g + p_{l,i}, and the image is one
feature. Tran et al. (DP-FPL, ICLR 2025) ran this form under the name FedOTP.

A client shares: one of two prompts. With it stays: the other prompt.

The client learns: the shared prompt of every round it takes part in.
The server learns: each client's trained shared prompt, in full, and n_i. It never gets a local prompt.

Formal guarantees: none (epsilon is infinite). By construction: no message has a field for a local prompt.

| case | result |
|---|---|
| newcomer, or a site that lost its private state | the site draws its local prompt from N(0, std^2) |
| server's own model, with transport | the shared prompt takes both places, so the transport only chooses patches |
| server's own model, without transport | the shared prompt |
| no upload | the shared prompt stays, bit for bit |

Differences from the paper: AdamW instead of SGD; the mean is over the cohort of the round, and with cohort.fraction = 1
over all clients, as in the paper's round 0; a patch may give less than its share but never more (T 1 <= 1 / M).
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
class FedOTP(Method):
    """A shared prompt, and a local one that each client keeps.

    Attributes:
        adapter: a prompt of the form "transport", or "sum" for no transport.
        wire_dtype: dtype on the wire, both ways; sums are fp32 whatever it is.
    """

    adapter: Prompt = field(default_factory=lambda: Prompt(form="transport"))
    wire_dtype: WireDtype = "float32"

    def __post_init__(self) -> None:
        prompts.check_form(self.adapter, ("transport", "sum"))

    def init(self, spec: Spec, weights: Weights, rng: Stream) -> State:
        """p_g, drawn once for all clients."""
        return State(shared_prompt.alone(self.adapter, weights))

    def broadcast(self, server: State, ctx: RoundContext) -> Payload:
        """The shared prompt, the same for every client."""
        return shared_prompt.broadcast(server, self.wire_dtype)

    def client(
        self, private: State | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[State | None, Payload]:
        """Eq. 3: both prompts are trained; the shared one is sent, the local one is kept."""
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
