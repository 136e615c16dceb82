"""Tables that assign the entries of a secure sum to sites, so that no entry is summed over too few sites.

Under secure aggregation an entry is summed over 0 sites or at least `least` sites (secure.min-sites). If sites
send different entries, the server draws each site's entries before the round, and every site checks this table
before it trains. The table is not secret. It has one of two forms:

| form | says | methods |
|---|---|---|
| `blocks` | the sites that send each block: a name of the vector, or a slice `name[first:end]` of its ranks or columns | FedRand, HetLoRA, FLoRA |
| `seeds` | a seed per site, from which all parties compute which columns each site sees | FedQSN, with one seed for all |

In a cohort of m sites, a sum has at least max(q, least) sites (q: `secagg.plan.quorum_of`). So if at least
least + m - max(q, least) sites in the cohort send a block, every sum includes the block from at least `least` sites.
"""  # noqa: E501

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable
from functools import cached_property
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedveil.errors import PolicyError, QuorumError, WireError
from fedveil.sanitize import sanitize

__all__ = ["MAX_TABLE_CHARACTERS", "EntryTable", "fewest_senders", "slice_name"]

MAX_TABLE_CHARACTERS = 8 << 20
_MAX_SITES = 10_000
_SLICE = re.compile(r"(.+)\[(0|[1-9]\d{0,8}):([1-9]\d{0,8})\]")

Site = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
Block = Annotated[str, Field(pattern=r"^[!-~]{1,300}$")]
Seed = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def fewest_senders(cohort: int, least: int, quorum: int) -> int:
    """Return how many of the cohort's sites must send a block so that each sum has it from at least `least` sites."""
    return least + max(0, cohort - max(quorum, least))


def slice_name(name: str, first: int, end: int) -> str:
    """Return the block of a vector name's ranks or columns from `first` up to but not including `end`."""
    return f"{name}[{first}:{end}]"


