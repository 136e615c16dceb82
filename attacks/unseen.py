"""A secure run as its server could read it: each site's masked vector at face value, and the sums, which it really has.

Both are views, so that every attack runs on them as on a run in the clear.

| view | in the place of a site's upload |
|---|---|
| `UnseenView` | its masked vector, the integers taken as if they were not masked, under the spec's names |
| `UnseenView`, `off` given | the same less the masks that the adversary knows: a site's own, a colluder's |
| `SumView` | the sum that it is in, as the broadcast after it shows it |

A linear reading is all that there is to try: decoding a vector is linear, and without one of its masks it is uniform.
With every mask taken off it is what the site sent, to the rounding, which tells that the view reads it as it should.

| the method sends | its sum is |
|---|---|
| weights | the mean, which is the next broadcast, or the final model |
| gradients, which the server's plain SGD takes a step along | (w_t - w_{t+1}) / eta |
| anything else | not shown by broadcasts: there is no `SumView` |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from fedveil.algebra import fedsgd
from fedveil.attacks.base import Sighting, View
from fedveil.config import RunConfig, SecureConfig
from fedveil.contract.layout import Direction, Payload
from fedveil.contract.method import Method
from fedveil.contract.spec import Weights
from fedveil.contract.task import Task
from fedveil.federation.exchange import Exchange
from fedveil.federation.secure import masks
from fedveil.federation.secure.masks import Integers, Mask
from fedveil.federation.summed.ring import Ring
from fedveil.federation.summed.summands import Slots
from fedveil.federation.summed.uploads import Summed
from fedveil.records.state import load_state
from fedveil.sealed import Seal
from fedveil.strategies.fixed_position import FixedPosition
from fedveil.strategies.random_binary import RandomBinary
from fedveil.wire.payloads import tensors_of
from fedveil.wire.tap import Seen, Tap

Turn = tuple[int, int, str]  # round, attempt, site


@dataclass(frozen=True)
class _WithoutUploads(View, ABC):
    """A view in which something else stands in the place of uploads.

    Attributes:
        exchange: as attacks read it: masks are the zeros of a tensor, whatever their form on the wire.
        sent: as it was.
    """

    sent: Exchange = field(kw_only=True)
    is_unseen = True

    @override
    def added(self, upload: Sighting) -> dict[str, Tensor]:
        return dict(tensors_of(upload.payload))

    @override
    def _decode(self, seen: Seen) -> Sighting:
        down = seen.direction == "down"
        payload = self._message(seen, self.sent).payload if down else Payload(self._in_place_of(seen))
        return Sighting(seen.round, seen.attempt, seen.site, seen.direction, payload, 0, {}, bool(seen.accepted))

    @abstractmethod
    def _in_place_of(self, seen: Seen) -> dict[str, Tensor]:
        """What stands in the place of an upload, under the spec's names."""


@final
@dataclass(frozen=True)
class UnseenView(_WithoutUploads):
    """The masked vectors.

    Attributes:
        secure: of the run's config.
        off: masks that are taken off first, by round, attempt and site.
    """

    secure: SecureConfig = field(kw_only=True)
    off: Mapping[Turn, Sequence[Mask]] = field(kw_only=True, default_factory=dict)

    @classmethod
    def of(
        cls, tap: Tap, exchange: Exchange, secure: SecureConfig, off: Mapping[Turn, Sequence[Mask]] | None = None
    ) -> UnseenView:
        """Of a run's tap."""
        return cls(tap, _read_as(exchange), sent=exchange, secure=secure, off=off or {})

    @override
    def _in_place_of(self, seen: Seen) -> dict[str, Tensor]:
        turn, secure = (seen.round, seen.attempt, seen.site), self.secure
        summed = Summed.of(self.sent, seen.round, secure.ring_bits)
        with self._named(seen):
            _, vector, _ = summed.receive(self.tap.read(seen), None)
        vector = vector.copy()
        masks.apply(vector, self.off.get(turn, ()))
        cohort = {s.site for s in self._seen("down") if (s.round, s.attempt) == turn[:2]}
        return read(summed.slots, Ring(secure.ring_bits, len(cohort), secure.max_examples, secure.bound), vector)


