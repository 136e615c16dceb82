"""What an adversary has, and what an attack is.

An adversary has a view of the messages and declared knowledge. An attack reads nothing else.

`fedveil audit` runs every attack that `installed` finds: each `ModelAttack` or `UploadAttack` that a file of the rooms
here defines, and each that another package offers under the entry-point group "fedveil.attacks". So an attack is one
file and one test.

| an attack on | reads | must win on | must lose on |
|---|---|---|---|
| a model (`ModelAttack`) | what the model says of a row | OVERFITTED | ROUND_0, OTHER_ROWS: rows are not told apart |
| uploads (`UploadAttack`) | what a site sent | OVERFITTED | OTHER_ROWS; WRONG_SITE: members do not score higher |

A control must be able to fail. One on which an attack scores all rows the same cannot, whatever rows it gets, and
counts as not tried.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import ClassVar, TypeGuard

from torch import Tensor

from fedveil.attacks.statistics import Scores
from fedveil.contract.layout import Direction, Payload
from fedveil.contract.method import RoundContext
from fedveil.contract.spec import Weights
from fedveil.contract.task import Prediction, Rows, Task
from fedveil.errors import ConfigError, FedVeilError
from fedveil.federation.exchange import Exchange
from fedveil.wire.envelope import Message, Stamp, unpack
from fedveil.wire.tap import Seen, Tap

ENTRY_POINTS = "fedveil.attacks"
OVERFITTED = "overfitted FedAvg"  # a few members known by heart, nothing withheld
ROUND_0 = "round 0"  # the model before any round: nobody trained it
OTHER_ROWS = "other rows"  # a model taught other rows of the sites than those it is asked about
WRONG_SITE = "wrong site"  # a site's rows against another site's upload, which they did not move


@dataclass(frozen=True)
class Sighting:
    """One message, decoded.

    Attributes:
        round, attempt, site, direction: as the tap recorded them.
        payload: what the message carried.
        num_examples: the site's training examples, as its upload says; 0 for a broadcast.
        report: the figures that an upload reports; none for a broadcast.
        accepted: whether the server took the upload into its sums.
    """

    round: int
    attempt: int
    site: str
    direction: Direction
    payload: Payload
    num_examples: int
    report: Mapping[str, float]
    accepted: bool


@dataclass(frozen=True)
class Participation:
    """An accepted upload in the tap, and the broadcast that it answers; None where the view has none."""

    up: Seen
    down: Seen | None


@dataclass(frozen=True)
class View:
    """The messages that one adversary saw, decoded one at a time.

    `View.server` is that of a server which follows the protocol and reads every message. `View.client` is that of one
    site, which sees its own messages.
    """

    tap: Tap
    exchange: Exchange
    site: str | None = None
    is_unseen: ClassVar[bool] = False  # whether something else stands in the place of uploads

    @classmethod
    def server(cls, tap: Tap, exchange: Exchange) -> View:
        """Every message that the server sent or got."""
        return cls(tap, exchange)

    @classmethod
    def client(cls, tap: Tap, exchange: Exchange, site: str) -> View:
        """What one site sent and got."""
        return cls(tap, exchange, site)

    @property
    def sites(self) -> list[str]:
        """Names of the sites with an accepted upload, sorted."""
        return sorted({seen.site for seen in self._seen("up") if seen.accepted})

    def broadcasts(self, site: str | None = None) -> Iterator[Sighting]:
        """Messages to every site, or to one, in the order in which they were sent."""
        return self._decoded("down", site)

    def uploads(self, site: str | None = None) -> Iterator[Sighting]:
        """Accepted messages from every site, or from one, in the order in which they came."""
        return self._decoded("up", site)

    def added(self, upload: Sighting) -> dict[str, Tensor]:
        """What an upload adds to the sums, under the spec's names: the method itself reads its codes and masks."""
        method, spec = self.exchange.method, self.exchange.spec
        ctx = RoundContext(upload.round, upload.site, False, bytes(32))  # terms depend on no secret
        terms = method.terms(upload.payload, 1, spec, ctx).tensors
        return {term.name: term.value for term in terms if term.name in spec}

    def answered(self, upload: Sighting) -> Sighting | None:
        """The broadcast that an upload answers; None where the view has none. No other message is decoded."""
        found = None
        for seen in self._seen("down"):
            if (seen.site, seen.round, seen.attempt) == (upload.site, upload.round, upload.attempt):
                found = seen
        return self._decode(found) if found else None

    def participations(self) -> dict[str, list[Participation]]:
        """Of each site its accepted uploads, in the order in which they came; nothing is decoded."""
        asked = {(down.site, down.round, down.attempt): down for down in self._seen("down")}
        found: dict[str, list[Participation]] = {}
        for up in self._seen("up"):
            if up.accepted:
                found.setdefault(up.site, []).append(Participation(up, asked.get((up.site, up.round, up.attempt))))
        return found

    def read(self, seen: Seen) -> Sighting:
        """One message of the tap, decoded."""
        return self._decode(seen)

    def _seen(self, direction: Direction) -> Iterator[Seen]:
        for seen in self.tap.messages():
            if seen.direction == direction and self.site in (None, seen.site):
                yield seen

    def _decoded(self, direction: Direction, site: str | None) -> Iterator[Sighting]:
        for seen in self._seen(direction):
            if site not in (None, seen.site) or (direction == "up" and not seen.accepted):
                continue
            yield self._decode(seen)

    def _decode(self, seen: Seen) -> Sighting:
        message = self._message(seen, self.exchange)
        return Sighting(
            seen.round, seen.attempt, seen.site, seen.direction, message.payload,
            message.num_examples or 0, message.report, bool(seen.accepted),
        )  # fmt: skip

    def _message(self, seen: Seen, exchange: Exchange) -> Message:
        stamp = Stamp.of(exchange.method, exchange.name, seen.round, seen.direction, None)
        with self._named(seen):
            return unpack(self.tap.read(seen), exchange.layout, stamp)

    @contextmanager
    def _named(self, seen: Seen) -> Iterator[None]:
        """Puts the message's file before what is wrong with it."""
        try:
            yield
        except FedVeilError as error:
            raise type(error)(
                f"{self.tap.folder / seen.file}: {error}; is this tap of another method or base?"
            ) from error


