"""Interfaces of attacks: the adversary's view, its declared knowledge, and the attack classes.

An adversary has a view of the messages and declared knowledge. An attack reads nothing else.

`fedveil audit` runs every attack that `list_attacks` returns: each `ModelAttack` and `UploadAttack` in the
packages here, and the attacks that other packages register under the entry-point group "fedveil.attacks".
So adding an attack takes one file and one test.

| an attack on | reads | must succeed on | must fail on |
|---|---|---|---|
| a model (`ModelAttack`) | the model's output for an example | OVERFITTED | ROUND_0, OTHER_ROWS: no difference |
| uploads (`UploadAttack`) | a site's uploads | OVERFITTED | OTHER_ROWS; WRONG_SITE: members do not score higher |

A control must be able to fail. If an attack gives all examples in a control the same score, that control
cannot fail and counts as not run.
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
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import ExamplePrediction, Rows, Task
from fedveil.errors import ConfigError, FedVeilError
from fedveil.federation.exchange import MessageExchange
from fedveil.wire.capture import CapturedMessage, MessageCapture
from fedveil.wire.envelope import DecodedMessage, EnvelopeStamp, unpack_message

__all__ = [
    "ENTRY_POINTS",
    "OTHER_ROWS",
    "OVERFITTED",
    "ROUND_0",
    "WRONG_SITE",
    "AdversaryKnowledge",
    "AdversaryView",
    "AuditAttack",
    "ModelAttack",
    "ModelOutput",
    "ObservedMessage",
    "ObservedParticipation",
    "UploadAttack",
    "explain_misfit",
    "list_attacks",
]

ENTRY_POINTS = "fedveil.attacks"
OVERFITTED = "overfitted FedAvg"  # a few memorized members, nothing withheld
ROUND_0 = "round 0"  # the model before any round, untrained
OTHER_ROWS = "other rows"  # a model trained on site examples other than those under attack
WRONG_SITE = "wrong site"  # a site's examples, scored on the upload of another site, which did not train on them


@dataclass(frozen=True)
class ObservedMessage:
    """One decoded message.

    Attributes:
        round, attempt, site, direction: the values of the captured message.
        payload: content of the message.
        num_examples: number of training examples stated in the upload; 0 for a broadcast.
        report: metrics reported in the upload; empty for a broadcast.
        accepted: True if the server added the upload to its sums.
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
class ObservedParticipation:
    """An accepted upload in the capture, and the broadcast that it answers (None if it is not in the view)."""

    up: CapturedMessage
    down: CapturedMessage | None


@dataclass(frozen=True)
class AdversaryView:
    """The messages that one adversary saw, decoded one at a time.

    `AdversaryView.server` is the view of a server that follows the protocol and reads every message.
    `AdversaryView.client` is the view of one site, which sees its own messages.
    """

    tap: MessageCapture
    exchange: MessageExchange
    site: str | None = None
    is_unseen: ClassVar[bool] = False  # True if the view replaces uploads with other tensors

    @classmethod
    def server(cls, tap: MessageCapture, exchange: MessageExchange) -> AdversaryView:
        """Return the server's view: every message that the server sent or received."""
        return cls(tap, exchange)

    @classmethod
    def client(cls, tap: MessageCapture, exchange: MessageExchange, site: str) -> AdversaryView:
        """Return the view of one site: the messages that it sent and received."""
        return cls(tap, exchange, site)

    @property
    def sites(self) -> list[str]:
        """Return the sorted names of the sites with an accepted upload."""
        return sorted({seen.site for seen in self._seen("up") if seen.accepted})

    def broadcasts(self, site: str | None = None) -> Iterator[ObservedMessage]:
        """Yield the broadcasts to every site, or to one site, in the order sent."""
        return self._decoded("down", site)

    def uploads(self, site: str | None = None) -> Iterator[ObservedMessage]:
        """Yield the accepted uploads from every site, or from one site, in the order received."""
        return self._decoded("up", site)

    def added(self, upload: ObservedMessage) -> dict[str, Tensor]:
        """Return an upload's contribution to the sums by parameter name, with codes and masks decoded by the method."""
        method, spec = self.exchange.method, self.exchange.spec
        ctx = RoundContext(upload.round, upload.site, False, bytes(32))  # contributions do not depend on the secret
        terms = method.contributions(upload.payload, 1, spec, ctx).tensors
        return {term.name: term.value for term in terms if term.name in spec}

    def answered(self, upload: ObservedMessage) -> ObservedMessage | None:
        """Return the broadcast that an upload answers, or None if it is not in the view. Decode no other message."""
        broadcast = None
        for seen in self._seen("down"):
            if (seen.site, seen.round, seen.attempt) == (upload.site, upload.round, upload.attempt):
                broadcast = seen
        return self._decode(broadcast) if broadcast else None

    def participations(self) -> dict[str, list[ObservedParticipation]]:
        """Return each site's accepted uploads in the order received, without decoding them."""
        asked = {(down.site, down.round, down.attempt): down for down in self._seen("down")}
        site_participations: dict[str, list[ObservedParticipation]] = {}
        for up in self._seen("up"):
            if up.accepted:
                site_participations.setdefault(up.site, []).append(
                    ObservedParticipation(up, asked.get((up.site, up.round, up.attempt)))
                )
        return site_participations

    def read(self, seen: CapturedMessage) -> ObservedMessage:
        """Decode one captured message."""
        return self._decode(seen)

    def _seen(self, direction: Direction) -> Iterator[CapturedMessage]:
        for seen in self.tap.messages():
            if seen.direction == direction and self.site in (None, seen.site):
                yield seen

    def _decoded(self, direction: Direction, site: str | None) -> Iterator[ObservedMessage]:
        for seen in self._seen(direction):
            if site not in (None, seen.site) or (direction == "up" and not seen.accepted):
                continue
            yield self._decode(seen)

    def _decode(self, seen: CapturedMessage) -> ObservedMessage:
        message = self._message(seen, self.exchange)
        return ObservedMessage(
            seen.round, seen.attempt, seen.site, seen.direction, message.payload,
            message.num_examples or 0, message.report, bool(seen.accepted),
        )  # fmt: skip

    def _message(self, seen: CapturedMessage, exchange: MessageExchange) -> DecodedMessage:
        stamp = EnvelopeStamp.from_exchange(exchange.method, exchange.name, seen.round, seen.direction, None)
        with self._named(seen):
            return unpack_message(self.tap.read(seen), exchange.layout, stamp)

    @contextmanager
    def _named(self, seen: CapturedMessage) -> Iterator[None]:
        """Prefix an error with the name of the file that contains the message."""
        try:
            yield
        except FedVeilError as error:
            raise type(error)(
                f"{self.tap.folder / seen.file}: {error}; were these messages captured with another method or base?"
            ) from error


