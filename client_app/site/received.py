"""What a turn is about to train from, judged before a row is looked at: whatever method, the first weights of a turn.

    <state-dir>/<run>/<site>/received.json    of the last turn that was completed: a secret key, and for every tensor a
                                              sketch of what was trained from under that key, and the largest norm

    norm   = |w|                                       all trained tensors together
    change = max over tensors of  rms(w - last) / max(rms so far of this tensor, rms so far of all together)

"So far" is the largest of what this site trained from in this run. It is taken tensor by tensor so that one hostile
layer among many does not drown; a B that is zero is measured by all tensors together.

| case | what happens |
|---|---|
| a value that is not finite | PolicyError |
| norm above max-broadcast-norm, or change above max-broadcast-change | PolicyError |
| the first turn in a run | `last` is what `run.seed` says that a run begins with; every site can draw it |
| the first turn of a site that came late | the same: what the others have learned until then counts as change |
| `last` is zero everywhere, and so was all before | only the norm is judged |
| other tensors than the last time | as in the first turn |
| a turn fails, or is refused | `last` stays |
| a factor or prompt that the site keeps for itself | it is a part of what is trained, and judged with the rest |
| the file is damaged | StateError |

The server learns that a bound was passed, and not the numbers: what a site keeps for itself is in them. The site's log
has them. A sketch is of 64 numbers (fedveil/algebra/sketch.py), so that a large model is not kept twice; a change is
known to about 9 %.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from fedveil.algebra.sketch import SIZE, sketch
from fedveil.client_app.site import policy
from fedveil.client_app.site.node_config import Site
from fedveil.client_app.site.private import RECEIVED, folder_of, role_of
from fedveil.contract.spec import Weights
from fedveil.contract.trainer import Batch, FeatureGradients, Frozen, Penalty, PerSample, RowGradients, Trained, Trainer
from fedveil.errors import StateError
from fedveil.privacy.wrapped import WrappedRows, WrappedTrainer
from fedveil.records.files import write_atomic
from fedveil.sealed import Seal

_KEY_BYTES = 32

log = logging.getLogger("fedveil.site")


@dataclass(frozen=True)
class Reference:
    """What a site trained from, as far as it is kept.

    Attributes:
        key: of the sketches; never leaves the site.
        sketches: (SIZE,) for every tensor.
        norms: the largest so far of every tensor.
    """

    key: bytes
    sketches: Weights
    norms: Mapping[str, float]

    @classmethod
    def of(cls, weights: Weights, key: bytes = b"") -> Reference:
        """Of weights; without a key, with a new one."""
        key = key or os.urandom(_KEY_BYTES)
        return cls(key, {n: sketch(w, key, n) for n, w in weights.items()}, {n: _norm(w) for n, w in weights.items()})

    def then(self, weights: Weights) -> Reference:
        """The next reference, with the same key."""
        new = Reference.of(weights, self.key)
        return Reference(self.key, new.sketches, {n: max(norm, self.norms[n]) for n, norm in new.norms.items()})

    def fits(self, weights: Weights) -> bool:
        """Whether it is of tensors of these names."""
        return set(self.sketches) == set(weights)

    def change(self, weights: Weights) -> float:
        """The largest change of a tensor, as the module's formula has it; 0 where all is zero so far."""
        entries = sum(w.numel() for w in weights.values())
        of_all = math.hypot(*self.norms.values()) / math.sqrt(entries)
        changes = [0.0]
        for name, w in weights.items():
            root = math.sqrt(max(1, w.numel()))
            moved = float(torch.linalg.vector_norm(sketch(w, self.key, name) - self.sketches[name])) / root
            if scale := max(of_all, self.norms[name] / root):
                changes.append(moved / scale)
        return max(changes)


def norm_of(weights: Weights) -> float:
    """Euclidean norm of all tensors together; not finite where an entry is not."""
    return math.hypot(*map(_norm, weights.values()))


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


