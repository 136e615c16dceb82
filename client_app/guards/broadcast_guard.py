"""Check the first weights that a client round trains from, with any method, before any example is read.

    <state-dir>/<run>/<site>/received.json    written after each completed client round, with a checksum: a secret key
                                              and, for every tensor, sketches under that key of the run's first weights
                                              and of the weights last trained from, each with the norm used to measure
                                              distances from it

    norm   = |w|                                       over all trained tensors together
    change = max over tensors of  rms(w - last) / max(rms so far of this tensor, rms so far of all together)
    drift  = max over tensors of  rms(w - first) / max(rms of first of this tensor, rms of first of all together)

`first` are the weights derived from `run.seed`, which every site computes itself: a server can choose the first weights
that it sends, but not these. `last` are the weights that the site last trained from. "So far" means the largest value
that this site has trained from in this run. Both are measured per tensor, so that one hostile layer among many does
not go unnoticed. A zero B factor is measured against all tensors together.

Drift is measured on the scale of the first weights, so a server that increases the weights does not increase the bound
with them. Nor do many small steps pass: max-broadcast-change allows each one, but max-broadcast-drift bounds
their sum.

| case | what happens |
|---|---|
| a value that is not finite | PolicyError |
| norm, change or drift above max-broadcast-norm, max-broadcast-change, max-broadcast-drift | PolicyError |
| the first client round in a run | `last` is `first`: change and drift are equal, and both bounds apply |
| the first client round of a late site | `last` is `first`: everything that others have learned so far counts |
| the file or the site's folder is lost | `last` is `first`, which the site recomputes; no bound gets wider |
| a resumed run, or a different name, round or `is-new` | there is one file per run; nothing else is read |
| `run.seed` differs from the first client round | `first` stays |
| tensors or their sizes differ from last time | the site starts over, as in the first client round |
| tensors that the run does not train | PolicyError |
| `first` is zero everywhere | no drift; the norm and the change are checked |
| `last` and everything before it is zero everywhere | the norm and the drift are checked |
| a client round fails or is refused | `last` stays |
| a factor or prompt that stays at the site | it is trained too, and checked with the rest |
| the file is damaged | StateError |

The server learns that a bound was exceeded, but not the numbers, because they depend on the site's private
data; the site's log has them. A sketch has 64 numbers (fedveil/ops/count_sketch.py), so a large model is
not stored twice. It measures a change to within about 9 %.
"""

from __future__ import annotations

import base64
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
from fedveil.errors import PolicyError, StateError
from fedveil.ops.count_sketch import SIZE, count_sketch
from fedveil.records.atomic_files import read_checksummed, write_atomic, write_checksummed

_KEY_BYTES = 32

log = logging.getLogger("fedveil.site")


@dataclass(frozen=True)
class SketchedTensor:
    """A sketch of a tensor that a site trained from, as the site stores it.

    Attributes:
        norm: the norm used to measure distances from it.
        entries: the tensor's number of entries.
        sketch: array of shape (SIZE,), under the reference's key.
    """

    norm: float
    entries: int
    sketch: Tensor


@dataclass(frozen=True)
class BroadcastReference:
    """A compact record of the run's first weights and of those that a site last trained from.

    Attributes:
        key: secret key of the sketches; never leaves the site.
        first: the run's first weights.
        last: the weights last trained from, with every tensor's largest norm so far.
    """

    key: bytes
    first: Mapping[str, SketchedTensor]
    last: Mapping[str, SketchedTensor]

    @classmethod
    def from_weights(cls, weights: Weights, key: bytes = b"") -> BroadcastReference:
        """Build the reference for a run that starts with these weights, with a new key if none is given."""
        key = key or os.urandom(_KEY_BYTES)
        first = _sketch_weights(weights, key)
        return cls(key, first, first)

    def then(self, weights: Weights) -> BroadcastReference:
        """Return the next reference, with the same key and first weights."""
        now = _sketch_weights(weights, self.key)
        last = {n: replace(tensor, norm=max(tensor.norm, self.last[n].norm)) for n, tensor in now.items()}
        return BroadcastReference(self.key, self.first, last)

    def fits(self, weights: Weights) -> bool:
        """Return whether the reference has the same tensors as `weights`, by name and number of entries."""
        return {n: w.numel() for n, w in weights.items()} == {n: t.entries for n, t in self.last.items()}

    def distances(self, weights: Weights) -> tuple[float, float]:
        """Return change and drift by the module's formulas; 0 for a reference that is zero everywhere."""
        now = {name: count_sketch(w, self.key, name) for name, w in weights.items()}
        return _distance(now, self.last), _distance(now, self.first)


