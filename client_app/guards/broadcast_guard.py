"""Check the first weights that a client round trains from, under any method, before any example is read.

    <state-dir>/<run>/<site>/received.json    of the last completed client round: a secret key, and for every tensor
                                              a sketch under that key of the weights trained from, and the largest norm

    norm   = |w|                                       all trained tensors together
    change = max over tensors of  rms(w - last) / max(rms so far of this tensor, rms so far of all together)

"So far" means the largest value that this site has trained from in this run. The guard tracks it per tensor, so
that one hostile layer among many does not go unnoticed. A B that is zero is measured against all tensors together.

| case | what happens |
|---|---|
| a value that is not finite | PolicyError |
| norm above max-broadcast-norm, or change above max-broadcast-change | PolicyError |
| the first client round in a run | `last` is the initial state from `run.seed`, which every site can compute |
| the first client round of a late site | the same: everything learned by others until then counts as change |
| `last` is zero everywhere, and so was all before | only the norm is checked |
| other tensors than the last time | as in the first client round |
| a client round fails or is refused | `last` stays |
| a factor or prompt that stays at the site | it is trained too, and checked with the rest |
| the file is damaged | StateError |

The server learns that a bound was exceeded, but not the numbers, because they depend on the site's private
data; the site's log has them. A sketch has 64 numbers (fedveil/ops/count_sketch.py), so that a large model is
not stored twice. It measures a change to within about 9 %.
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

from fedveil.client_app.policy import decisions
from fedveil.client_app.policy.site_policy import SitePolicy
from fedveil.client_app.state.client_state import RECEIVED, state_folder_of, state_role
from fedveil.contract.param_spec import Weights
from fedveil.contract.trainer import (
    BatchIndices,
    Frozen,
    Penalty,
    PerExampleFeatureGradients,
    PerExampleGradients,
    PerExampleGradientSource,
    Trainer,
    TrainingResult,
)
from fedveil.contract.trainer_wrappers import TrainerWrapper, WrappedGradientSource
from fedveil.encrypted_files import FileSeal
from fedveil.errors import StateError
from fedveil.ops.count_sketch import SIZE, count_sketch
from fedveil.records.atomic_files import write_atomic

_KEY_BYTES = 32

log = logging.getLogger("fedveil.site")


@dataclass(frozen=True)
class BroadcastReference:
    """A compact record of the weights that a site last trained from.

    Attributes:
        key: secret key of the sketches; never leaves the site.
        sketches: a sketch of shape (SIZE,) for every tensor.
        norms: the largest norm so far of every tensor.
    """

    key: bytes
    sketches: Weights
    norms: Mapping[str, float]

    @classmethod
    def from_weights(cls, weights: Weights, key: bytes = b"") -> BroadcastReference:
        """Build a reference from weights, with a new key if none is given."""
        key = key or os.urandom(_KEY_BYTES)
        return cls(
            key, {n: count_sketch(w, key, n) for n, w in weights.items()}, {n: _norm(w) for n, w in weights.items()}
        )

    def then(self, weights: Weights) -> BroadcastReference:
        """Return the next reference, with the same key."""
        new = BroadcastReference.from_weights(weights, self.key)
        return BroadcastReference(
            self.key, new.sketches, {n: max(norm, self.norms[n]) for n, norm in new.norms.items()}
        )

    def fits(self, weights: Weights) -> bool:
        """Return whether the reference has the same tensor names as `weights`."""
        return set(self.sketches) == set(weights)

    def change(self, weights: Weights) -> float:
        """Return the largest change of a tensor by the module's formula; 0 if everything was zero so far."""
        entries = sum(w.numel() for w in weights.values())
        of_all = math.hypot(*self.norms.values()) / math.sqrt(entries)
        changes = [0.0]
        for name, w in weights.items():
            root = math.sqrt(max(1, w.numel()))
            moved = float(torch.linalg.vector_norm(count_sketch(w, self.key, name) - self.sketches[name])) / root
            if scale := max(of_all, self.norms[name] / root):
                changes.append(moved / scale)
        return max(changes)


def weights_norm(weights: Weights) -> float:
    """Return the Euclidean norm of all tensors together; not finite if an entry is not."""
    return math.hypot(*map(_norm, weights.values()))


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


