"""FedPara.

Hyeon-Woo, Ye-Bin, Oh: FedPara: Low-Rank Hadamard Product for Communication-Efficient Federated Learning.
ICLR 2022. https://arxiv.org/abs/2108.06098. This file applies its personalized variant (pFedPara) to LoRA pairs, like
the baseline of Park et al. (FedRand, 2025, appendix A.3).

Every layer has two low-rank pairs. The server averages one pair over all clients. The other pair scales the first
pair's product entry by entry and never leaves the site.

| paper | code | shape, unit |
|---|---|---|
| A, B | `<module>.lora_A`, `<module>.lora_B` | r x d_in and d_out x r, weights; A random, B zero at first |
| A_p^k, B_p^k | `<module>.private_A`, `<module>.private_B` of client k | same; `adapter.form` sets the initial B_p |
| o | entrywise product | |
| s | `adapter.scale` | alpha / r |
| n_k, m_r | `num_examples`, their sum over the cohort | examples |

    W^k     = W_0 + s (B A) o (B_p^k A_p^k + 1)      (1, form "plus-one")
    W^k     = W_0 + s (B A) o (B_p^k A_p^k)          (1', form "product")
    start_k = (A_r, B_r, A_p^k, B_p^k)               (2, the private pair as client k last trained it)
    A_{r+1} = sum_k (n_k / m_r) A^k, also for B      (3, on the server)
    W       = W_0 + s B A                            (4, the server's model: the private factor is 1 everywhere)

A client shares: one pair of factors per layer. A client keeps: a second pair, whose product scales the product of
the first entry by entry.

The client learns: A and B of every round it takes part in.
The server learns: each client's trained A and B, in full, and n_k. It learns nothing about the private pair directly,
but the gradients of A and B depend on that pair.

Formal guarantees: none (epsilon is infinite). By construction, no field of the layout carries a private pair, so a
message cannot contain one.

| case | result |
|---|---|
| first participation | the client draws its private pair from its own secret: A_p uniform within 1/sqrt(d_in); B_p zero
  in form "plus-one" (so that W^k is the server's model), from N(0, 1/r) in form "product" |
| site that lost its private state | it draws a new pair, as at its first participation |
| site that is new to the server but has private state | it continues with its own pair |
| form "product", starting from B_p = 0 | with B = 0, every gradient would be zero and training would never start, so
  B_p is drawn at random |
| form "plus-one", B = 0 and B_p = 0 | only B has a gradient in the first step; after that, all four factors do |
| form "product", the server's model | every client trains A and B under its own random factor, mostly far below 1. With
  factor 1 instead, (4) is a model that no client trained, so it may learn nothing |
| no upload | A and B stay unchanged, bit for bit |

Differences from the paper: pFedPara trains a network from scratch with weights (X_1 Y_1^T) o (X_2 Y_2^T + 1); here
the products change a frozen W_0. FedRand's text can be read as (1) or (1'); the default is (1), as in pFedPara.
The neutral private pair in (4) is exact in both forms: B_p = 0, or one row and one column of ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from fedveil.adapters.hadamard import HadamardLoraAdapter
from fedveil.contract.contributions import AggregateSums
from fedveil.contract.layout import MessageLayout, Payload
from fedveil.contract.method import FederatedState, RoundContext
from fedveil.contract.param_spec import Spec, Weights
from fedveil.contract.trainer import Trainer
from fedveil.ops.lora_algebra import drop_private_factors, factor_modules
from fedveil.ops.weight_averaging import WeightAveragingMethod
from fedveil.rng import RandomStream
from fedveil.wire.payloads import WireDtype, as_spec, dense_fields, payload_tensors

__all__ = ["FedPara"]


@final
@dataclass(frozen=True)
class FedPara(WeightAveragingMethod):
    """Every layer has two low-rank pairs: a client shares one and keeps the other.

    Attributes:
        adapter: the two pairs, and how the private pair enters the product.
        wire_dtype: dtype on the wire in both directions; sums are always fp32.
        upload_bits: bits per entry of the uploaded pair, 2 to 8, with one scale per 256 entries; 0 disables
            quantization.
    """

    adapter: HadamardLoraAdapter = field(default_factory=HadamardLoraAdapter)
    wire_dtype: WireDtype = "float32"
    upload_bits: int = 0

    @property
    def keeps_private_state(self) -> bool:
        """Return True: the private pair stays at the site."""
        return True

    def init(self, spec: Spec, weights: Weights, rng: RandomStream) -> FederatedState:
        """Return (A_0, B_0) without the task's private pair, because every client draws its own."""
        shared = drop_private_factors(weights)
        factor_modules(shared)
        return FederatedState(shared)

    def client(
        self, private: FederatedState | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[FederatedState | None, Payload]:
        """Apply eq. 2, train both pairs, and send the shared one."""
        received = payload_tensors(down)
        own = private.tensors if private is not None else self._drawn(trainer.spec, ctx.rng("private pair"))
        start = {n: received[n] if n in received else own[n] for n in trainer.spec}  # Eq. 2
        trained = trainer.train(as_spec(start, trainer.spec)).weights
        return FederatedState(dict(trained)), Payload(self._uploads.sent(drop_private_factors(trained)))

    def _drawn(self, spec: Spec, rng: RandomStream) -> dict[str, Tensor]:
        shared = drop_private_factors(spec)
        return self.adapter.draw({n: t.shape for n, t in spec.items() if n not in shared}, rng, {})

    def server_update(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> FederatedState:
        """Apply eq. 3."""
        return FederatedState(sums.means(server.tensors))

    def models(
        self, server: FederatedState, private: FederatedState | None = None, down: Payload | None = None
    ) -> Mapping[str, Weights]:
        """Return the server's model (Eq. 4); with `private` also that client's model, with its last trained pairs."""
        clients = {"client": private.tensors} if private is not None else {}
        return {"server": self._with_neutral_pair(server.tensors), **clients}

    def _with_neutral_pair(self, shared: Weights) -> dict[str, Tensor]:
        """Return all four factors of every module, with private factors that have no effect (Eq. 4)."""
        whole: dict[str, Tensor] = {}
        for module in factor_modules(shared):
            a, b = shared[f"{module}.lora_A"], shared[f"{module}.lora_B"]
            private_a, private_b = torch.zeros_like(a), torch.zeros_like(b)
            if self.adapter.form == "product":  # one row times one column of ones: exactly 1 everywhere
                private_a[0], private_b[:, 0] = 1.0, 1.0
            pair = {f"{module}.lora_A": a, f"{module}.lora_B": b}
            whole |= {**pair, f"{module}.private_A": private_a, f"{module}.private_B": private_b}
        return whole

    def layout(self, spec: Spec) -> MessageLayout:
        """Declare the shared pair in both directions."""
        shared = drop_private_factors(spec)
        return MessageLayout(dense_fields(shared, "down", self.wire_dtype) + self._uploads.fields(shared))
