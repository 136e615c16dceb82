"""Per-site ranks: a site trains and sends only the first rows of A and the first columns of B in each LoRA pair.

The run config gives each site a rank, from 1 to the adapter's rank. All sites have tensors of the adapter's shapes.
Entries beyond a site's rank are zero and stay zero, which is equivalent to pairs of that rank. This saves upload bytes
but no computation. A site cannot choose its rank: the server refuses an upload of any other rank.

Ranks are nested: all sites send the first ranks, and fewer sites send the later ones. Under secure aggregation, a rank
that too few sites in the cohort have is omitted from the round: no site trains or sends it (`plan_ranks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from fedveil.adapters.lora import LoraAdapter
from fedveil.adapters.residual_lora import ResidualLoraAdapter
from fedveil.contract.codec import QuantizedTensor
from fedveil.contract.entry_table import EntryTable, slice_name
from fedveil.contract.layout import Payload, WireField
from fedveil.contract.method import RoundContext
from fedveil.contract.param_spec import Spec
from fedveil.errors import ConfigError, WireError
from fedveil.ops.lora_algebra import factor_modules, factor_name
from fedveil.ops.weight_averaging import WeightAveragingMethod
from fedveil.sanitize import sanitize

Ranks = Mapping[str, int]
T = TypeVar("T")


def check_ranks(ranks: Ranks, most: int) -> None:
    """Raise ConfigError for a rank that is below 1 or above the adapter's."""
    for site, rank in ranks.items():
        if not 1 <= rank <= most:
            raise ConfigError(
                f"ranks.{sanitize(site, 80)}: expected an integer from 1 to adapter.rank, {most}, found {rank}"
            )


def rank_of_site(ranks: Ranks, site: str, most: int) -> int:
    """Return a site's rank: the adapter's rank, unless the run sets a different rank."""
    return ranks.get(site, most)


