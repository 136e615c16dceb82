"""HetLoRA.

Cho, Liu, Xu, Fahrezi, Joshi: Heterogeneous LoRA for Federated Fine-tuning of On-device Foundation Models.
EMNLP 2024. https://arxiv.org/abs/2401.06432

Sites may have different ranks. The server truncates its factors to each site's rank and pads the uploads with
zeros.

| paper | code | shape, unit |
|---|---|---|
| B, A | `<module>.lora_B`, `<module>.lora_A` | d_out x r_max and r_max x d_in, weights; A random, B zero at first |
| r_max | the adapter's rank r | |
| r_k | `ranks[site]`, or r; with `pruning`, the rank of its last upload | 1 to r |
| lambda, gamma | `pruning`, `pruning_factor`; with `pruning = 0`, r_k never falls | loss per squared weight; below 1 |
| S_k | `weights = "norm"`: the norm of B_k A_k, per layer; `weights = "examples"`: n_k | Frobenius; examples |

    A_k = A[:r_k],  B_k = B[:, :r_k]                                                (1, server: truncation)
    (A_k, B_k) <- local epochs on f_k + lambda T_k                                  (2, client)
    T_k = sum over layers |B_k[:, s:r_k]| |A_k[s:r_k]|,    s = floor(gamma r_k)     (2, its tail)
    r_k <- s, and A_k, B_k are truncated to s, if T_k fell in (2)                   (2, rank self-pruning)
    A = sum_k (S_k / sum_j S_j) [A_k; 0],  B = sum_k (S_k / sum_j S_j) [B_k, 0]     (3, server)

A client shares: both LoRA factors, possibly of the site's own rank. A client keeps: nothing.

The client learns: the first r_k rows of A and columns of B of every round it takes part in; under secure
aggregation, those of the largest rank that any site sends.
The server learns: each client's trained A_k and B_k in full, and n_k; with `pruning` also r_k, which depends on the
client's training.

Formal guarantees: none by itself (epsilon is infinite); with `dp.*`, see `fedveil.privacy.dp_sgd`.

| case | result |
|---|---|
| no upload | A and B stay unchanged, bit for bit |
| all ranks are r, weights "examples", `pruning = 0` | FedAvg |
| weights "norm" and `pruning` above 0 | HetLoRA as in its paper; the defaults are plain zero padding |
| B_k = 0, as in round 0 | T_k cannot fall: no rank is pruned |
| r_k = 1 | the rank is never pruned further |
| a site that skipped rounds | has the rank of its last accepted upload |
| `pruning` under secure aggregation | refused: no plan can guarantee enough sites in each rank's sum |
| a row of A and column of B that only some of the cohort have | averaged with zeros for the others, as in (3) |
| a row and column that no client in the cohort has | stay unchanged, bit for bit |
| weights "norm", an upload whose B_k A_k is 0 in a layer | has no weight there |
| weights "norm", a site that makes its factors large | has proportionally more weight: set `cohort.max-norm-ratio` |
| weights "norm" under secure aggregation | the site refuses: secure weights are whole numbers of examples |
| an upload with a different rank than the site's | refused; with `pruning`, refused above the site's first rank |
| secure aggregation | a rank that too few sites in the cohort have is neither trained nor sent in that round. All
  sites get the largest rank that is left, in one message which the plan names, and each trains its own ranks |

Differences from the paper: a row of A and column of B that no client in the cohort has stay unchanged. By (3) they
would become 0, and once both are 0, neither ever has a gradient. The paper weights by "norm". Here the default is
weighting by examples, because a hostile site can choose its norm, and no self-pruning, because a rank that depends on a
site's examples reveals something about them. All layers of a site have the same rank. All ranks use the adapter's
scale. The optimizer is AdamW. The paper's text was not available, so the equations follow its abstract and other
authors' accounts of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast, final

import torch
from torch import Tensor

from fedveil.adapters import heterogeneous_ranks
from fedveil.adapters.heterogeneous_ranks import HeterogeneousRankMethod
from fedveil.adapters.lora import LoraAdapter
from fedveil.contract.contributions import AggregateSums, ClientContributions, Contribution, weighted_contributions
from fedveil.contract.entry_table import EntryTable
from fedveil.contract.layout import MessageLayout, Payload
from fedveil.contract.method import FederatedState, RoundContext
from fedveil.contract.param_spec import Spec, Weights
from fedveil.contract.privacy import check_number
from fedveil.contract.trainer import Penalty, Trainer
from fedveil.errors import ConfigError
from fedveil.ops.lora_algebra import factor_modules, factor_product
from fedveil.rng import RandomStream
from fedveil.wire.payloads import WireDtype, as_spec, cast_to, dense_fields, payload_tensors

__all__ = ["HetLoRA"]


@final
@dataclass(frozen=True)
class HetLoRA(HeterogeneousRankMethod):
    """Every client shares both factors, at its own rank.

    Attributes:
        ranks: rank by site name, from 1 to the adapter's rank; all other sites have the adapter's rank.
        weights: weight of an upload: its "examples", or the "norm" of its product in each layer, as in the
            paper.
        pruning: lambda, the weight of the term that shrinks a site's last ranks, which are then pruned; 0 disables it.
        pruning_factor: gamma, the fraction of its rank that a site keeps when it prunes.
        adapter: LoRA; no other adapter has factors.
        wire_dtype: dtype on the wire in both directions; sums are always fp32.
        upload_bits: bits per entry of the uploaded A and B, 2 to 8, with one scale per 256 entries; 0 disables
            quantization.
    """

    ranks: Mapping[str, int] = field(default_factory=dict)
    weights: Literal["examples", "norm"] = "examples"
    adapter: LoraAdapter = field(default_factory=LoraAdapter)
    wire_dtype: WireDtype = "float32"
    upload_bits: int = 0
    pruning: float = 0.0
    pruning_factor: float = 0.99

    def __post_init__(self) -> None:
        self._uploads  # noqa: B018  # this access checks upload_bits
        heterogeneous_ranks.check_ranks(self.ranks, self.adapter.rank)
        check_number("pruning", self.pruning, zero=True)
        if not 0 < self.pruning_factor < 1:
            raise ConfigError(f"pruning_factor: expected a number above 0 and below 1, found {self.pruning_factor}")

    @property
    def has_partial_uploads(self) -> bool:
        """Return whether sites may send different ranks."""
        return self.pruning > 0 or any(rank < self.adapter.rank for rank in self.ranks.values())

    @property
    def has_single_site_entries(self) -> bool:
        """Return False: secure aggregation refuses ranks that fall, and plans all other ranks."""
        return False

    @property
    def site_score_conflict(self) -> str:
        """Return why a site cannot score the server's model: with a lower rank, it has only a part of the factors."""
        return "truncates the model to each site's rank, so a site would score its truncated model"

    @property
    def stale_upload_conflict(self) -> str:
        """Return why late uploads are refused: the zeros that pad an upload are not a change made by training."""
        return "pads uploads with zeros up to the largest rank in a round"

    def check_entries(self, sites: int, drawn: int, fewest: int) -> None:
        """Raise ConfigError if ranks can fall, or if too few sites have the largest rank."""
        self._require_fixed_ranks()
        HeterogeneousRankMethod.check_entries(self, sites, drawn, fewest)

    def plan_entries(self, spec: Spec, cohort: Sequence[str], fewest: int, ctx: RoundContext) -> EntryTable:
        """Return the ranks that at least `fewest` sites in the cohort have. Raises ConfigError if ranks can fall."""
        self._require_fixed_ranks()
        return HeterogeneousRankMethod.plan_entries(self, spec, cohort, fewest, ctx)

    def _require_fixed_ranks(self) -> None:
        if self.pruning:
            raise ConfigError(
                "pruning: secure.enabled requires 0, because a rank that falls during training could leave too "
                "few sites in a sum; set pruning = 0 and fix the ranks"
            )

    def check_site(self, payload: Payload, spec: Spec, site: str) -> None:
        """Raise WireError unless the factors have the site's own rank, or, with pruning, at most its first rank."""
        if not self.pruning:
            heterogeneous_ranks.check_upload(payload, self.rank_of(site), site, self.adapter.rank)
            return
        rank = heterogeneous_ranks.rank_of_upload(payload)
        heterogeneous_ranks.check_upload(payload, min(rank, self.rank_of(site)), site, self.adapter.rank)

    def starting_weights(self, received: Weights, spec: Spec) -> Weights:
        """Return the factors, padded with zeros beyond the rank that the site received."""
        return heterogeneous_ranks.pad_to_rank(received, spec)

    @property
    def sends_same_broadcast(self) -> bool:
        """Return True: under secure aggregation all sites get the largest rank, of which each trains its own."""
        return True

    def init(self, spec: Spec, weights: Weights, rng: RandomStream) -> FederatedState:
        """Return (A, B) at the largest rank, drawn once for all clients."""
        factor_modules(spec)
        return FederatedState(dict(weights), {"ranks": {}} if self.pruning else {})

    def _current_rank(self, server: FederatedState, ctx: RoundContext) -> int:
        ranks = cast("Mapping[str, int]", server.scalars.get("ranks", {}))
        return ranks.get(ctx.site, self.rank_in_round(ctx.site, ctx))

    def broadcast(self, server: FederatedState, ctx: RoundContext) -> Payload:
        """Return the factors for a client of this rank (eq. 1); under secure aggregation, of the largest rank."""
        rank = self.largest_rank_in_round(ctx) if ctx.in_secure_sum else self._current_rank(server, ctx)
        return Payload(cast_to(heterogeneous_ranks.cut_to_rank(server.tensors, rank), self.wire_dtype))

    def client(
        self, private: FederatedState | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[FederatedState | None, Payload]:
        """Apply eq. 2: train and send a pair of the site's rank, and keep no state."""
        rank, spec = self.rank_in_round(ctx.site, ctx), trainer.spec
        if self.pruning:
            rank = min(rank, heterogeneous_ranks.rank_of_upload(down))
        sent = self.largest_rank_in_round(ctx) if ctx.in_secure_sum else rank
        heterogeneous_ranks.check_upload(down, sent, ctx.site, self.adapter.rank)
        received = heterogeneous_ranks.cut_to_rank(payload_tensors(down), rank)
        start = as_spec(self.starting_weights(received, spec), spec)
        fewer = max(1, int(self.pruning_factor * rank))
        shrink = _tail_penalty(self.pruning, fewer) if self.pruning and fewer < rank else None
        trained = trainer.train(start, heterogeneous_ranks.rows_beyond(spec, rank), shrink).weights
        if shrink is not None and float(shrink(trained)) < float(shrink(start)):
            rank = fewer
        return None, Payload(self._uploads.sent(heterogeneous_ranks.cut_to_rank(trained, rank)))

    def contributions(self, payload: Payload, num_examples: int, spec: Spec, ctx: RoundContext) -> ClientContributions:
        """Return S_k A_k and S_k B_k, padded with zeros beyond their rank, and S_k itself."""
        factors = self._uploads.opened(payload)
        clear = {"rank": float(heterogeneous_ranks.rank_of_upload(payload))} if self.pruning else {}
        if self.weights == "norm":
            return ClientContributions(_by_norm(factors, spec), clear)
        padded = heterogeneous_ranks.pad_to_rank(factors, spec)
        return ClientContributions(weighted_contributions(padded, num_examples).tensors, clear)

    def server_update(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> FederatedState:
        """Apply eq. 3; entries beyond the largest rank in the sums do not change."""
        new = sums.means(server.tensors)
        for name, unseen in self._unsent(server, sums, ctx).items():
            new[name] = torch.where(unseen, server.tensors[name], new[name])
        if not self.pruning:
            return FederatedState(new)
        now = {site: int(of["rank"]) for site, of in sums.clear.items()}
        return FederatedState(new, {"ranks": {**cast("Mapping[str, int]", server.scalars["ranks"]), **now}})

    def changed_entries(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> Mapping[str, Tensor]:
        """Return masks of the entries up to the largest rank in the sums."""
        changed = {name: sums.moved(name) for name in server.tensors if name in sums}
        for name, unseen in self._unsent(server, sums, ctx).items():
            if name in changed:
                changed[name] = changed[name] & ~unseen
        return changed

    def _unsent(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> Mapping[str, Tensor]:
        """Return masks of the entries beyond the largest rank in the sums."""
        ranks = (int(of["rank"]) if "rank" in of else self.rank_in_round(site, ctx) for site, of in sums.clear.items())
        most = max(ranks, default=0)
        return heterogeneous_ranks.rows_beyond(server.tensors, most)

    def layout(self, spec: Spec) -> MessageLayout:
        """Declare both factors at the site's rank, in both directions."""
        down, up = dense_fields(spec, "down", self.wire_dtype), self._uploads.fields(spec)
        if not (self.ranks or self.pruning):
            return MessageLayout(down + up)
        return MessageLayout(heterogeneous_ranks.open_fields(down) + heterogeneous_ranks.open_fields(up))


def _tail_penalty(strength: float, first: int) -> Penalty:
    """Return strength T_k as a penalty; T_k sums the products of both factors' norms from rank `first` on."""

    def penalty(now: Weights) -> Tensor:
        norm = torch.linalg.vector_norm
        tails = [
            norm(now[f"{module}.lora_B"][:, first:]) * norm(now[f"{module}.lora_A"][first:])
            for module in factor_modules(now)
        ]
        return strength * torch.stack(tails).sum()

    return penalty


def _by_norm(found: Weights, spec: Spec) -> Iterator[Contribution]:
    """Yield the terms of every layer with a nonzero product, weighted by the norm of that product."""
    for module in factor_modules(found):
        norm = float(torch.linalg.vector_norm(factor_product(found, module)))
        pair = {name: found[name] for name in (f"{module}.lora_A", f"{module}.lora_B")}
        if norm > 0:
            yield from weighted_contributions(heterogeneous_ranks.pad_to_rank(pair, spec), norm).tensors
