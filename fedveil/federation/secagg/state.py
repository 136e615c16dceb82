"""A site's stored state of a run in secure aggregation, and its stores."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

from pydantic import Field

from fedveil.federation.secagg.membership import RunMembership
from fedveil.federation.secagg.schema import Digest, Key, Number, SecAggMessage, Share

How = Literal["heard", "silent"]


class OpenedPrekey(SecAggMessage):
    """The last prekey of a site whose share this site opened: which half, and for which plan and sum."""

    number: Number
    how: How
    context: Digest


class SiteSecAggState(SecAggMessage):
    """A site's stored state of one run.

    Attributes:
        run_key: private.
        prekeys: number made so far.
        seed: of the last prekey; "" once it is spent.
        membership: the one joined last.
        answered: opened prekeys, by the run key of the share's site: a site that lost its keys starts a new
            entry, and no old answer is forgotten.
    """

    run_key: Key
    prekeys: Number = 0
    seed: Share | Literal[""] = ""
    membership: RunMembership | None = None
    answered: dict[Key, OpenedPrekey] = Field(default_factory=dict)


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
