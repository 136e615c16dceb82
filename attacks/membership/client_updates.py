"""The sites' updates as one adversary sees them: the weights at the start and end of each client round.

The server broadcasts the initial value of each sent tensor and sees its final value, so it knows both exactly. A
tensor that the site kept is set to the last value the server saw, as in `factor_pairing`. If sites keep no tensors
(FedRand w/o past), the broadcast is the exact start. With a residual, `residual_replay` gives the exact start.

SCAFFOLD corrects every step by c - c_i. The server knows this correction: it broadcasts c, and the changes
of c_i add up to c_i. AdamW scales the correction entry by entry; with no other input, only its signs remain. So the
components along c - c_i and along its signs are removed from the update. Adaptive note: measured on
the tiny LLaVA (six sites of 30 captions, 8 rounds of 12 steps of AdamW, five seeds), `alignment` reached
0.72 from the raw updates and 0.91 from the projected updates. On two of the seeds, `fedmia` rose from 0.88 to
0.97, `projection` of B from 0.85 to 0.90, and `projection` of A from 0.80 to 0.82.

| case | result |
|---|---|
| a site that lost its c_i | the sum is wrong, so the projection removes the wrong two-dimensional plane |
| sums of several sites | unchanged: with all sites in every round, their corrections cancel |
| a view without the client round's broadcast | unchanged: c is not known |

Messages are decoded only when a client update is requested, and then only that update's two messages. Earlier
messages are also decoded to compute c_i, and to find initial values missing from the update's own broadcast; that
search starts at the most recent message and stops as soon as it has found them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedveil.attacks.base import AdversaryView, ObservedMessage, ObservedParticipation
from fedveil.attacks.model_extraction import residual_replay
from fedveil.attacks.reconstruction.observed_gradients import observe_upload
from fedveil.contract.param_spec import Weights
from fedveil.strategies.scaffold import CONTROL, Scaffold
from fedveil.wire.payloads import payload_tensors

__all__ = ["ObservedClientUpdate", "ObservedClientUpdates", "remove_correction"]

_ALIKE = 1e-9  # relative length below which a vector's remainder after a projection counts as rounding error


@dataclass(frozen=True)
class ObservedClientUpdate:
    """One participation of a site, as known to the server.

    Attributes:
        round: number of the round.
        start: every tensor of the spec, before training.
        moved: change of each tensor that the site sent; under SCAFFOLD, without the correction.
        probe: number of the random draw of B in `start` if the server never saw B; otherwise None.
    """

    round: int
    start: Weights
    moved: Mapping[str, Tensor]
    probe: int | None = None

    @cached_property
    def starts_at(self) -> bytes:
        """Return a digest that is equal for client rounds with bit-identical starts."""
        return _digest(self.start)

    @cached_property
    def moves_by(self) -> bytes:
        """Return a digest that is equal for client rounds with bit-identical changes."""
        return _digest(self.moved)


class ObservedClientUpdates:
    """All client rounds in a view, decoded only on request.

    Attributes:
        sites: names of the sites with an accepted upload, sorted.
    """

    def __init__(self, view: AdversaryView, initial: Weights) -> None:
        """Read the index of captured messages. `initial` has the weights of round 0, which every party can generate."""
        self._view, self._initial, self._of = view, initial, view.participations()
        self.sites = sorted(self._of)
        self._controls: dict[str, tuple[int, Mapping[str, Tensor]]] = {}

    def rounds(self, site: str) -> list[int]:
        """Return the round numbers of a site's client rounds, in order; empty if there are none."""
        return [part.up.round for part in self._of.get(site, ())]

    def of_round(self, site: str, round_: int) -> list[ObservedClientUpdate]:
        """Return a site's client rounds in one round; there are several if the server repeated the round."""
        return [self.at(site, i) for i, round_number in enumerate(self.rounds(site)) if round_number == round_]

    def at(self, site: str, index: int) -> ObservedClientUpdate:
        """Return one client round of a site; index -1 is the last one."""
        parts = self._of[site]
        index %= len(parts)
        got = self._got(parts[index])
        upload = self._view.read(parts[index].up)
        if residual_replay.has_residual(self._view.exchange.spec):
            start, pairs = (
                residual_replay.starting_weights(self._view, parts, index),
                residual_replay.final_factors(self._view, upload),
            )
            return ObservedClientUpdate(upload.round, start, {n: w - start[n] for n, w in pairs.items()})
        sent = self._left(upload, got)
        past = self._past(parts[:index], {n for n in self._initial if n not in sent or n not in got})
        fallback = {**self._initial, **got, **past}  # for tensors that were not sent: the site's last known values
        start = {n: (got.get(n, fallback[n]) if n in sent else fallback[n]).float() for n in self._initial}
        moved = {n: w - start[n] for n, w in sent.items()}
        if isinstance(self._view.exchange.method, Scaffold) and got and not self._view.is_unseen:
            own = self._control(site, index)
            moved = remove_correction(moved, {n: got[CONTROL + n].double() - own.get(CONTROL + n, 0.0) for n in moved})
        return ObservedClientUpdate(upload.round, start, moved)

    def _control(self, site: str, index: int) -> Mapping[str, Tensor]:
        """Return SCAFFOLD's c_i before a client round: the sum of its observed changes; empty before the first."""
        done, total = self._controls.get(site, (0, {}))
        if done > index:
            done, total = 0, {}
        total = dict(total)
        for part in self._of[site][done:index]:
            for name, change in payload_tensors(self._view.read(part.up).payload).items():
                if name.startswith(CONTROL):
                    total[name] = total.get(name, 0.0) + change.double()  # the sum of two changes could overflow fp32
        self._controls[site] = index, total
        return total

    def _got(self, part: ObservedParticipation) -> Weights:
        exchange = self._view.exchange
        received = payload_tensors(self._view.read(part.down).payload) if part.down else {}
        return exchange.method.starting_weights(received, exchange.spec)

    def _left(self, upload: ObservedMessage, got: Weights) -> dict[str, Tensor]:
        """Return the final values of each tensor that the site sent.

        A gradient counts as one step with learning rate 1 that changes no withheld entry.
        """
        exchange = self._view.exchange
        if exchange.method.upload_kind != "gradients":
            return {n: w.float() for n, w in self._view.added(upload).items() if n in self._initial}
        observation = observe_upload(exchange.method, upload.payload, exchange.spec)
        return {
            n: got[n].float() - torch.where(observation.seen[n], g.float(), 0.0)
            for n, g in observation.values.items()
            if n in got and n in self._initial
        }

    def _past(self, before: Sequence[ObservedParticipation], names: set[str]) -> dict[str, Tensor]:
        """Return these tensors' values as the site last sent them, omitting tensors that it never sent."""
        past_tensors: dict[str, Tensor] = {}
        if not self._view.exchange.method.keeps_past:
            return past_tensors
        needs_got = self._view.exchange.method.upload_kind == "gradients"
        for part in reversed(before):
            if past_tensors.keys() >= names:
                break
            sent = self._left(self._view.read(part.up), self._got(part) if needs_got else {})
            past_tensors |= {n: w for n, w in sent.items() if n in names and n not in past_tensors}
        return past_tensors


def remove_correction(moved: Mapping[str, Tensor], correction: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the changes without their components along the correction and along its signs, over all tensors."""
    names = sorted(moved)
    whole = torch.cat([moved[n].double().flatten() for n in names])
    along = torch.cat([correction[n].double().flatten() for n in names])
    if along.any():
        first, signs = along / along.norm(), along.sign()
        whole = whole - (whole @ first) * first
        second = signs - (signs @ first) * first
        if second.norm() > _ALIKE * signs.norm():
            whole = whole - (whole @ second) / (second @ second) * second
    left = torch.split(whole.float(), [moved[n].numel() for n in names])
    return {n: part.view_as(moved[n]) for n, part in zip(names, left, strict=True)}


def _digest(tensors: Mapping[str, Tensor]) -> bytes:
    """Return a hash of names, shapes and bits."""
    made = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        values = tensors[name].detach().cpu().contiguous()
        made.update(f"{name} {tuple(values.shape)} {values.dtype}\0".encode())
        made.update(values.reshape(-1).numpy().data)
    return made.digest()
