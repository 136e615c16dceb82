"""FLoRA.

Wang, Shen, He, Sun, Guo, Wang, Li: FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank
Adaptations. NeurIPS 2024. https://arxiv.org/abs/2409.05976

The server stacks the clients' factors instead of averaging them, and the product of the stacks is the mean of the
clients' products. The server adds this product to the base, and the next round starts from fresh factors. Sites may
have different ranks.

| paper | code | shape, unit |
|---|---|---|
| A_k, B_k | `<module>.lora_A`, `<module>.lora_B`, their first r_k rows and columns | weights; A random, B zero |
| r_k | `ranks[site]`, or the adapter's rank r | 1 to r |
| p_k | `num_examples` divided by their sum over the cohort | |
| A, B stacked | never formed: their product D_t is a sum over the clients | d_out x d_in |
| Delta W, accumulated over rounds | `<module>.residual`: R_t | d_out x d_in, weights; zero at first |
| W_0 | the base, which never changes: W_t = W_0 + scale R_t | |

    (A_k, B_k) <- local epochs on both, from (A_t of rank r_k, 0), over the base with R_t          (1, client)
    A = [p_1 A_1; ...; p_K A_K],   B = [B_1, ..., B_K]                                             (2, the stack)
    D_t = B A = sum_k p_k B_k A_k                                                                  (3, server)
    R_{t+1} = R_t + D_t                                                                            (4, server and site)

A client shares: both LoRA factors, possibly of the site's own rank; their mean product goes into the base. A client
keeps: a copy of the change to the base; under secure aggregation, nothing.

The client learns: A_t and R_t of every round it takes part in, but only the mean of the other clients' products.
The server learns: each client's trained A and B in full, and n_k; under secure aggregation, if it
follows the protocol, the sum of B A.

Formal guarantees: none by itself (epsilon is infinite); with `dp.*`, see `fedveil.privacy.dp_sgd`. By construction,
R has no gradient, and no upload contains it.

`fedveil.adapters.residual_aggregation` describes which part of R is broadcast, and which parts the sites and the server
keep.

| case | result |
|---|---|
| no upload | R and A_t stay unchanged, bit for bit |
| one upload | D_t is that upload's product |
| newcomer, or a site that skipped rounds or lost its files | gets the whole R |
| a site in the last sums | gets factors of D, of rank at most sum_k r_k, or the whole R if that is no larger |
| an upload with a different rank than the site's | refused |
| secure aggregation | a site's vector includes B_k A_k, d_out x d_in per layer. A rank that too few sites in the cohort
  have is neither trained nor sent in that round, because it would show in the sum. All sites get the whole R, in one
  message which the plan names, and keep no copy |
| `fedveil audit` | the broadcasts reveal R and A_t, so a site's initial and trained models are known exactly |
| the same under secure aggregation | only products are summed; the audit skips attacks on gradients and says why |
| `final/` | one pair per layer with the rank of R, at most the smaller of the layer's widths |

Differences from the paper: the optimizer is AdamW. The server draws A_t once for all clients in a round; in the paper
each client draws its own. The paper sends the stack itself, which shows every client the others' factors. Here the
server sends factors of the product, which are equally small and show only the mean. All ranks use the adapter's scale.
Entries beyond a site's rank are zero and frozen, so a lower rank saves bytes but no computation. The paper's text was
not available: the equations follow its abstract and other authors' accounts of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

import torch

from fedveil.adapters import heterogeneous_ranks, residual_aggregation
from fedveil.adapters.heterogeneous_ranks import HeterogeneousRankMethod
from fedveil.adapters.residual_lora import ResidualLoraAdapter, factor_names, residual_names
from fedveil.contract.contributions import AggregateSums, ClientContributions
from fedveil.contract.layout import MessageLayout, Payload
from fedveil.contract.method import FederatedState, RoundContext
from fedveil.contract.param_spec import Spec, Weights
from fedveil.contract.trainer import Trainer
from fedveil.ops.lora_algebra import parse_factor_name
from fedveil.rng import RandomStream
from fedveil.wire.payloads import WireDtype, cast_to, payload_tensors

__all__ = ["FLoRA"]


@final
@dataclass(frozen=True)
class FLoRA(HeterogeneousRankMethod):
    """Every client shares a pair of its own rank, and the server adds the mean of the products to the base.

    Attributes:
        ranks: rank by site name, from 1 to the adapter's rank; all other sites have the adapter's rank.
        adapter: LoRA with a residual; no other adapter has one.
        wire_dtype: dtype of A and B on the wire in both directions; sums and the residual are always fp32.
        upload_bits: bits per entry of the uploaded A and B, 2 to 8, with one scale per 256 entries; 0 disables
            quantization.
    """

    ranks: Mapping[str, int] = field(default_factory=dict)
    adapter: ResidualLoraAdapter = field(default_factory=ResidualLoraAdapter)
    wire_dtype: WireDtype = "float32"
    upload_bits: int = 0

    @property
    def server_optimizer_conflict(self) -> str:
        """Return why a server optimizer is refused: the base must absorb exactly the sum of the sites' products."""
        return "would move the base away from the products that the sites have added to it"

    @property
    def stale_upload_conflict(self) -> str:
        """Return why late uploads are refused: each round has new factors."""
        return "adds the products of one round's factors to the base, and draws new factors"

    @property
    def sends_same_broadcast(self) -> bool:
        """Return True: under secure aggregation every site gets the whole residual."""
        return True

    @property
    def keeps_private_state(self) -> bool:
        """Return True: in a run without secure aggregation, the residual stays at the site."""
        return True

    @property
    def has_bound_broadcast(self) -> bool:
        """Return True: under secure aggregation no site keeps the residual."""
        return True

    def init(self, spec: Spec, weights: Weights, rng: RandomStream) -> FederatedState:
        """Return (A_0, 0), and R_0, which is zero unless `weights` include it."""
        pairs = {name: torch.zeros_like(w) for name, w in parse_factor_name(factor_names(weights), "B").items()}
        return residual_aggregation.start_state(spec, {**weights, **pairs})

    def broadcast(self, server: FederatedState, ctx: RoundContext) -> Payload:
        """Return A_t, the same for every client, and the part of R_t that this client lacks."""
        drawn = parse_factor_name(factor_names(residual_aggregation.server_model(server)), "A")
        return residual_aggregation.make_broadcast(server, cast_to(drawn, self.wire_dtype), ctx)

    def client(
        self, private: FederatedState | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[FederatedState | None, Payload]:
        """Apply eq. 1, send a pair of the site's rank, and keep R_t, because the server later sends only changes."""
        rank, spec = self.rank_in_round(ctx.site, ctx), factor_names(trainer.spec)
        drawn = parse_factor_name({name: w for name, w in payload_tensors(down).items() if name in spec}, "A")
        zero = {name: torch.zeros(tensor.shape) for name, tensor in parse_factor_name(spec, "B").items()}
        pairs = heterogeneous_ranks.pad_to_rank(heterogeneous_ranks.cut_to_rank({**drawn, **zero}, rank), spec)
        new_state, trained_pairs = residual_aggregation.client_upload(
            private, down, trainer, pairs, heterogeneous_ranks.rows_beyond(spec, rank), ctx
        )
        return new_state, Payload(self._uploads.sent(heterogeneous_ranks.cut_to_rank(trained_pairs, rank)))

    def contributions(self, payload: Payload, num_examples: int, spec: Spec, ctx: RoundContext) -> ClientContributions:
        """Return n_k B_k A_k, and n_k itself."""
        return ClientContributions(residual_aggregation.factor_products(self._uploads.opened(payload), num_examples))

    def aggregate_shapes(self, spec: Spec, round_: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the products, under the names of R."""
        return dict.fromkeys(residual_names(spec), ())

    def server_update(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> FederatedState:
        """Apply eqs. 3 and 4, and draw a new A."""
        shapes = {name: tuple(w.shape) for name, w in factor_names(residual_aggregation.server_model(server)).items()}
        pairs = self.adapter.draw(shapes, ctx.rng("A"), {})
        stacked = sum(self.rank_in_round(site, ctx) for site in sums.clear)
        return residual_aggregation.settle_residual(server, sums, pairs, subtracted=False, ranks=stacked, ctx=ctx)

    def models(
        self, server: FederatedState, private: FederatedState | None = None, down: Payload | None = None
    ) -> Mapping[str, Weights]:
        """Return one model, the server's, with B = 0. Each site's copy of R is the same as the server's."""
        return {"server": residual_aggregation.server_model(server)}

    def layout(self, spec: Spec) -> MessageLayout:
        """Declare A down, possibly with R or the factors of its last change; up, a pair of the site's rank."""
        pairs = factor_names(spec)
        up = heterogeneous_ranks.rank_fields(self._uploads.fields(pairs), self.ranks)
        return MessageLayout(
            residual_aggregation.residual_fields(spec, parse_factor_name(pairs, "A"), self.wire_dtype) + up
        )
