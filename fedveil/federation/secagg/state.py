"""A site's stored state of a run in secure aggregation, and its stores.

    none -> masked(p) -> signed(p, L) -> opened(p, L), or from masked(p) to opened(p, L) at once

From each, a plan of a later attempt leads to masked(p'). A state is on disk before anything that follows from it
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
    """A prekey with its private half, with which the site has not masked yet."""

    number: Number
    private: Key


class LivePlan(SecAggMessage):
    """The last plan for which the site masked, until a later one.

    Attributes:
        plan: its digest.
        rows: keys of the rows of shares to this site, by the site that made them; empty once opened.
        boot: id of the machine's boot; a plan of another boot is dropped.
        list: digest of the list to which the site agreed; "" while `phase` is "masked".
        answer: the response with which the site opened its shares.
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
        masked: round and attempt for which it masked last.
        signed: the last round in which it agreed to a list, or may mask no second time.
        kept: it has continued from private state.
    """

    masked: Annotated[Position | None, Field(strict=False)] = None
    signed: Number | None = None
    kept: bool = False


class SiteSecAggState(SecAggMessage):
    """A site's stored state of one run.

    Attributes:
        next: the unused prekey.
        number: prekeys made so far.
        last_sum: sites of the sum that it opened last.
    """

    next: UnspentPrekey | None = None
    number: Number = 0
    live: LivePlan | None = None
    fence: Fence = Fence()
    last_sum: Annotated[tuple[Name, ...], Field(max_length=MOST_SITES, strict=False)] = ()


class SecAggStore(Protocol):
    """A store for a site's state of secure aggregation."""

    def alone(self) -> AbstractContextManager[None]:
        """Return a lock held from reading to writing, so that concurrent requests are answered one after the other."""
        ...

    def load(self) -> SiteSecAggState | None:
        """Return the state that was saved last; None at first."""
        ...

    def save(self, kept: SiteSecAggState) -> None:
        """Save the state; it is on disk when this returns."""
        ...


class MemorySecAggStore:
    """A store in memory, for a federation in one process."""

    def alone(self) -> AbstractContextManager[None]:
        """Return a context that does nothing, since no other process uses this store."""
        return nullcontext()

    def __init__(self) -> None:
        self._kept: SiteSecAggState | None = None

    def load(self) -> SiteSecAggState | None:
        """Return the state that was saved last."""
        return self._kept

    def save(self, kept: SiteSecAggState) -> None:
        """Save the state for the lifetime of this object."""
        self._kept = kept