def rows_beyond(spec: Spec | Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Return masks of the entries that a site with this rank does not train (`frozen` in `Trainer.train`).

    The result is empty if the site trains all entries.
    """
    masks: dict[str, Tensor] = {}
    for name, tensor in spec.items():
        side = factor_name(name)
        rows = torch.arange(tensor.shape[0 if side == "A" else 1]) >= rank
        if bool(rows.any()):
            masks[name] = rows[:, None] if side == "A" else rows[None]
    return masks


def cut_to_rank(factors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Return the first `rank` rows of A and columns of B."""
    return {name: w[:rank] if factor_name(name) == "A" else w[:, :rank] for name, w in factors.items()}


def pad_to_rank(factors: Mapping[str, Tensor], spec: Spec) -> dict[str, Tensor]:
    """Return the factors in the spec's shapes, padded with zeros beyond their rank."""
    padded_factors: dict[str, Tensor] = {}
    for name, w in factors.items():
        whole = w.new_zeros(spec[name].shape)
        whole[: w.shape[0], : w.shape[1]] = w
        padded_factors[name] = whole
    return padded_factors


def rank_of_upload(payload: Payload) -> int:
    """Return the rank of a message's first factor; `check_upload` checks the other factors against it."""
    for name, value in payload.fields.items():
        return _shape(value)[0 if factor_name(name) == "A" else 1]
    raise WireError("upload: it contains no factors")


def rank_fields(up: tuple[WireField, ...], ranks: Ranks) -> tuple[WireField, ...]:
    """Return an upload's fields, with a variable inner width unless all sites have the same rank."""
    return open_fields(up) if ranks else up


def open_fields(fields: tuple[WireField, ...]) -> tuple[WireField, ...]:
    """Return the fields with a variable inner width (the rank), up to the adapter's rank."""
    return tuple(map(_open, fields))


def _open(field: WireField) -> WireField:
    a, b = field.largest
    return replace(field, shape=(None, b) if factor_name(field.name) == "A" else (a, None), most=(a, b))


def plan_ranks(names: Iterable[str], ranks: Mapping[str, int], fewest: int) -> EntryTable:
    """Return a round's entry table: each site sends those of its ranks that at least `fewest` sites have.

    Args:
        names: names of the tensors in the vector.
        ranks: the rank of each site in the cohort.
        fewest: minimum number of sites that must send a rank; at most the number of sites.
    """
    most = sorted(ranks.values(), reverse=True)[fewest - 1]
    ends = sorted({min(rank, most) for rank in ranks.values()})
    senders = {end: tuple(sorted(site for site, rank in ranks.items() if min(rank, most) >= end)) for end in ends}
    blocks = {
        slice_name(name, first, end): senders[end]
        for name in names
        for first, end in zip([0, *ends], ends, strict=False)
    }
    return EntryTable(blocks=blocks, fewest=fewest)


def check_upload(payload: Payload, rank: int | None, site: str, most: int) -> None:
    """Raise WireError unless every factor in a message has this rank.

    If `rank` is None, all factors must have the same rank, from 1 to the adapter's rank.
    """
    shapes = {name: _shape(value) for name, value in payload.fields.items()}
    first = f"{factor_modules(shapes)[0]}.lora_A"
    wanted = shapes[first][0] if rank is None else rank
    for name, shape in shapes.items():
        factor_rank = shape[0 if factor_name(name) == "A" else 1]
        if factor_rank != wanted or not 1 <= factor_rank <= most:
            whose = f"the rank of site {sanitize(site, 80)}" if site else f"one rank for all factors, 1 to {most}"
            raise WireError(
                f"{name}: expected rank {wanted} ({whose}), found {factor_rank}; check ranks in method.params"
            )


def _shape(value: object) -> tuple[int, ...]:
    tensor = value.codes if isinstance(value, QuantizedTensor) else value
    if not isinstance(tensor, Tensor):
        raise WireError(f"upload: {type(tensor).__name__} is not a factor")
    return tuple(tensor.shape)


class HeterogeneousRankMethod(WeightAveragingMethod):
    """Base class for methods whose sites send LoRA factors of different ranks.

    Attributes:
        ranks: maps site names to ranks, from 1 to the adapter's rank; all other sites have the adapter's rank.
        adapter: the LoRA adapter, with the largest rank.
    """

    ranks: Ranks
    adapter: LoraAdapter | ResidualLoraAdapter

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranks(self.ranks, self.adapter.rank)

    @property
    def has_partial_uploads(self) -> bool:
        """Return whether ranks differ.

        Without secure aggregation, only sites with the largest rank then send all ranks.
        """
        return any(rank < self.adapter.rank for rank in self.ranks.values())

    @property
    def plans_entries(self) -> bool:
        """Return whether ranks differ. The table then omits ranks that too few sites have."""
        return self.has_partial_uploads

    def rank_of(self, site: str) -> int:
        """Return a site's rank."""
        return rank_of_site(self.ranks, site, self.adapter.rank)

    def rank_in_round(self, site: str, ctx: RoundContext) -> int:
        """Return the rank that a site trains and sends in a round: its own, or the table's under secure aggregation.

        Raises WireError if the table gives the site no rank, different ranks for its tensors, or more than its own.
        """
        own = self.rank_of(site)
        if ctx.entries is None:
            return own
        ranks = {ctx.entries.first_ranks(name, site) for name in ctx.entries.slices}
        if len(ranks) != 1 or not 1 <= max(ranks) <= own:
            raise WireError(
                f"entries: the table must give site {sanitize(site, 80)} one rank for all factors, from 1 to "
                f"{own}, but gives {sorted(ranks)}"
            )
        return max(ranks)

    def largest_rank_in_round(self, ctx: RoundContext) -> int:
        """Return the largest rank that any site trains in a round, from the table under secure aggregation."""
        if ctx.entries is None:
            return self.adapter.rank
        return max(end for slices in ctx.entries.slices.values() for _, end, _ in slices)

    def plan_entries(self, spec: Spec, cohort: Sequence[str], fewest: int, ctx: RoundContext) -> EntryTable:
        """Return the table of ranks that at least `fewest` sites in the cohort have; nothing is drawn at random."""
        names = self.aggregate_shapes(spec, ctx.round)
        return plan_ranks(names, {site: self.rank_of(site) for site in cohort}, fewest)

    def check_entries(self, sites: int, drawn: int, fewest: int) -> None:
        """Raise ConfigError if the largest rank could never be sent because too few sites have it."""
        named = sorted(self.ranks.values(), reverse=True)
        unnamed = sites - len(named)
        if unnamed < 0:  # it is not known which of the named sites take part
            return
        ranks = sorted([*named, *[self.adapter.rank] * unnamed], reverse=True)
        have = ranks.count(ranks[0])
        if min(have, drawn) < fewest:
            raise ConfigError(
                f"ranks: secure.enabled requires that at least {fewest} of the {drawn} sites in a round have the "
                f"largest rank, {ranks[0]}, but only {have} of {sites} sites have it; lower adapter.rank and ranks "
                f"to at most {ranks[fewest - 1]}"
            )

    def check(self, payload: Payload, spec: Spec) -> None:
        """Raise WireError unless all factors have the same rank, from 1 to the adapter's rank."""
        check_upload(payload, None, "", self.adapter.rank)

    def check_site(self, payload: Payload, spec: Spec, site: str) -> None:
        """Raise WireError unless the factors have the site's own rank."""
        check_upload(payload, self.rank_of(site), site, self.adapter.rank)
