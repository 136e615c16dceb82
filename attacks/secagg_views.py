"""Views of a run with secure aggregation: each site's masked vector, read as if it were unmasked, and the sums.

The server does have the sums. Vectors and sums are both adversary views, so every attack runs on them as on an unmasked
run.

| view | tensors instead of a site's upload |
|---|---|
| `MaskedUploadView` | its masked vector, decoded as if it were not masked, under the spec's names |
| `MaskedUploadView` with `off` | the same, minus the masks the adversary knows: a site's own mask or a colluder's |
| `SecureSumView` | the sum that includes the upload, as revealed by the next broadcast |

Decoding is linear, and a vector is uniform if any of its masks is unknown, so no other decoding would do better.
With all masks removed, the vector equals the site's values up to rounding; this checks that the view decodes correctly.

| the method sends | its sum is |
|---|---|
| weights | the mean, which is the next broadcast, or the final model |
| gradients for a plain SGD step on the server | (w_t - w_{t+1}) / eta |
| with `server.optimizer` | not computed here, although the broadcasts of all rounds together reveal it |
| anything else | not revealed by broadcasts, so there is no `SecureSumView` |
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

from fedveil.attacks.base import AdversaryView, ObservedMessage
from fedveil.config import RunConfig, SecureConfig
from fedveil.contract.layout import Direction, Payload
from fedveil.contract.method import Method
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import Task
from fedveil.encrypted_files import FileSeal
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.secagg import mask_streams
from fedveil.federation.secagg.adversary_model import single_site
from fedveil.federation.secagg.fixed_point import FixedPointRing
from fedveil.federation.secagg.flatten import VectorLayout
from fedveil.federation.secagg.mask_streams import Integers, MaskStream
from fedveil.federation.secagg.masked_upload import MaskedUploadCodec
from fedveil.ops import fedsgd
from fedveil.ops.server_optimizer import ServerOptimizer
from fedveil.records.tensor_state import load_state
from fedveil.strategies.fixed_position import FixedPosition
from fedveil.strategies.random_binary import RandomBinary
from fedveil.wire.capture import CapturedMessage, MessageCapture
from fedveil.wire.payloads import payload_tensors

__all__ = ["MaskedUploadView", "SecureSumView", "Turn", "read_unmasked", "secagg_view_of_run", "secagg_views"]

Turn = tuple[int, int, str]  # round, attempt, site


@dataclass(frozen=True)
class _WithoutUploads(AdversaryView, ABC):
    """A view that replaces individual uploads with other tensors.

    Attributes:
        exchange: exchange as attacks read it: a tensor's zeros are its masks, regardless of their encoding.
        sent: exchange as it was transmitted.
    """

    sent: MessageExchange = field(kw_only=True)
    is_unseen = True

    @override
    def added(self, upload: ObservedMessage) -> dict[str, Tensor]:
        return dict(payload_tensors(upload.payload))

    @override
    def _decode(self, seen: CapturedMessage) -> ObservedMessage:
        down = seen.direction == "down"
        payload = self._message(seen, self.sent).payload if down else Payload(self._in_place_of(seen))
        return ObservedMessage(seen.round, seen.attempt, seen.site, seen.direction, payload, 0, {}, bool(seen.accepted))

    @abstractmethod
    def _in_place_of(self, seen: CapturedMessage) -> dict[str, Tensor]:
        """Return the tensors that replace an upload, by parameter name."""


@final
@dataclass(frozen=True)
class MaskedUploadView(_WithoutUploads):
    """A view of the masked vectors.

    Attributes:
        secure: section of the run's config.
        off: masks to remove first, by round, attempt and site.
    """

    secure: SecureConfig = field(kw_only=True)
    off: Mapping[Turn, Sequence[MaskStream]] = field(kw_only=True, default_factory=dict)

    @classmethod
    def from_capture(
        cls,
        tap: MessageCapture,
        exchange: MessageExchange,
        secure: SecureConfig,
        off: Mapping[Turn, Sequence[MaskStream]] | None = None,
    ) -> MaskedUploadView:
        """Create the view from a run's captured messages."""
        return cls(tap, _read_as(exchange), sent=exchange, secure=secure, off=off or {})

    @override
    def _in_place_of(self, seen: CapturedMessage) -> dict[str, Tensor]:
        turn, secure = (seen.round, seen.attempt, seen.site), self.secure
        summed = MaskedUploadCodec.from_exchange(self.sent, seen.round, secure.ring_bits)
        with self._named(seen):
            _, vector, _ = summed.receive(self.tap.read(seen), None)
        vector = vector.copy()
        mask_streams.add_masks(vector, self.off.get(turn, ()))
        cohort = {s.site for s in self._seen("down") if (s.round, s.attempt) == turn[:2]}
        return read_unmasked(
            summed.slots, FixedPointRing(secure.ring_bits, len(cohort), secure.max_weight, secure.clip_bound), vector
        )


def read_unmasked(slots: VectorLayout, ring: FixedPointRing, vector: Integers) -> dict[str, Tensor]:
    """Decode a vector as if it were not masked: divide values by their weight, or return zero if the weight is zero.

    An impossible weight is clipped to the nearest possible one. A name whose only weight is zero is omitted.
    """
    means: dict[str, Tensor] = {}
    for slot in slots.slots:
        values = ring.decode(vector[slot.start : slot.start + slot.values]).reshape(slot.shape)
        weights = torch.from_numpy(vector[slot.start + slot.values : slot.end].astype(float)).reshape(
            slot.weights_shape
        )
        if slot.weights_shape or bool(weights.any()):
            mean = values / weights.clamp(1, ring.most_weight)
            means[slot.name] = torch.where(weights > 0, mean, 0.0).to(torch.float32)
    return means


