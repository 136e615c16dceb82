"""What a site keeps of a run in secure aggregation, and where."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

from pydantic import Field

from fedveil.federation.secure.forms import Digest, Key, Number, Share, Statement
from fedveil.federation.secure.membership import Membership

How = Literal["heard", "silent"]


class Answered(Statement):
    """The last prekey of a site of which this one has opened a share: which half, and for which plan and sum."""

    number: Number
    how: How
    context: Digest


class Kept(Statement):
    """What a site keeps of a run.

    Attributes:
        run_key: private.
        prekeys: made so far.
        seed: of the last prekey; "" once it is spent.
        membership: joined last.
        answered: by the run key of the site whose share it was: one that lost its keys begins anew, and no old answer
            is forgotten.
    """

    run_key: Key
    prekeys: Number = 0
    seed: Share | Literal[""] = ""
    membership: Membership | None = None
    answered: dict[Key, Answered] = Field(default_factory=dict)


class Store(Protocol):
    """Where a site keeps it."""

    def alone(self) -> AbstractContextManager[None]:
        """Held from reading to writing: two questions at a time are answered one after the other."""
        ...

    def load(self) -> Kept | None:
        """What was saved last; None at first."""
        ...

    def save(self, kept: Kept) -> None:
        """Keeps it, on disk when this returns."""
        ...


class MemoryStore:
    """Keeps it in memory, for a federation in one process."""

    def alone(self) -> AbstractContextManager[None]:
        """Nobody else is here."""
        return nullcontext()

    def __init__(self) -> None:
        self._kept: Kept | None = None

    def load(self) -> Kept | None:
        """What was saved last."""
        return self._kept

    def save(self, kept: Kept) -> None:
        """Keeps it as long as this object lives."""
        self._kept = kept