@dataclass(frozen=True)
class BroadcastReferenceStore:
    """The reference of one run at one site.

    Attributes:
        folder: folder of the run's private state.
    """

    folder: Path
    seal: FileSeal = FileSeal()

    @classmethod
    def open(cls, state_dir: Path, run: str, site: str, seal: FileSeal = FileSeal()) -> BroadcastReferenceStore:
        """Open the store of a run and a site. Raises ConfigError for a name that is not a plain file name."""
        return cls(state_folder_of(state_dir, run, site), seal)

    @property
    def _file(self) -> Path:
        return self.folder / RECEIVED

    def load(self) -> BroadcastReference | None:
        """Load the reference; None before the first completed client round. Raises StateError if unreadable."""
        if not self._file.exists():
            return None
        try:
            content = json.loads(self.seal.read(self._file, state_role(self._file)))
            tensors = content["tensors"]
            reference = BroadcastReference(
                bytes.fromhex(content["key"]),
                {name: _unpacked(text) for name, (_, text) in tensors.items()},
                {name: float(norm) for name, (norm, _) in tensors.items()},
            )
            if len(reference.key) == _KEY_BYTES and all(map(math.isfinite, reference.norms.values())):
                return reference
            reason = "another length"
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = type(error).__name__
        raise StateError(
            f"{self._file}: expected the record of what this site last trained from, found none that can be read "
            f"({reason}); restore it from a backup"
        )

    def save(self, reference: BroadcastReference) -> None:
        """Save the reference atomically. Raises StateError, e.g. on a full disk."""
        packed = {n: base64.b64encode(values.numpy().tobytes()).decode() for n, values in reference.sketches.items()}
        tensors = {name: [reference.norms[name], text] for name, text in packed.items()}
        content = {"key": reference.key.hex(), "tensors": tensors}
        try:
            write_atomic(self._file, self.seal.closed([json.dumps(content).encode()], state_role(self._file)))
        except OSError as error:
            raise StateError(f"{self._file}: expected to write it, found {error}; free space") from error


def _unpacked(text: str) -> Tensor:
    values = torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.float64)
    if len(values) != SIZE:
        raise ValueError
    return values


@final
class BroadcastGuard(TrainerWrapper):
    """A trainer that checks the first weights that it receives, before it reads an example.

    Args:
        policy: the site's policy, with the bounds.
        received: the site's reference.
        initial: returns the initial weights of the run; called only in the first client round.
    """

    def __init__(
        self, trainer: Trainer, policy: SitePolicy, received: BroadcastReferenceStore, initial: Callable[[], Weights]
    ) -> None:
        super().__init__(trainer)
        self._policy, self._received, self._initial = policy, received, initial
        self._next: BroadcastReference | None = None

    def judge(self, weights: Weights) -> None:
        """Check the client round's first weights; later ones are the method's own. Raises PolicyError, StateError."""
        if self._next is not None:
            return
        norm = weights_norm(weights)
        decisions.check_broadcast(self._policy, norm, 0.0)  # before any difference of non-finite values
        last = self._received.load()
        if last is None or not last.fits(weights):
            last = BroadcastReference.from_weights(self._initial())
        change = last.change(weights)
        log.info("weights to train from: norm %.6g, change %.6g", norm, change)
        decisions.check_broadcast(self._policy, norm, change)
        self._next = last.then(weights)

    def keep(self) -> None:
        """Save this client round's starting weights as the reference for the next. Raises StateError."""
        if self._next is not None:
            self._received.save(self._next)

    @property
    @override
    def rows(self) -> PerExampleGradientSource:
        return _JudgedRows(self._trainer.rows, self)

    @override
    def train(self, weights: Weights, frozen: Frozen | None = None, penalty: Penalty | None = None) -> TrainingResult:
        self.judge(weights)
        return super().train(weights, frozen, penalty)

    @override
    def gradient(self, weights: Weights) -> TrainingResult:
        self.judge(weights)
        return super().gradient(weights)


@final
class _JudgedRows(WrappedGradientSource):
    """Per-example gradients with a check of the first weights."""

    def __init__(self, rows: PerExampleGradientSource, judged: BroadcastGuard) -> None:
        super().__init__(rows)
        self._judged = judged

    @override
    def per_sample(self, weights: Weights, batch: BatchIndices) -> PerExampleGradients:
        self._judged.judge(weights)
        return super().per_sample(weights, batch)

    @override
    def feature(self, weights: Weights, batch: BatchIndices) -> PerExampleFeatureGradients:
        self._judged.judge(weights)
        return super().feature(weights, batch)