@dataclass(frozen=True)
class Knowledge:
    """What an adversary is declared to know beside its view.

    Attributes:
        task: the base model with its adapter, and how rows are prepared.
        initial: the adapter's weights of round 0, which everybody can draw.
        server: the weights of the server's final model; None where the adversary does not have them.
        says: this knowledge in words, for a report.
    """

    task: Task
    initial: Weights
    server: Weights | None = None
    says: str = ""


@dataclass(frozen=True)
class Answer:
    """What models say of one row.

    Attributes:
        prediction: of the model under attack.
        loss: of that model on the row's own target, the mean over its positions, in nats.
        base_loss: the same of the public base, which everybody has.
    """

    prediction: Prediction
    loss: float
    base_loss: float


class Attack(ABC):
    """An attack that `fedveil audit` runs. Its subclasses are the two kinds below; an attack subclasses one of these.

    An attack can be created without arguments. It names its scores, and no other attack gives a score of the same name.
    A score is higher where a row is more likely a member. No attack is told which rows are members.

    Attributes:
        must_win, must_lose: the controls. An attack that fails one of them proves nothing about a run.
        cost: forward passes that a row takes, about; a backward pass is two. An audit tries cheaper attacks first.
    """

    must_win: ClassVar[str] = OVERFITTED
    must_lose: ClassVar[Sequence[str]]
    cost: ClassVar[int] = 1

    @property
    def name(self) -> str:
        """As an audit calls it where it was left out."""
        return type(self).__name__

    def misfit(self, view: View, knowledge: Knowledge) -> str:
        """Why it cannot be tried on a run, in words that follow a colon; "" where it can."""
        return ""


class ModelAttack(Attack):
    """An attack that reads what a model says of one row. The audit runs it on the server's and rebuilt models."""

    must_lose: ClassVar[Sequence[str]] = (ROUND_0, OTHER_ROWS)

    @abstractmethod
    def score(self, answer: Answer) -> Mapping[str, float]:
        """The row's scores, by name. The names are the same for every row of a task."""


class UploadAttack(Attack):
    """An attack that reads what a site sent.

    Attributes:
        reads: the kinds of upload (`Method.sends`: "weights", "gradients" or "changes") that it understands. Codes are
            no kind: `View.added` gives what they stand for.
    """

    must_lose: ClassVar[Sequence[str]] = (OTHER_ROWS, WRONG_SITE)
    reads: ClassVar[frozenset[str]] = frozenset({"weights", "gradients"})
    cost: ClassVar[int] = 3

    @abstractmethod
    def scores(self, view: View, site: str, knowledge: Knowledge, rows: Rows) -> Mapping[str, Scores]:
        """(rows,) scores of `rows` against the uploads of `site`, by name."""


def installed() -> list[Attack]:
    """Every attack: those of the files in this package's rooms by their names, then those of other packages.

    Raises:
        ConfigError: an entry point that is no attack.
    """
    package = importlib.import_module("fedveil.attacks")
    classes: list[type[Attack]] = []
    for file in pkgutil.walk_packages(package.__path__, "fedveil.attacks."):
        if file.name.count(".") < 3:  # a room itself, or a file beside the rooms
            continue
        module = importlib.import_module(file.name)
        classes += [c for c in vars(module).values() if _is_attack(c) and c.__module__ == module.__name__]
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        offered = point.load()
        if not _is_attack(offered):
            raise ConfigError(
                f"entry point {point.name} of {ENTRY_POINTS}: expected a ModelAttack or an UploadAttack of "
                f"fedveil.attacks.base, found {offered!r}; mend or remove the package that offers it"
            )
        classes.append(offered)
    return [c() for c in classes]


def misfit(attack: Attack, view: View, knowledge: Knowledge) -> str:
    """Why an attack cannot be tried on a run, in words that follow a colon; "" where it can."""
    sends = view.exchange.method.sends
    if isinstance(attack, UploadAttack) and sends not in attack.reads:
        return f"it reads {' and '.join(sorted(attack.reads))}, and the sites of this run send {sends}"
    return attack.misfit(view, knowledge)


def _is_attack(offered: object) -> TypeGuard[type[Attack]]:
    kinds = (ModelAttack, UploadAttack)
    return isinstance(offered, type) and issubclass(offered, kinds) and not inspect.isabstract(offered)
