"""FedSA-LoRA.

Guo, Zeng, Wang, Fan, Wang, Qu: Selective Aggregation for Low-Rank Adaptation in Federated Learning. ICLR 2025.
https://arxiv.org/abs/2410.01463

Clients train both LoRA factors. They share A and keep B at the site, so every client has its own model.

| paper | code | shape, unit |
|---|---|---|
| A_t | `<module>.lora_A` in `server.tensors` | r x d_in, weights; random at first |
| B_i | `<module>.lora_B` in the private state | d_out x r, weights; zero at first |
| n_i, m_t | `num_examples`, their sum over the cohort | examples |

    (A_i, B_i) <- local epochs on both, from (A_t, the last trained B_i)               (1, client)
    A_{t+1} = sum_i (n_i / m_t) A_i                                                    (2, server)
    W_i = W_0 + scale B_i A_{t+1}                                                      (3, the model of client i)

A client shares: one trained LoRA factor, A. A client keeps: the other factor, B.

The client learns: A_t of every round it takes part in.
The server learns: each client's trained A in full, and n_i. It never gets a B.

Formal guarantees: none by itself (epsilon is infinite); with `dp.*`, see `fedveil.privacy.dp_sgd`; B is then noisy
too. By construction, no message has a field for B.

| case | result |
|---|---|
| the server's own model | its B is B_0, zero in LoRA, so it equals the base: evaluate the clients' models instead |
| newcomer, also in a later round | B_i starts at zero, with A_t |
| a site that skipped rounds | combines its last trained B with an A that others have trained since |
| a site that lost its private state | treated as a newcomer |
| no upload | A stays unchanged, bit for bit |
| FedRand with rho = 1 | the same clients and uploads, bit for bit, but FedRand also broadcasts B_0 |

Differences from the paper: the optimizer is AdamW. The mean is over the round's cohort and weighted by n_i. B is
never on the wire, not even B_0, which every party knows. The paper's text was not available. The equations follow the
figure and the configuration that its authors published, in which tensors with "lora_B" in their names stay at the
client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

import torch

from fedveil.adapters.lora import LoraAdapter
from fedveil.contract.contributions import AggregateSums
from fedveil.contract.layout import MessageLayout, Payload
from fedveil.contract.method import FederatedState, RoundContext
from fedveil.contract.param_spec import Spec, Weights
from fedveil.contract.trainer import Trainer
from fedveil.ops.lora_algebra import factor_name, parse_factor_name
from fedveil.ops.weight_averaging import LoraAveragingMethod
from fedveil.wire.payloads import WireDtype, as_spec, cast_to, dense_fields, payload_tensors

__all__ = ["FedSALoRA"]


@final
@dataclass(frozen=True)
class FedSALoRA(LoraAveragingMethod):
    """Every client trains both factors, shares A and keeps B.

    Attributes:
        adapter: LoRA; no other adapter has factors.
        wire_dtype: dtype on the wire in both directions; sums are always fp32.
        upload_bits: bits per entry of the uploaded A, 2 to 8, with one scale per 256 entries; 0 disables
            quantization.
    """

    adapter: LoraAdapter = field(default_factory=LoraAdapter)
    wire_dtype: WireDtype = "float32"
    upload_bits: int = 0

    def broadcast(self, server: FederatedState, ctx: RoundContext) -> Payload:
        """Return A_t, the same for every client."""
        return Payload(cast_to(parse_factor_name(server.tensors, "A"), self.wire_dtype))

    @property
    def keeps_private_state(self) -> bool:
        """Return True: the factor B stays at the site."""
        return True

    def client(
        self, private: FederatedState | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[FederatedState | None, Payload]:
        """Apply eq. 1, send A, and keep B."""
        spec, received = trainer.spec, payload_tensors(down)
        own_factors = (
            private.tensors if private else {n: torch.zeros(t.shape) for n, t in spec.items() if factor_name(n) == "B"}
        )
        start = {n: received[n] if factor_name(n) == "A" else own_factors[n] for n in spec}
        trained = trainer.train(as_spec(start, spec)).weights
        return FederatedState(parse_factor_name(trained, "B")), Payload(
            self._uploads.sent(parse_factor_name(trained, "A"))
        )

    def server_update(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> FederatedState:
        """Apply Eq. 2; B_0 does not change even if a client sends a B."""
        return FederatedState({**server.tensors, **sums.means(parse_factor_name(server.tensors, "A"))})

    def models(
        self, server: FederatedState, private: FederatedState | None = None, down: Payload | None = None
    ) -> Mapping[str, Weights]:
        """Return the server's model, with B = B_0; with `private` also that client's model (Eq. 3)."""
        clients = {"client": {**server.tensors, **private.tensors}} if private is not None else {}
        return {"server": server.tensors, **clients}

    def layout(self, spec: Spec) -> MessageLayout:
        """Declare A in both directions."""
        shared = parse_factor_name(spec, "A")
        return MessageLayout(dense_fields(shared, "down", self.wire_dtype) + self._uploads.fields(shared))