@dataclass(frozen=True)
class Received:
    """The reference of one run at one site.

    Attributes:
        folder: of the run's private state.
    """

    folder: Path
    seal: Seal = Seal()

    @classmethod
    def of(cls, state_dir: Path, run: str, site: str, seal: Seal = Seal()) -> Received:
        """Of a run and a site. Raises ConfigError for a name that is not a plain file name."""
        return cls(folder_of(state_dir, run, site), seal)

    @property
    def _file(self) -> Path:
        return self.folder / RECEIVED

    def load(self) -> Reference | None:
        """None before the first completed turn. Raises StateError for a file that cannot be read."""
        if not self._file.exists():
            return None
        try:
            content = json.loads(self.seal.read(self._file, role_of(self._file)))
            tensors = content["tensors"]
            found = Reference(
                bytes.fromhex(content["key"]),
                {name: _unpacked(text) for name, (_, text) in tensors.items()},
                {name: float(norm) for name, (norm, _) in tensors.items()},
            )
            if len(found.key) == _KEY_BYTES and all(map(math.isfinite, found.norms.values())):
                return found
            reason = "another length"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = type(error).__name__
        raise StateError(
            f"{self._file}: expected what this site trained from last, found none that can be read ({reason}); restore "
            "it from a backup"
        )

    def save(self, reference: Reference) -> None:
        """Keeps the reference, whole or not at all. Raises StateError, e.g. on a full disk."""
        packed = {n: base64.b64encode(values.numpy().tobytes()).decode() for n, values in reference.sketches.items()}
        tensors = {name: [reference.norms[name], text] for name, text in packed.items()}
        content = {"key": reference.key.hex(), "tensors": tensors}
        try:
            write_atomic(self._file, self.seal.closed([json.dumps(content).encode()], role_of(self._file)))
        except OSError as error:
            raise StateError(f"{self._file}: expected to write it, found {error}; free space") from error


def _unpacked(text: str) -> Tensor:
    values = torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.float64)
    if len(values) != SIZE:
        raise ValueError
    return values


@final
class Judged(WrappedTrainer):
    """A trainer that judges the first weights that it is given, before a row is looked at.

    Args:
        site: whose policy has the bounds.
        received: the site's reference.
        initial: gives what the run begins with; asked in the first turn only.
    """

    def __init__(self, trainer: Trainer, site: Site, received: Received, initial: Callable[[], Weights]) -> None:
        super().__init__(trainer)
        self._site, self._received, self._initial = site, received, initial
        self._next: Reference | None = None

    def judge(self, weights: Weights) -> None:
        """Judges the first weights of the turn; later ones are the method's own. Raises PolicyError, StateError."""
        if self._next is not None:
            return
        norm = norm_of(weights)
        policy.check_received(self._site, norm, 0.0)  # before a difference is taken with what is not finite
        last = self._received.load()
        if last is None or not last.fits(weights):
            last = Reference.of(self._initial())
        change = last.change(weights)
        log.info("to be trained from: norm %.6g, change %.6g", norm, change)
        policy.check_received(self._site, norm, change)
        self._next = last.then(weights)

    def keep(self) -> None:
        """Keeps what this turn was trained from, for the next one. Raises StateError."""
        if self._next is not None:
            self._received.save(self._next)

    @property
    @override
    def rows(self) -> RowGradients:
        return _JudgedRows(self._trainer.rows, self)

    @override
    def train(self, weights: Weights, frozen: Frozen | None = None, penalty: Penalty | None = None) -> Trained:
        self.judge(weights)
        return super().train(weights, frozen, penalty)

    @override
    def gradient(self, weights: Weights) -> Trained:
        self.judge(weights)
        return super().gradient(weights)


@final
class _JudgedRows(WrappedRows):
    """Row gradients whose first weights are judged."""

    def __init__(self, rows: RowGradients, judged: Judged) -> None:
        super().__init__(rows)
        self._judged = judged

    @override
    def per_sample(self, weights: Weights, batch: Batch) -> PerSample:
        self._judged.judge(weights)
        return super().per_sample(weights, batch)

    @override
    def feature(self, weights: Weights, batch: Batch) -> FeatureGradients:
        self._judged.judge(weights)
        return super().feature(weights, batch)
