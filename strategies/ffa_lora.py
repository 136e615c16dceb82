"""FFA-LoRA.

Sun, Li, Li, Ding: Improving LoRA in Privacy-preserving Federated Learning. ICLR 2024.
https://arxiv.org/abs/2403.12313

One LoRA factor, A, is drawn once and never trained. Clients train and share only B.

| paper | code | shape, unit |
|---|---|---|
| A_0 | `<module>.lora_A` | r x d_in, weights; random, the same at every client and in every round |
| B_i | `<module>.lora_B` | d_out x r, weights; zero at first |
| n_i, m_t | `num_examples`, their sum over the cohort | examples |

    W_i = W_0 + scale B_i A_0                                                   (1, the client's model)
    B_i <- local epochs only on B, from B_t                                     (2, client)
    B_{t+1} = sum_i (n_i / m_t) B_i                                             (3, server)
    sum_i (n_i / m_t) B_i A_0 = B_{t+1} A_0                                     (4: the mean of the products is exact)

With `dp.*`, methods that train both factors multiply the noise in A by the noise in B. Here a step adds noise only to
B, and the bound C on a per-example gradient covers only B.

A client shares: one LoRA factor, B; the other one, A, is never trained. A client keeps: nothing.

The client learns: A_0, and B_t of every round it takes part in.
The server learns: each client's trained B in full and n_i, and so the client's whole model, because it drew A_0.

Formal guarantees: none by itself (epsilon is infinite); with `dp.*`, see `fedveil.privacy.dp_sgd`. By construction,
no bit of A ever changes, and no upload contains A.

| case | result |
|---|---|
| no upload | B stays unchanged, bit for bit |
| one upload | its B, bit for bit |
| in a step | A has no gradient, no optimizer state and no weight decay, and does not count in gradient norms |
| a site that skipped rounds, or lost its files | no effect: a site keeps no state |
| the rank is one | A_0 fixes one direction of the inputs for the whole run |

Differences from the paper: the optimizer is AdamW instead of SGD; the mean is over the round's cohort. A is in every
broadcast although it never changes. So a site keeps no state, and the noise can be added to the sum of the uploads
(`secure.noise = "sum"`), which methods with private state do not allow. As in the paper, uploads are half the size, but
here broadcasts are not. The paper's text was not available: the equations follow its abstract, and other authors' code
that runs it as a baseline.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from fedveil.adapters.lora import LoraAdapter
from fedveil.contract.contributions import AggregateSums
from fedveil.contract.layout import MessageLayout, Payload
from fedveil.contract.method import FederatedState, RoundContext
from fedveil.contract.param_spec import Spec
from fedveil.contract.trainer import Trainer
from fedveil.ops.lora_algebra import held_factors, parse_factor_name
from fedveil.ops.weight_averaging import LoraAveragingMethod
from fedveil.wire.payloads import WireDtype, as_spec, dense_fields, payload_tensors

__all__ = ["FFALoRA"]


@final
@dataclass(frozen=True)
class FFALoRA(LoraAveragingMethod):
    """Every client trains and shares B; A is drawn once and never trained.

    Attributes:
        adapter: LoRA; no other adapter has factors.
        wire_dtype: dtype on the wire in both directions; sums are always fp32.
        upload_bits: bits per entry of the uploaded B, 2 to 8, with one scale per 256 entries; 0 disables
            quantization.
    """

    adapter: LoraAdapter = field(default_factory=LoraAdapter)
    wire_dtype: WireDtype = "float32"
    upload_bits: int = 0

    def client(
        self, private: FederatedState | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[FederatedState | None, Payload]:
        """Apply eq. 2: train and send B, and keep no state."""
        start = as_spec(payload_tensors(down), trainer.spec)
        trained = trainer.train(start, held_factors(trainer.spec, "A")).weights
        return None, Payload(self._uploads.sent(parse_factor_name(trained, "B")))

    def server_update(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> FederatedState:
        """Apply Eq. 3; A does not change even if a client sends an A."""
        return FederatedState({**server.tensors, **sums.means(parse_factor_name(server.tensors, "B"))})

    def layout(self, spec: Spec) -> MessageLayout:
        """Declare both factors down, and B up."""
        return MessageLayout(
            dense_fields(spec, "down", self.wire_dtype) + self._uploads.fields(parse_factor_name(spec, "B"))
        )
