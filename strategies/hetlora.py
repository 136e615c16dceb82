"""HetLoRA.

Cho, Liu, Xu, Fahrezi, Joshi: Heterogeneous LoRA for Federated Fine-tuning of On-device Foundation Models. EMNLP 2024.
https://arxiv.org/abs/2401.06432

Sites have ranks of their own. The server cuts its factors to a site's rank, and fills what comes back up with zeros.

| paper | code | shape, unit |
|---|---|---|
| B, A | `<module>.lora_B`, `<module>.lora_A` | d_out x r_max and r_max x d_in, weights; A random, B zero at first |
| r_max | the adapter's rank r | |
| r_k | `ranks[site]`, or r | 1 to r; the same in every round |
| S_k | the norm of B_k A_k: `weights = "norm"`, layer by layer; n_k: `weights = "examples"` | Frobenius; examples |

    A_k = A[:r_k],  B_k = B[:, :r_k]                                                (1, server: cut)
    (A_k, B_k) <- local epochs on both                                              (2, client)
    A = sum_k (S_k / sum_j S_j) [A_k; 0],  B = sum_k (S_k / sum_j S_j) [B_k, 0]     (3, server)

A client shares: both LoRA factors, of a rank that may be the site's own. With it stays: nothing.

The client learns: the first r_k rows of A and columns of B of every round it takes part in.
The server learns: each client's trained A_k and B_k in full, and n_k.

Formal guarantees: none by itself (epsilon is infinite); with `dp.*` those of `fedveil.privacy.dp_sgd`.

| case | result |
|---|---|
| no upload | A and B stay, bit for bit |
| all ranks are r, weights "examples" | FedAvg |
| a row of A and column of B that some of the cohort have | the mean with the others' zeros, as in (3) |
| one that nobody in the cohort has | stays, bit for bit |
| weights "norm", an upload whose B_k A_k is 0 in a layer | weighs nothing there |
| weights "norm", a site that makes its factors large | weighs as much more: set `cohort.norm-factor` |
| weights "norm" under secure aggregation | refused by the site: unseen weights are whole numbers of examples |
| an upload of another rank than the site's | refused |

Differences from the paper: what nobody in a cohort has stays; by (3) it would be 0, and once a row of A and its column
of B are 0, neither has a gradient again. The paper weighs by "norm"; by examples is the default here, since a norm is
what a hostile site chooses. Without rank self-pruning, by which a site lowers its rank: a rank that follows from its
rows would tell about them, and `ranks` says before the run what a site sends. One scale serves all ranks, that of the
adapter. AdamW. The paper's text was not at hand: the equations follow its abstract and others' accounts of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, final

import torch

from fedveil.adapters import ranks
from fedveil.adapters.lora import Lora
from fedveil.algebra.coded import Uploads
from fedveil.algebra.factors import modules, product
from fedveil.contract.layout import Layout, Payload
from fedveil.contract.method import Method, RoundContext, State
from fedveil.contract.spec import Spec, Weights
from fedveil.contract.sums import Sums, Term, Terms, weighted
from fedveil.contract.trainer import Trainer
from fedveil.rng import Stream
from fedveil.wire.payloads import WireDtype, as_spec, cast_to, dense_fields, tensors_of


@final
@dataclass(frozen=True)
class HetLora(Method):
    """Everyone shares both factors, of a rank of its own.

    Attributes:
        ranks: of sites by name, from 1 to the adapter's rank, which all other sites have.
        weights: what an upload counts for: its examples, or the norm of its product in each layer, as in the paper.
        adapter: LoRA; no other adapter has factors.
        wire_dtype: dtype on the wire, both ways; sums are fp32 whatever it is.
        upload_bits: bits of the codes in which a client sends A and B, 2 to 8, with a scale for every 256 weights; 0:
            none.
    """

    ranks: Mapping[str, int] = field(default_factory=dict)
    weights: Literal["examples", "norm"] = "examples"
    adapter: Lora = field(default_factory=Lora)
    wire_dtype: WireDtype = "float32"
    upload_bits: int = 0

    def __post_init__(self) -> None:
        self._uploads  # noqa: B018  # it checks the bits
        ranks.check(self.ranks, self.adapter.rank)

    @property
    def _uploads(self) -> Uploads:
        return Uploads(self.wire_dtype, self.upload_bits)

    def init(self, spec: Spec, weights: Weights, rng: Stream) -> State:
        """(A, B) of the largest rank, drawn once for all clients."""
        modules(spec)
        return State(dict(weights))

    def broadcast(self, server: State, ctx: RoundContext) -> Payload:
        """Eq. 1: what a client of this rank trains."""
        rank = ranks.of(self.ranks, ctx.client, self.adapter.rank)
        return Payload(cast_to(ranks.cut(server.tensors, rank), self.wire_dtype))

    def client(
        self, private: State | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[State | None, Payload]:
        """Eq. 2: a pair of the site's rank is trained and sent; nothing is kept."""
        rank, spec = ranks.of(self.ranks, ctx.site, self.adapter.rank), trainer.spec
        ranks.check_upload(down, self.ranks, ctx.site, self.adapter.rank)
        start = as_spec(ranks.padded(tensors_of(down), spec), spec)
        trained = trainer.train(start, ranks.beyond(spec, rank)).weights
        return None, Payload(self._uploads.sent(ranks.cut(trained, rank)))

    def check(self, payload: Payload, spec: Spec) -> None:
        """Raises WireError unless all factors have one rank that some site may have."""
        ranks.check_upload(payload, self.ranks, "", self.adapter.rank)

    def check_site(self, payload: Payload, spec: Spec, site: str) -> None:
        """Raises WireError unless it is the site's own rank."""
        ranks.check_upload(payload, self.ranks, site, self.adapter.rank)

    def terms(self, payload: Payload, num_examples: int, spec: Spec, ctx: RoundContext) -> Terms:
        """S_k A_k and S_k B_k with zeros beyond their rank, and S_k."""
        found = self._uploads.opened(payload)
        if self.weights == "norm":
            return Terms(_by_norm(found, spec))
        return weighted(ranks.padded(found, spec), num_examples)

    def settle(self, server: State, sums: Sums, ctx: RoundContext) -> State:
        """Eq. 3; what lies beyond the rank of every site in the sums stays."""
        new = sums.means(server.tensors)
        for name, unseen in ranks.beyond(server.tensors, self._highest(sums.clear)).items():
            new[name] = torch.where(unseen, server.tensors[name], new[name])
        return State(new)

    def _highest(self, sites: Iterable[str]) -> int:
        return max((ranks.of(self.ranks, site, self.adapter.rank) for site in sites), default=0)

    def layout(self, spec: Spec) -> Layout:
        """Both factors, of the site's rank, both ways."""
        down, up = dense_fields(spec, "down", self.wire_dtype), self._uploads.fields(spec)
        return Layout(ranks.fields(down, self.ranks) + ranks.fields(up, self.ranks))


def _by_norm(found: Weights, spec: Spec) -> Iterator[Term]:
    """The terms of every layer whose product is not 0, weighted with its norm."""
    for module in modules(found):
        norm = float(torch.linalg.vector_norm(product(found, module)))
        pair = {name: found[name] for name in (f"{module}.lora_A", f"{module}.lora_B")}
        if norm > 0:
            yield from weighted(ranks.padded(pair, spec), norm).tensors
