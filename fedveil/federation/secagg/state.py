"""A site's stored secure aggregation state for a run, and the stores for it.

    none -> masked(p) -> signed(p, L) -> opened(p, L), or from masked(p) directly to opened(p, L)

From each state, a plan for a later attempt leads to masked(p'). A state is on disk before anything that depends on it
leaves the site.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Literal, Protocol

from pydantic import Field

from fedveil.federation.secagg.messages import OpenResponse, Position
from fedveil.federation.secagg.schema import MOST_HOLDERS, MOST_SITES, Digest, Key, Name, Number, SecAggMessage

Phase = Literal["masked", "signed", "opened"]


class UnspentPrekey(SecAggMessage):
    """A prekey that the site has not yet used for masking, with its private half."""

    number: Number
    private: Key


class LivePlan(SecAggMessage):
    """The last plan for which the site masked, until it masks for a later plan.

    Attributes:
        plan: its digest.
        rows: keys of the share rows for this site, by the site that made them; empty once opened.
        boot: ID of the machine's boot; a plan from another boot is dropped.
        list: digest of the list to which the site agreed; "" while `phase` is "masked".
        answer: the response in which the site revealed its shares.
    """

    plan: Digest
    rows: dict[Name, Key] = Field(max_length=MOST_HOLDERS)
    boot: str = Field(max_length=64)
    phase: Phase
    list: Digest | Literal[""]
    answer: OpenResponse | None


class Fence(SecAggMessage):
    """A record of steps that the site never takes again, even if it loses its keys.

    Attributes:
        masked: last round and attempt for which the site masked.
        signed: the last round in which the site agreed to a list, or must not mask a second time.
        kept: True if the site has continued from private state.
    """

    masked: Annotated[Position | None, Field(strict=False)] = None
    signed: Number | None = None
    kept: bool = False


class SiteSecAggState(SecAggMessage):
    """A site's stored state for one run.

    Attributes:
        next: the unused prekey.
        number: number of prekeys made so far.
        last_sum: sites in the last sum that this site opened.
    """

    next: UnspentPrekey | None = None
    number: Number = 0
    live: LivePlan | None = None
    fence: Fence = Fence()
    last_sum: Annotated[tuple[Name, ...], Field(max_length=MOST_SITES, strict=False)] = ()


class SecAggStore(Protocol):
    """A store for a site's secure aggregation state."""

    def alone(self) -> AbstractContextManager[None]:
        """Return a lock to hold from reading to writing, so that concurrent requests are answered one at a time."""
        ...

    def load(self) -> SiteSecAggState | None:
        """Return the last saved state, or None if none was saved."""
        ...

    def save(self, kept: SiteSecAggState) -> None:
        """Save the state; it is on disk when this returns."""
        ...


class MemorySecAggStore:
    """A store in memory, for a federation in one process."""

    def alone(self) -> AbstractContextManager[None]:
        """Return a context that does nothing, because no other process uses this store."""
        return nullcontext()

    def __init__(self) -> None:
        self._kept: SiteSecAggState | None = None

    def load(self) -> SiteSecAggState | None:
        """Return the last saved state."""
        return self._kept

    def save(self, kept: SiteSecAggState) -> None:
        """Save the state for the lifetime of this object."""
        self._kept = kept