def _sketch_weights(weights: Weights, key: bytes) -> dict[str, SketchedTensor]:
    return {n: SketchedTensor(_norm(w), w.numel(), count_sketch(w, key, n)) for n, w in weights.items()}


def _distance(now: Mapping[str, Tensor], reference: Mapping[str, SketchedTensor]) -> float:
    """Return the largest distance between a sketch and its reference; NaN if any distance is NaN."""
    entries = sum(tensor.entries for tensor in reference.values())
    of_all = math.hypot(*(tensor.norm for tensor in reference.values())) / math.sqrt(max(1, entries))
    distances = [0.0]
    for name, tensor in reference.items():
        root = math.sqrt(max(1, tensor.entries))
        moved = float(torch.linalg.vector_norm(now[name] - tensor.sketch)) / root
        if scale := max(of_all, tensor.norm / root):
            distances.append(moved / scale)
    return math.nan if any(map(math.isnan, distances)) else max(distances)


def weights_norm(weights: Weights) -> float:
    """Return the Euclidean norm of all tensors together; not finite if an entry is not."""
    return math.hypot(*map(_norm, weights.values()))


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))


@dataclass(frozen=True)
class BroadcastReferenceStore:
    """The file with one run's reference at one site.

    Attributes:
        folder: folder with the run's private state.
    """

    folder: Path
    seal: FileSeal = FileSeal()

    @classmethod
    def open(cls, state_dir: Path, run: str, site: str, seal: FileSeal = FileSeal()) -> BroadcastReferenceStore:
        """Open the store for a run and a site. Raises ConfigError for a name that is not a plain file name."""
        return cls(state_folder_of(state_dir, run, site), seal)

    @property
    def _file(self) -> Path:
        return self.folder / RECEIVED

    def load(self) -> BroadcastReference | None:
        """Load the reference; None before the first completed client round. Raises StateError if unreadable."""
        if not self._file.exists():
            return None
        try:
            content = read_checksummed(self.seal.read(self._file, state_role(self._file)))
            first, last = _unpack(content["first"]), _unpack(content["last"])
            key = bytes.fromhex(content["key"])
            if len(key) == _KEY_BYTES and first.keys() == last.keys():
                return BroadcastReference(key, first, last)
            reason = "wrong length"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = type(error).__name__
        raise StateError(
            f"{self._file}: cannot read the checksummed record of the weights that this site last trained from "
            f"({reason}); restore it from a backup, or stop taking part in this run"
        )

    def save(self, reference: BroadcastReference) -> None:
        """Save the reference atomically. Raises StateError, e.g. on a full disk."""
        content = {"key": reference.key.hex(), "first": _pack(reference.first), "last": _pack(reference.last)}
        try:
            write_atomic(self._file, self.seal.closed([write_checksummed(content)], state_role(self._file)))
        except OSError as error:
            raise StateError(f"{self._file}: cannot be written: {error}; free some disk space") from error


def _pack(tensors: Mapping[str, SketchedTensor]) -> dict[str, tuple[float, int, str]]:
    """Return each tensor's norm, entries and sketch in a form that JSON can represent."""
    return {
        name: (tensor.norm, tensor.entries, base64.b64encode(tensor.sketch.numpy().tobytes()).decode())
        for name, tensor in tensors.items()
    }


def _unpack(packed: Mapping[str, tuple[float, int, str]]) -> dict[str, SketchedTensor]:
    """Invert `_pack`. Raises ValueError, TypeError or AttributeError for anything else."""
    return {name: _unpack_tensor(*parts) for name, parts in packed.items()}


def _unpack_tensor(norm: float, entries: int, text: str) -> SketchedTensor:
    values = torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.float64)
    if len(values) != SIZE or not math.isfinite(norm) or not bool(values.isfinite().all()):
        raise ValueError
    return SketchedTensor(float(norm), int(entries), values)


@final
class BroadcastGuard(TrainerWrapper):
    """A trainer that checks the first weights it receives before reading any example.

    Args:
        policy: the site's policy, with the bounds.
        received: the store with the site's reference.
        initial: returns the run's first weights, from `run.seed`; called only if there is no reference.
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
        decisions.check_broadcast(self._policy, norm, 0.0, 0.0)  # before computing differences with non-finite values
        reference = self._received.load()
        if reference is None or not reference.fits(weights):
            reference = BroadcastReference.from_weights(self._initial())
        if not reference.fits(weights):
            raise PolicyError(
                f"broadcast: the weights do not match the {len(reference.first)} tensors that this run trains: found "
                f"{len(weights)} tensors, or other names or sizes; correct the method"
            )
        change, drift = reference.distances(weights)
        log.info("weights to train from: norm %.6g, change %.6g, drift %.6g", norm, change, drift)
        decisions.check_broadcast(self._policy, norm, change, drift)
        self._next = reference.then(weights)

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
