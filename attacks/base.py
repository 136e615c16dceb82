"""What an adversary has: a view of the messages, and declared knowledge. An attack reads nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fedveil.contract.layout import Direction, Payload
from fedveil.contract.spec import Weights
from fedveil.contract.task import Task
from fedveil.errors import FedVeilError
from fedveil.federation.exchange import Exchange
from fedveil.wire.envelope import Stamp, unpack
from fedveil.wire.tap import Seen, Tap


@dataclass(frozen=True)
class Sighting:
    """One message, decoded.

    Attributes:
        round, attempt, site, direction: as the tap recorded them.
        payload: what it carried.
        num_examples: of an upload; 0 on the way down.
        report: of an upload.
        accepted: of an upload: whether the server folded it.
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
class View:
    """The messages that one adversary saw, decoded one at a time.

    `View.server` is an honest server that looks: every message. `View.client` is one site: its own messages.
    """

    tap: Tap
    exchange: Exchange
    site: str | None = None

    @classmethod
    def server(cls, tap: Tap, exchange: Exchange) -> View:
        """Everything that crossed the server's wire."""
        return cls(tap, exchange)

    @classmethod
    def client(cls, tap: Tap, exchange: Exchange, site: str) -> View:
        """What one site sent and got."""
        return cls(tap, exchange, site)

    @property
    def sites(self) -> list[str]:
        """Sites with an accepted upload, by name."""
        return sorted({seen.site for seen in self._seen("up") if seen.accepted})

    def broadcasts(self, site: str | None = None) -> Iterator[Sighting]:
        """Messages to the sites, or to one, in their order."""
        return self._decoded("down", site)

    def uploads(self, site: str | None = None) -> Iterator[Sighting]:
        """Accepted messages from the sites, or from one, in their order."""
        return self._decoded("up", site)

    def answered(self, upload: Sighting) -> Sighting | None:
        """The broadcast that an upload answers; None where the view has none. No other message is decoded."""
        found = None
        for seen in self._seen("down"):
            if (seen.site, seen.round, seen.attempt) == (upload.site, upload.round, upload.attempt):
                found = seen
        return self._decode(found) if found else None

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
        stamp = Stamp.of(self.exchange.method, self.exchange.name, seen.round, seen.direction)
        try:
            message = unpack(self.tap.read(seen), self.exchange.layout, stamp)
        except FedVeilError as error:
            raise type(error)(
                f"{self.tap.folder / seen.file}: {error}; is this tap of another method or base?"
            ) from error
        return Sighting(
            seen.round, seen.attempt, seen.site, seen.direction, message.payload,
            message.num_examples or 0, message.report, bool(seen.accepted),
        )  # fmt: skip


@dataclass(frozen=True)
class Knowledge:
    """What an adversary is declared to know beside its view.

    Attributes:
        task: the base model with its adapter, and how rows are prepared.
        initial: the adapter's weights of round 0, which everybody can draw.
        server: the final model of the server, None where the adversary does not have it.
        says: the same in words, for a report.
    """

    task: Task
    initial: Weights
    server: Weights | None = None
    says: str = ""
