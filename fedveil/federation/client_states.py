"""The private states in an in-process federation: in memory up to a limit and in files beyond it, bit for bit."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import weakref
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import final

from typing_extensions import override

from fedveil.contract.method import FederatedState
from fedveil.errors import StateError
from fedveil.records.tensor_state import load_state, save_state

_Kept = FederatedState | Path | None


@final
class ClientStateCache(MutableMapping[str, FederatedState | None]):
    """Each site's private state, and its state from the current round, which takes effect on `commit`.

    The files are in their own folder in the system's temporary folder (TMPDIR); other users cannot read them.
    The folder is removed along with this object, at the latest when the process exits. A killed process leaves
    it behind.

    Args:
        bound_bytes: limit for all tensors in memory. State beyond the limit is written to a file and stays there.
    """

    def __init__(self, bound_bytes: int) -> None:
        self.bound_bytes, self.memory_bytes = bound_bytes, 0
        self._states: dict[str, _Kept] = {}
        self._staged: dict[str, _Kept] = {}
        self._folder: Path | None = None
        self._numbers = itertools.count()

    def stage(self, site: str, state: FederatedState | None) -> None:
        """Store a site's state at the end of the current round."""
        self._put(self._staged, site, state)

    def staged(self, site: str) -> FederatedState | None:
        """Return the site's state at the end of the current round."""
        return _state(self._staged[site])

    def commit(self) -> None:
        """Make the current round's states the sites' states."""
        for site, entry in self._staged.items():
            self._release(self._states.get(site))
            self._states[site] = entry
        self._staged = {}

    def discard(self) -> None:
        """Discard the states from a failed round."""
        for entry in self._staged.values():
            self._release(entry)
        self._staged = {}

    @override
    def __getitem__(self, site: str) -> FederatedState | None:
        return _state(self._states[site])

    @override
    def __setitem__(self, site: str, state: FederatedState | None) -> None:
        self._put(self._states, site, state)

    @override
    def __delitem__(self, site: str) -> None:
        self._release(self._states.pop(site))

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    @override
    def __len__(self) -> int:
        return len(self._states)

    def _put(self, states: dict[str, _Kept], site: str, state: FederatedState | None) -> None:
        entry: _Kept = state
        if state is not None and self.memory_bytes + _nbytes(state) > self.bound_bytes:
            entry = self._written(state, site)
        else:
            self.memory_bytes += _nbytes(state)
        self._release(states.get(site))  # last, so that a state that cannot be written does not affect the others
        states[site] = entry

    def _written(self, state: FederatedState, site: str) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="fedveil-private-"))
            weakref.finalize(self, shutil.rmtree, self._folder)
        file = self._folder / f"{next(self._numbers)}.safetensors"  # a site's name may not be a valid file name
        try:
            save_state(state, file)
        except OSError as error:
            raise StateError(
                f"{site}: cannot write its private state to {file}: {error}; free some disk space there, or set TMPDIR "
                "to another folder"
            ) from error
        return file

    def _release(self, kept: _Kept) -> None:
        if isinstance(kept, Path):
            kept.unlink()
        else:
            self.memory_bytes -= _nbytes(kept)


def _state(kept: _Kept) -> FederatedState | None:
    return load_state(kept) if isinstance(kept, Path) else kept


def _nbytes(state: FederatedState | None) -> int:
    return sum(tensor.nbytes for tensor in state.tensors.values()) if state is not None else 0