@dataclass(frozen=True)
class AdversaryKnowledge:
    """Declared knowledge of an adversary, in addition to its view.

    Attributes:
        task: base model with its adapter, and example preprocessing.
        initial: adapter weights of round 0, which every party can generate.
        server: weights of the server's final model; None if the adversary does not have them.
        says: description of this knowledge for reports.
    """

    task: Task
    initial: Weights
    server: Weights | None = None
    says: str = ""


@dataclass(frozen=True)
class ModelOutput:
    """Outputs of the models for one example.

    Attributes:
        prediction: prediction of the attacked model.
        loss: the attacked model's loss on the example's own target, averaged over positions, in nats.
        base_loss: the same loss for the public base model, which every party has.
    """

    prediction: ExamplePrediction
    loss: float
    base_loss: float


class AuditAttack(ABC):
    """Base class of attacks that `fedveil audit` runs. An attack subclasses `ModelAttack` or `UploadAttack`.

    An attack can be created without arguments. It names its scores, and no two attacks share a score name.
    A higher score means that an example is more likely a member. No attack learns which examples are members.

    Attributes:
        must_win, must_lose: the controls. An attack that fails one of them proves nothing about a run.
        cost: approximate forward passes per example; a backward pass counts as two. Cheaper attacks run first.
    """

    must_win: ClassVar[str] = OVERFITTED
    must_lose: ClassVar[Sequence[str]]
    cost: ClassVar[int] = 1

    @property
    def name(self) -> str:
        """Return the attack's name for the audit's list of skipped attacks."""
        return type(self).__name__

    def misfit(self, view: AdversaryView, knowledge: AdversaryKnowledge) -> str:
        """Return why the attack cannot be tried on a run, as text to follow a colon; "" if it can."""
        return ""


class ModelAttack(AuditAttack):
    """An attack on a model's output for one example. The audit runs it on the server's model and on rebuilt models."""

    must_lose: ClassVar[Sequence[str]] = (ROUND_0, OTHER_ROWS)

    @abstractmethod
    def score(self, answer: ModelOutput) -> Mapping[str, float]:
        """Return the example's scores by name. The names are the same for all examples of a task."""


class UploadAttack(AuditAttack):
    """An attack on a site's uploads.

    Attributes:
        reads: the kinds of upload (`Method.upload_kind`: "weights", "gradients" or "changes") that it understands.
            Quantized uploads are not a separate kind: `AdversaryView.added` decodes them.
    """

    must_lose: ClassVar[Sequence[str]] = (OTHER_ROWS, WRONG_SITE)
    reads: ClassVar[frozenset[str]] = frozenset({"weights", "gradients"})
    cost: ClassVar[int] = 3

    @abstractmethod
    def scores(self, view: AdversaryView, site: str, knowledge: AdversaryKnowledge, rows: Rows) -> Mapping[str, Scores]:
        """Return the scores of `rows` on the uploads of `site`, by name; each has shape (rows,)."""


def list_attacks() -> list[AuditAttack]:
    """Return all attacks: first this package's, sorted by module name, then those from other packages.

    Raises:
        ConfigError: an entry point is not an attack.
    """
    package = importlib.import_module("fedveil.attacks")
    classes: list[type[AuditAttack]] = []
    for file in pkgutil.walk_packages(package.__path__, "fedveil.attacks."):
        if file.name.count(".") < 3 or file.name.startswith("fedveil.attacks.audit."):  # not an attack module
            continue
        module = importlib.import_module(file.name)
        classes += [c for c in vars(module).values() if _is_attack(c) and c.__module__ == module.__name__]
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        offered = point.load()
        if not _is_attack(offered):
            raise ConfigError(
                f"entry point {point.name} of {ENTRY_POINTS}: {offered!r} is not a ModelAttack or UploadAttack of "
                "fedveil.attacks.base; fix or remove the package that provides it"
            )
        classes.append(offered)
    return [c() for c in classes]


def explain_misfit(attack: AuditAttack, view: AdversaryView, knowledge: AdversaryKnowledge) -> str:
    """Return why an attack cannot be tried on a run, as text to follow a colon; "" if it can."""
    sends = view.exchange.method.upload_kind
    if isinstance(attack, UploadAttack) and sends not in attack.reads:
        return f"it reads {' and '.join(sorted(attack.reads))}, and the sites of this run send {sends}"
    return attack.misfit(view, knowledge)


def _is_attack(offered: object) -> TypeGuard[type[AuditAttack]]:
    kinds = (ModelAttack, UploadAttack)
    return isinstance(offered, type) and issubclass(offered, kinds) and not inspect.isabstract(offered)