def read(slots: Slots, ring: Ring, vector: Integers) -> dict[str, Tensor]:
    """A vector as if it were not masked: each name's values by weight, zero where its weight is zero.

    A weight that no site can have counts as the nearest that one can. A name of one weight, which is zero, is left out.
    """
    found: dict[str, Tensor] = {}
    for slot in slots.slots:
        values = ring.decode(vector[slot.start : slot.start + slot.values]).reshape(slot.shape)
        weights = torch.from_numpy(vector[slot.start + slot.values : slot.end].astype(float)).reshape(
            slot.weights_shape
        )
        if slot.weights_shape or bool(weights.any()):
            mean = values / weights.clamp(1, ring.most_weight)
            found[slot.name] = torch.where(weights > 0, mean, 0.0).to(torch.float32)
    return found


@final
@dataclass(frozen=True)
class SumView(_WithoutUploads):
    """The round's sum in the place of every upload that is in it.

    Attributes:
        final: weights of the last model, which no broadcast follows.
    """

    final: Weights = field(kw_only=True)

    @classmethod
    def of(cls, tap: Tap, exchange: Exchange, final_: Weights) -> SumView | None:
        """Of a run's tap; None where broadcasts do not show the sums."""
        method = exchange.method
        if method.sends == "weights" or _rate(method) is not None:
            return cls(tap, _read_as(exchange), sent=exchange, final=final_)
        return None

    @override
    def _seen(self, direction: Direction) -> Iterator[Seen]:
        """An attempt after which the round was repeated has no sum."""
        last = {s.round: s.attempt for s in sorted(self.tap.messages(), key=lambda s: s.attempt)}
        return (s for s in super()._seen(direction) if s.attempt == last[s.round])

    @override
    def _in_place_of(self, seen: Seen) -> dict[str, Tensor]:
        later = [s for s in self._seen("down") if s.round > seen.round]
        after = tensors_of(self._decode(min(later, key=lambda s: s.round)).payload) if later else self.final
        names = [n for n in self.sent.method.summed(self.sent.spec, seen.round) if n in after]
        rate = _rate(self.sent.method)
        if rate is None:
            return {n: after[n].float() for n in names}
        asked = [s for s in self._seen("down") if (s.round, s.site) == (seen.round, seen.site)]
        before = tensors_of(self._decode(asked[-1]).payload)
        return {n: (before[n].float() - after[n].float()) / rate for n in names}


def _rate(method: Method) -> float | None:
    """The step along a mean gradient; None where the model shows no such step."""
    if isinstance(method, RandomBinary | FixedPosition) and method.optimiser == "sgd":
        return fedsgd.rate_of(method.learning_rate, method.exchange, method.optimiser)
    return None


def _read_as(exchange: Exchange) -> Exchange:
    method = exchange.method
    return replace(exchange, method=replace(method, wire="implicit")) if isinstance(method, RandomBinary) else exchange


def of_run(
    folder: Path, config: RunConfig, method: Method, task: Task
) -> tuple[View, View | None, Sequence[str], Weights]:
    """`views` of the run in that folder, and its final model. Raises StateError where tap or model are missing."""
    tap = Tap(folder / "tap", Seal.of_environment())
    list(tap.messages())  # there, or an error that says how to get one
    server = method.deployed(load_state(folder / "final" / "server.safetensors"))["server"]
    return *views(tap, Exchange(method, config.method.name, task.spec), config, server), server


def views(tap: Tap, exchange: Exchange, config: RunConfig, server: Weights) -> tuple[View, View | None, Sequence[str]]:
    """What the server saw; of a secure run also its sums, and sentences on what it could not see."""
    if not config.secure.enabled:
        return View.server(tap, exchange), None, ()
    view, sums = UnseenView.of(tap, exchange, config.secure), SumView.of(tap, exchange, server)
    return view, sums, notes(view, sums)


def notes(view: UnseenView, sums: SumView | None) -> list[str]:
    """What the server of a secure run could not see, in sentences for a report."""
    method = view.exchange.name
    return [
        "Secure aggregation: the server could NOT see a single upload, nor its norm, its examples or its figures. It "
        "had one masked vector of each site and round, the sums, and its own broadcasts. What stands under a site's "
        "name is what the attacks make of the masked vectors, read as if they were not masked: there they should be at "
        "their lost controls, and another finding is a fault.",
        "The tap does not hold the shares that sites opened, so each site's own mask stayed on here; the server itself "
        "can take it off, which leaves the masks that pairs of sites share (`fedveil bench secure/attacks` takes it "
        "off and attacks the rest).",
        '"<site>, the sum" is what stays: the round\'s sum, as the next broadcast shows it, attacked as if it were the '
        "upload of that site. The sum and the model protect nobody by themselves: the fewer sites, the more they show."
        if sums
        else f"The sums are NOT attacked here: broadcasts of {method} do not show them. The server had them.",
    ]
