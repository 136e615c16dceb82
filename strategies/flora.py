"""FLoRA.

Wang, Shen, He, Sun, Guo, Wang, Li: FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank
Adaptations. NeurIPS 2024. https://arxiv.org/abs/2409.05976

The server stacks the clients' factors instead of averaging them: the stack's product is the mean of the clients'
products. It goes into the base, and the next round starts from fresh factors. Sites may have ranks of their own.

| paper | code | shape, unit |
|---|---|---|
| A_k, B_k | `<module>.lora_A`, `<module>.lora_B`, their first r_k rows and columns | weights; A random, B zero |
| r_k | `ranks[site]`, or the adapter's rank r | 1 to r |
| p_k | `num_examples` over their sum over the cohort | |
| A, B stacked | never formed: their product D_t is a sum over the clients | d_out x d_in |
| Delta W, added up over rounds | `<module>.residual`: R_t | d_out x d_in, weights; zero at first |
| W_0 | the base, which stays as it is: W_t = W_0 + scale R_t | |

    (A_k, B_k) <- local epochs on both, from (A_t of rank r_k, 0), over the base with R_t          (1, client)
    A = [p_1 A_1; ...; p_K A_K],   B = [B_1, ..., B_K]                                             (2, the stack)
    D_t = B A = sum_k p_k B_k A_k                                                                  (3, server)
    R_{t+1} = R_t + D_t                                                                            (4, server and site)

A client shares: both LoRA factors, of a rank that may be the site's own; their mean product goes into the base. With it
stays: a copy of what went into the base.

The client learns: A_t and R_t of every round it takes part in; of the others' products only their mean.
The server learns: each client's trained A and B in full, and n_k; under secure aggregation the sum of B A alone.

Formal guarantees: none by itself (epsilon is infinite); with `dp.*` those of `fedveil.privacy.dp_sgd`. By construction:
R has no gradient, and no upload holds it.

What goes down of R, what sites and server keep of it, and at which size: see `fedveil.adapters.residual_mean`.

| case | result |
|---|---|
| no upload | R stays, and A_t too, bit for bit |
| one upload | its product |
| newcomer, a site that skipped rounds, or one that lost its files | gets R whole |
| a site of the last sums | gets factors of D, of rank sum_k r_k at most; R whole where they would be no smaller |
| an upload of another rank than the site's | refused |
| secure aggregation | a site's vector has B_k A_k, d_out x d_in a layer; it hides the site's rank too |
| `fedveil audit` | R and A_t are read off the broadcasts: a site's start and its trained model are known to the bit |
| the same under secure aggregation | products alone are summed: attacks on gradients are left out, with the reason |
| `final/` | a pair a layer, of the rank of R: up to the smaller of its widths |

Differences from the paper: AdamW. A_t is drawn by the server, once for all clients of a round: in the paper each client
draws its own. The paper sends the stack itself, in which every client sees each other one's factors: here factors of
the product go down, which are as small and show the mean alone. One scale serves all ranks, that of the adapter. What
lies beyond a site's rank is zero and frozen, so a lower rank saves bytes and no computing. The paper's text was not at
hand: the equations follow its abstract and others' accounts of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

import torch

from fedveil.adapters import ranks, residual_mean
from fedveil.adapters.residual_lora import ResidualLora, factors, residuals
from fedveil.algebra.coded import Uploads
from fedveil.algebra.factors import of_factor
from fedveil.contract.layout import Layout, Payload
from fedveil.contract.method import Method, RoundContext, State
from fedveil.contract.spec import Spec, Weights
from fedveil.contract.sums import Sums, Terms
from fedveil.contract.trainer import Trainer
from fedveil.rng import Stream
from fedveil.wire.payloads import WireDtype, cast_to, tensors_of


@final
@dataclass(frozen=True)
class Flora(Method):
    """Everyone shares a pair of its own rank, and the mean of the products goes into the base.

    Attributes:
        ranks: of sites by name, from 1 to the adapter's rank, which all other sites have.
        adapter: LoRA beside a residual; no other adapter has one.
        wire_dtype: dtype of A and B on the wire, both ways; sums and the residual are fp32 whatever it is.
        upload_bits: bits of the codes in which a client sends A and B, 2 to 8, with a scale for every 256 weights; 0:
            none.
    """

    ranks: Mapping[str, int] = field(default_factory=dict)
    adapter: ResidualLora = field(default_factory=ResidualLora)
    wire_dtype: WireDtype = "float32"
    upload_bits: int = 0

    def __post_init__(self) -> None:
        self._uploads  # noqa: B018  # it checks the bits
        ranks.check(self.ranks, self.adapter.rank)

    @property
    def _uploads(self) -> Uploads:
        return Uploads(self.wire_dtype, self.upload_bits)

    def init(self, spec: Spec, weights: Weights, rng: Stream) -> State:
        """(A_0, 0), and R_0, which is zero unless `weights` have one."""
        pairs = {name: torch.zeros_like(w) for name, w in of_factor(factors(weights), "B").items()}
        return residual_mean.start(spec, {**weights, **pairs})

    def broadcast(self, server: State, ctx: RoundContext) -> Payload:
        """A_t, the same for every client, and what this one lacks of R_t."""
        drawn = of_factor(factors(residual_mean.model(server)), "A")
        return residual_mean.broadcast(server, cast_to(drawn, self.wire_dtype), ctx)

    def client(
        self, private: State | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[State | None, Payload]:
        """Eq. 1: a pair of the site's rank is sent; R_t is kept, for the server sends its changes."""
        rank, spec = ranks.of(self.ranks, ctx.site, self.adapter.rank), factors(trainer.spec)
        drawn = of_factor({name: w for name, w in tensors_of(down).items() if name in spec}, "A")
        zero = {name: torch.zeros(tensor.shape) for name, tensor in of_factor(spec, "B").items()}
        pairs = ranks.padded(ranks.cut({**drawn, **zero}, rank), spec)
        kept, found = residual_mean.trained(private, down, trainer, pairs, ranks.beyond(spec, rank))
        return kept, Payload(self._uploads.sent(ranks.cut(found, rank)))

    def check(self, payload: Payload, spec: Spec) -> None:
        """Raises WireError unless all factors have one rank that some site may have."""
        ranks.check_upload(payload, self.ranks, "", self.adapter.rank)

    def check_site(self, payload: Payload, spec: Spec, site: str) -> None:
        """Raises WireError unless it is the site's own rank."""
        ranks.check_upload(payload, self.ranks, site, self.adapter.rank)

    def terms(self, payload: Payload, num_examples: int, spec: Spec, ctx: RoundContext) -> Terms:
        """n_k B_k A_k, and n_k."""
        return Terms(residual_mean.products(self._uploads.opened(payload), num_examples))

    def summed(self, spec: Spec, round_: int) -> Mapping[str, tuple[int, ...]]:
        """The products, under the names of R."""
        return dict.fromkeys(residuals(spec), ())

    def settle(self, server: State, sums: Sums, ctx: RoundContext) -> State:
        """Eqs. 3 and 4, and a new A."""
        shapes = {name: tuple(w.shape) for name, w in factors(residual_mean.model(server)).items()}
        pairs = self.adapter.draw(shapes, ctx.rng("A"), {})
        stacked = sum(ranks.of(self.ranks, site, self.adapter.rank) for site in sums.clear)
        return residual_mean.settled(server, sums, pairs, subtracted=False, ranks=stacked, ctx=ctx)

    def deployed(
        self, server: State, private: State | None = None, down: Payload | None = None
    ) -> Mapping[str, Weights]:
        """One model: the server's, whose B is zero. What a site keeps of R is the server's too."""
        return {"server": residual_mean.model(server)}

    def layout(self, spec: Spec) -> Layout:
        """Down: A, and R, or factors of its last change, or nothing of it. Up: both factors, of the site's rank."""
        pairs = factors(spec)
        up = ranks.fields(self._uploads.fields(pairs), self.ranks)
        return Layout(residual_mean.fields(spec, of_factor(pairs, "A"), self.wire_dtype) + up)
