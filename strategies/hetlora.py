"""HetLoRA.

Cho, Liu, Xu, Fahrezi, Joshi: Heterogeneous LoRA for Federated Fine-tuning of On-device Foundation Models.
EMNLP 2024. https://arxiv.org/abs/2401.06432

Sites may have different ranks. The server truncates its factors to a site's rank and pads the uploads with
zeros.

| paper | code | shape, unit |
|---|---|---|
| B, A | `<module>.lora_B`, `<module>.lora_A` | d_out x r_max and r_max x d_in, weights; A random, B zero at first |
| r_max | the adapter's rank r | |
| r_k | `ranks[site]`, or r | 1 to r; the same in every round |
| S_k | the norm of B_k A_k: `weights = "norm"`, layer by layer; n_k: `weights = "examples"` | Frobenius; examples |

    A_k = A[:r_k],  B_k = B[:, :r_k]                                                (1, server: cut)
    (A_k, B_k) <- local epochs on both                                              (2, client)
    A = sum_k (S_k / sum_j S_j) [A_k; 0],  B = sum_k (S_k / sum_j S_j) [B_k, 0]     (3, server)

A client shares: both LoRA factors, possibly of the site's own rank. A client keeps: nothing.

The client learns: the first r_k rows of A and columns of B of every round it takes part in.
The server learns: each client's trained A_k and B_k in full, and n_k.

Formal guarantees: none by itself (epsilon is infinite); with `dp.*` those of `fedveil.privacy.dp_sgd`.

| case | result |
|---|---|
| no upload | A and B stay, bit for bit |
| all ranks are r, weights "examples" | FedAvg |
| a row of A and column of B that some of the cohort have | the mean with the others' zeros, as in (3) |
| a row and column that no client in the cohort has | stays, bit for bit |
| weights "norm", an upload whose B_k A_k is 0 in a layer | has no weight there |
| weights "norm", a site that makes its factors large | has proportionally more weight: set `cohort.max-norm-ratio` |
| weights "norm" under secure aggregation | the site refuses: secure weights are whole numbers of examples |
| an upload of another rank than the site's | refused |
| secure aggregation | a rank that too few sites of the cohort have is neither trained nor sent in that round |

Differences from the paper: a row of A and column of B that no client in the cohort has stay unchanged. By (3) they
would become 0, and once both are 0, neither has a gradient again. The paper weights by "norm". Here the default is
by examples, because a hostile site can choose its norm. Rank self-pruning, by which a site lowers its rank, is
left out: a rank that depends on a site's examples would reveal something about them. `ranks` fixes each site's
rank before the run. All ranks use one scale, the adapter's. The optimizer is AdamW. The paper's text was not
available, so the equations follow its abstract and other authors' accounts of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, final

import torch
from torch import Tensor

from fedveil.adapters import heterogeneous_ranks
from fedveil.adapters.heterogeneous_ranks import HeterogeneousRankMethod
from fedveil.adapters.lora import LoraAdapter
from fedveil.contract.contributions import AggregateSums, ClientContributions, Contribution, weighted_contributions
from fedveil.contract.layout import MessageLayout, Payload
from fedveil.contract.method import FederatedState, RoundContext
from fedveil.contract.param_spec import Spec, Weights
from fedveil.contract.trainer import Trainer
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
        adapter: LoRA; no other adapter has factors.
        wire_dtype: dtype on the wire in both directions; sums are always fp32.
        upload_bits: bits per code of the uploaded A and B, 2 to 8, with a scale per 256 weights; 0: not
            quantized.
    """

    ranks: Mapping[str, int] = field(default_factory=dict)
    weights: Literal["examples", "norm"] = "examples"
    adapter: LoraAdapter = field(default_factory=LoraAdapter)
    wire_dtype: WireDtype = "float32"
    upload_bits: int = 0

    def starting_weights(self, received: Weights, spec: Spec) -> Weights:
        """Return the factors with zeros beyond the rank that the site was sent."""
        return heterogeneous_ranks.pad_to_rank(received, spec)

    @property
    def sends_same_broadcast(self) -> bool:
        """Return whether all sites have one rank."""
        return not self.ranks

    def init(self, spec: Spec, weights: Weights, rng: RandomStream) -> FederatedState:
        """Return (A, B) of the largest rank, drawn once for all clients."""
        factor_modules(spec)
        return FederatedState(dict(weights))

    def broadcast(self, server: FederatedState, ctx: RoundContext) -> Payload:
        """Return the factors for a client of this rank (eq. 1)."""
        rank = self.rank_in_round(ctx.site, ctx)
        return Payload(cast_to(heterogeneous_ranks.cut_to_rank(server.tensors, rank), self.wire_dtype))

    def client(
        self, private: FederatedState | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[FederatedState | None, Payload]:
        """Apply eq. 2: train and send a pair of the site's rank, and keep no state."""
        rank, spec = self.rank_in_round(ctx.site, ctx), trainer.spec
        heterogeneous_ranks.check_upload(down, rank, ctx.site, self.adapter.rank)
        start = as_spec(self.starting_weights(payload_tensors(down), spec), spec)
        trained = trainer.train(start, heterogeneous_ranks.rows_beyond(spec, rank)).weights
        return None, Payload(self._uploads.sent(heterogeneous_ranks.cut_to_rank(trained, rank)))

    def contributions(self, payload: Payload, num_examples: int, spec: Spec, ctx: RoundContext) -> ClientContributions:
        """Return S_k A_k and S_k B_k with zeros beyond their rank, and S_k."""
        factors = self._uploads.opened(payload)
        if self.weights == "norm":
            return ClientContributions(_by_norm(factors, spec))
        return weighted_contributions(heterogeneous_ranks.pad_to_rank(factors, spec), num_examples)

    def server_update(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> FederatedState:
        """Apply eq. 3; entries beyond the rank of every site in the sums do not change."""
        new = sums.means(server.tensors)
        for name, unseen in self._unsent(server, sums, ctx).items():
            new[name] = torch.where(unseen, server.tensors[name], new[name])
        return FederatedState(new)

    def changed_entries(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> Mapping[str, Tensor]:
        """Return the entries of ranks that some site of the sums has."""
        changed = {name: sums.moved(name) for name in server.tensors if name in sums}
        for name, unseen in self._unsent(server, sums, ctx).items():
            if name in changed:
                changed[name] = changed[name] & ~unseen
        return changed

    def _unsent(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> Mapping[str, Tensor]:
        """Return masks of the entries beyond the rank of every site in the sums."""
        most = max((self.rank_in_round(site, ctx) for site in sums.clear), default=0)
        return heterogeneous_ranks.rows_beyond(server.tensors, most)

    def layout(self, spec: Spec) -> MessageLayout:
        """Declare both factors of the site's rank, in both directions."""
        down, up = dense_fields(spec, "down", self.wire_dtype), self._uploads.fields(spec)
        return MessageLayout(
            heterogeneous_ranks.rank_fields(down, self.ranks) + heterogeneous_ranks.rank_fields(up, self.ranks)
        )


def _by_norm(found: Weights, spec: Spec) -> Iterator[Contribution]:
    """Yield the terms of every layer whose product is not 0, weighted with its norm."""
    for module in factor_modules(found):
        norm = float(torch.linalg.vector_norm(factor_product(found, module)))
        pair = {name: found[name] for name in (f"{module}.lora_A", f"{module}.lora_B")}
        if norm > 0:
            yield from weighted_contributions(heterogeneous_ranks.pad_to_rank(pair, spec), norm).tensors