class EntryTable(BaseModel):
    """The entries that each site in a cohort sends in one round.

    Attributes:
        blocks: the sites that send each block, sorted; no site sends entries outside the blocks.
        seeds: each site's seed, as 64 hex digits.
        common_seed: seed of the draws that all sites share; "" without `seeds`.
        fewest: the number of sites that an entry needs in the cohort; no site sends an entry with fewer sites.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    blocks: dict[Block, Annotated[tuple[Site, ...], Field(max_length=_MAX_SITES, strict=False)]] = {}
    seeds: dict[Site, Seed] = Field({}, max_length=_MAX_SITES)
    common_seed: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    fewest: int = Field(ge=1, le=_MAX_SITES)

    @model_validator(mode="after")
    def _consistent(self) -> EntryTable:
        if bool(self.blocks) == bool(self.seeds) or bool(self.common_seed) != bool(self.seeds):
            raise ValueError("a table has either blocks, or seeds with a common seed")
        for sites in self.blocks.values():
            if list(sites) != sorted(set(sites)):
                raise ValueError("a block must list each site once, in sorted order")
        for name, slices in self.slices.items():
            ends = [0]
            for first, end, _ in slices:
                if first >= end or first < ends[-1]:
                    raise ValueError(f"two blocks of {sanitize(name, 80)} overlap")
                ends.append(end)
        return self

    @cached_property
    def slices(self) -> dict[str, list[tuple[int, int, tuple[str, ...]]]]:
        """Return each name's blocks as (first, end, sites). For a whole name, `end` lies beyond every slice."""
        by_name: dict[str, list[tuple[int, int, tuple[str, ...]]]] = {}
        for block, sites in self.blocks.items():
            parts = _SLICE.fullmatch(block)
            name, first, end = (parts[1], int(parts[2]), int(parts[3])) if parts else (block, 0, 10**9)
            by_name.setdefault(name, []).append((first, end, sites))
        return {name: sorted(slices) for name, slices in by_name.items()}

    def to_text(self) -> str:
        """Return the canonical JSON."""
        return json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> EntryTable:
        """Parse a table. Raises WireError unless the text is a table's canonical JSON."""
        if len(text) > MAX_TABLE_CHARACTERS:
            raise WireError(f"entries: expected at most {MAX_TABLE_CHARACTERS} characters, found {len(text)}")
        try:
            table = cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = sanitize(".".join(map(str, first["loc"])), 100)
            raise WireError(f"entries: {where}: this is not a table of sites by block ({first['type']})") from None
        if table.to_text() != text:
            raise WireError("entries: this is not the table's canonical JSON, so the digests would differ")
        return table

    @cached_property
    def digest(self) -> str:
        """Return the SHA-256 of the text, which a plan names as `entries`."""
        return hashlib.sha256(self.to_text().encode()).hexdigest()

    def names_of(self, site: str) -> frozenset[str] | None:
        """Return the vector's names that `site` sends, even partially; None for a table of seeds, meaning all names."""
        if self.seeds:
            return None
        return frozenset(name for name, slices in self.slices.items() if any(site in sites for _, _, sites in slices))

    def first_ranks(self, name: str, site: str) -> int:
        """Return how many ranks of a name a site sends. Raises WireError unless these are the name's first ranks."""
        ranks = 0
        for first, end, sites in self.slices.get(name, []):
            if site in sites:
                if first != ranks:
                    raise WireError(
                        f"entries: {name}: {sanitize(site, 80)} must send the first ranks, but sends {first} to "
                        f"{end - 1} after {ranks}"
                    )
                ranks = end
        return ranks

    def require_cohort(self, cohort: Collection[str], least: int, quorum: int, colluding: int) -> None:
        """Check the table for a cohort, before a site trains (rule T8). Raises PolicyError.

        Args:
            cohort: all sites of the plan.
            least: minimum number of sites in a sum.
            quorum: q, the number of sites that must sign a sum's list.
            colluding: c, the number of sites that may collude with the server.
        """
        if least - colluding < 2:
            raise PolicyError(
                f"entries: if sites send different entries and {colluding} may collude with the server, a sum needs at "
                f"least {colluding + 2} sites, but may have {least}; raise secure.min-sites"
            )
        sites = set(cohort)
        fewest = fewest_senders(len(sites), least, quorum)
        if self.fewest < fewest:
            raise PolicyError(
                f"entries: each entry needs at least {fewest} of the {len(sites)} sites, but the table is for "
                f"{self.fewest}"
            )
        if self.seeds and self.seeds.keys() != sites:
            raise PolicyError("entries: the seeds are not those of the cohort's sites")
        if len(set(self.seeds.values())) > 1:
            raise PolicyError(
                f"entries: expected one seed for all {len(sites)} sites, found several: with one, all sites get the "
                "same message, which the plan names"
            )
        for block, senders in self.blocks.items():
            if not sites.issuperset(senders):
                raise PolicyError(f"entries: {block}: the table names sites outside the cohort")
            if 0 < len(senders) < self.fewest:
                raise PolicyError(
                    f"entries: {block}: expected none or at least {self.fewest} sites, found {len(senders)}: the sum "
                    "could reveal entries from too few sites"
                )

    def require_sum(self, cohort: Collection[str], in_sum: Iterable[str], least: int) -> None:
        """Check the table for the sites of a sum, before any share is revealed (rule A5). Raises QuorumError."""
        summed = set(in_sum)
        missing = len(set(cohort) - summed)
        if self.seeds and missing > self.fewest - least:
            raise QuorumError(
                f"entries: at most {self.fewest - least} sites may be silent, but {missing} are: some entries of the "
                f"sum would come from fewer than {least} sites"
            )
        for block, senders in self.blocks.items():
            if 0 < (count := len(summed.intersection(senders))) < least:
                raise QuorumError(
                    f"entries: {block}: expected none or at least {least} sites in the sum, found {count}"
                )