@final
@dataclass(frozen=True)
class SecureSumView(_WithoutUploads):
    """A view that replaces each upload with the sum of its round.

    Attributes:
        final: weights of the final model, because no broadcast follows the last round.
    """

    final: Weights = field(kw_only=True)

    @classmethod
    def from_capture(cls, tap: MessageCapture, exchange: MessageExchange, final_: Weights) -> SecureSumView | None:
        """Create the view from a run's captured messages; None if broadcasts do not reveal the sums."""
        method = exchange.method
        if exchange.optimizer is not None:  # the sum then depends on all earlier broadcasts; not computed here
            return None
        if method.upload_kind == "weights" or _rate(method) is not None:
            return cls(tap, _read_as(exchange), sent=exchange, final=final_)
        return None

    @override
    def _seen(self, direction: Direction) -> Iterator[CapturedMessage]:
        """Yield the captured messages of each round's last attempt, because earlier attempts have no sum."""
        last = {s.round: s.attempt for s in sorted(self.tap.messages(), key=lambda s: s.attempt)}
        return (s for s in super()._seen(direction) if s.attempt == last[s.round])

    @override
    def _in_place_of(self, seen: CapturedMessage) -> dict[str, Tensor]:
        later = [s for s in self._seen("down") if s.round > seen.round]
        after = payload_tensors(self._decode(min(later, key=lambda s: s.round)).payload) if later else self.final
        names = [n for n in self.sent.method.aggregate_shapes(self.sent.spec, seen.round) if n in after]
        rate = _rate(self.sent.method)
        if rate is None:
            return {n: after[n].float() for n in names}
        asked = [s for s in self._seen("down") if (s.round, s.site) == (seen.round, seen.site)]
        before = payload_tensors(self._decode(asked[-1]).payload)
        return {n: (before[n].float() - after[n].float()) / rate for n in names}


def _rate(method: Method) -> float | None:
    """Return the server's step size along the mean gradient, or None if the method takes no such step."""
    if isinstance(method, RandomBinary | FixedPosition) and method.optimiser == "sgd":
        return fedsgd.learning_rate_of(method.learning_rate, method.exchange, method.optimiser)
    return None


def _read_as(exchange: MessageExchange) -> MessageExchange:
    method = exchange.method
    return replace(exchange, method=replace(method, wire="implicit")) if isinstance(method, RandomBinary) else exchange


def secagg_view_of_run(
    folder: Path, config: RunConfig, method: Method, task: Task
) -> tuple[AdversaryView, AdversaryView | None, Sequence[str], Weights]:
    """Return `secagg_views` of the run in a folder, and its final model. Raises StateError if either is missing."""
    tap = MessageCapture(folder / "tap", FileSeal.of_environment())
    list(tap.messages())  # raises an error that tells how to capture messages
    server = method.models(load_state(folder / "final" / "server.safetensors"))["server"]
    optimizer = ServerOptimizer.from_config(config.server)
    exchange = MessageExchange(method, config.method.name, task.spec, optimizer)
    return *secagg_views(tap, exchange, config, server), server


def secagg_views(
    tap: MessageCapture, exchange: MessageExchange, config: RunConfig, server: Weights
) -> tuple[AdversaryView, AdversaryView | None, Sequence[str]]:
    """Return the server's view; for a secure run also its sums, and sentences about what it could not see."""
    if not config.secure.enabled:
        return AdversaryView.server(tap, exchange), None, ()
    view, sums = (
        MaskedUploadView.from_capture(tap, exchange, config.secure),
        SecureSumView.from_capture(tap, exchange, server),
    )
    return view, sums, secagg_notes(view, sums)


def secagg_notes(view: MaskedUploadView, sums: SecureSumView | None) -> list[str]:
    """Return report sentences about what an honest-but-curious server could not see in a secure run."""
    method, exception = view.exchange.name, single_site(view.exchange.method.has_single_site_entries)
    exceptions = [exception] if exception else []
    return [
        "Secure aggregation: a server that followed the protocol could NOT see any single upload, or its norm, "
        "examples or metrics. It had one masked vector per site and round, the sums, and its own broadcasts. "
        "Findings under a site's name come from the masked vectors, read as if they were not masked: they should "
        "match the controls to lose; any other finding indicates a fault.",
        *exceptions,
        "The captured messages lack the shares that sites revealed, so each site's own mask remains here; the "
        "server itself can remove it, which leaves the masks that pairs of sites share (`fedveil bench "
        "secure/attacks` removes it and attacks the rest).",
        '"<site>, the sum" is what remains: the round\'s sum, as the next broadcast shows it, attacked as if it '
        "were the upload of that site. The sum and the model give no protection by themselves: the fewer sites, the "
        "more they reveal."
        if sums
        else f"The sums are NOT attacked here: this audit does not compute them from the broadcasts of {method}"
        f"{' with server.optimizer' if view.exchange.optimizer else ''}. The server had them.",
    ]
