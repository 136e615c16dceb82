"""FedSA-LoRA.

Guo, Zeng, Wang, Fan, Wang, Qu: Selective Aggregation for Low-Rank Adaptation in Federated Learning. ICLR 2025.
https://arxiv.org/abs/2410.01463

Both LoRA factors are trained. A is shared, B stays at the site: every client has a model of its own.

| paper | code | shape, unit |
|---|---|---|
| A_t | `<module>.lora_A` in `server.tensors` | r x d_in, weights; random at first |
| B_i | `<module>.lora_B` in the private state | d_out x r, weights; zero at first |
| n_i, m_t | `num_examples`, their sum over the cohort | examples |

    (A_i, B_i) <- local epochs on both, from (A_t, B_i as last trained)                (1, client)
    A_{t+1} = sum_i (n_i / m_t) A_i                                                    (2, server)
    W_i = W_0 + scale B_i A_{t+1}                                                      (3, the model of client i)

A client shares: one trained LoRA factor, A. With it stays: the other one, B.

The client learns: A_t of every round it takes part in.
The server learns: each client's trained A in full, and n_i. It never gets a B.

Formal guarantees: none by itself (epsilon is infinite); with `dp.*` those of `fedveil.privacy.dp_sgd`, and B is noised
too. By construction: no message has a field for B.

| case | result |
|---|---|
| the server's own model | its B is B_0, so with LoRA's zeros it is the base: score the clients' models |
| newcomer, also in a later round | B_i starts at zero, beside A_t |
| a site that skipped rounds | its B as it last trained it, beside an A that others have moved |
| a site that lost its private state | a newcomer |
| no upload | A stays, bit for bit |
| FedRand with rho = 1 | the same clients and uploads, bit for bit; but there B_0 goes down too |

Differences from the paper: AdamW; the mean is over the cohort of the round and weighted with n_i. B is never on the
wire, not even B_0, which everybody knows. The paper's text was not at hand: the equations follow the figure and the
configuration that its authors published, in which the names with "lora_B" stay at the client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

import torch

from fedveil.adapters.lora import Lora
from fedveil.algebra.coded import Uploads
from fedveil.algebra.factors import factor, modules, of_factor
from fedveil.contract.layout import Layout, Payload
from fedveil.contract.method import Method, RoundContext, State
from fedveil.contract.spec import Spec, Weights
from fedveil.contract.sums import Sums, Terms, weighted
from fedveil.contract.trainer import Trainer
from fedveil.rng import Stream
from fedveil.wire.payloads import WireDtype, as_spec, cast_to, dense_fields, tensors_of


@final
@dataclass(frozen=True)
class FedSaLora(Method):
    """Every client trains both factors, shares A and keeps B.

    Attributes:
        adapter: LoRA; no other adapter has factors.
        wire_dtype: dtype on the wire, both ways; sums are fp32 whatever it is.
        upload_bits: bits of the codes in which a client sends A, 2 to 8, with a scale for every 256 weights; 0: none.
    """

    adapter: Lora = field(default_factory=Lora)
    wire_dtype: WireDtype = "float32"
    upload_bits: int = 0

    def __post_init__(self) -> None:
        self._uploads  # noqa: B018  # it checks the bits

    @property
    def _uploads(self) -> Uploads:
        return Uploads(self.wire_dtype, self.upload_bits)

    def init(self, spec: Spec, weights: Weights, rng: Stream) -> State:
        """(A_0, B_0), drawn once for all clients; B_0 never changes here."""
        modules(spec)
        return State(dict(weights))

    def broadcast(self, server: State, ctx: RoundContext) -> Payload:
        """A_t, the same for every client."""
        return Payload(cast_to(of_factor(server.tensors, "A"), self.wire_dtype))

    def client(
        self, private: State | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[State | None, Payload]:
        """Eq. 1: A is sent, B is kept."""
        spec, received = trainer.spec, tensors_of(down)
        kept = private.tensors if private else {n: torch.zeros(t.shape) for n, t in spec.items() if factor(n) == "B"}
        start = {n: received[n] if factor(n) == "A" else kept[n] for n in spec}
        trained = trainer.train(as_spec(start, spec)).weights
        return State(of_factor(trained, "B")), Payload(self._uploads.sent(of_factor(trained, "A")))

    def terms(self, payload: Payload, num_examples: int, spec: Spec, ctx: RoundContext) -> Terms:
        """n_i A_i, and n_i."""
        return weighted(self._uploads.opened(payload), num_examples)

    def settle(self, server: State, sums: Sums, ctx: RoundContext) -> State:
        """Eq. 2; B_0 stays, whoever sent one."""
        return State({**server.tensors, **sums.means(of_factor(server.tensors, "A"))})

    def deployed(
        self, server: State, private: State | None = None, down: Payload | None = None
    ) -> Mapping[str, Weights]:
        """The server's model, whose B is B_0; with `private` that client's (Eq. 3)."""
        clients = {"client": {**server.tensors, **private.tensors}} if private is not None else {}
        return {"server": server.tensors, **clients}

    def layout(self, spec: Spec) -> Layout:
        """A, both ways."""
        shared = of_factor(spec, "A")
        return Layout(dense_fields(shared, "down", self.wire_dtype) + self._uploads.fields(shared))
