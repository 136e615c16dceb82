"""Which round of a run this site has served last, and how often: counted by the site, whatever a server says.

    <state-dir>/<run>/<site>/served.json    {"round": 3, "times": 1, "rounds": 5}, written before the turn

| asked for | what happens |
|---|---|
| a later round | served |
| the round of the last turn once more, for example because the quorum was missed | served `max-repeats` times in all |
| an older round | PolicyError |
| a round below 0, or at or beyond run.rounds | PolicyError |
| any round, and the file is damaged | StateError |
| any round, and the site has purged what it kept of the run | PolicyError; the file stays, with {"purged": true} |

A turn that fails counts too, for a server can make a turn fail.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fedveil.client_app.site.private import folder_of
from fedveil.errors import PolicyError, StateError
from fedveil.records.files import write_atomic


@dataclass(frozen=True)
class _Last:
    """The last round that was served, how often, of how many by the order's own word (0: not said); and if purged."""

    round: int = -1
    times: int = 0
    rounds: int = 0
    purged: bool = False


@dataclass(frozen=True)
class Served:
    """The rounds of one run at one site.

    Attributes:
        folder: of the run's private state.
    """

    folder: Path

    @classmethod
    def of(cls, state_dir: Path, run: str, site: str) -> Served:
        """Of a run and a site. Raises ConfigError for a name that is not a plain file name."""
        return cls(folder_of(state_dir, run, site))

    def check(self, round_: int, rounds: int, most: int) -> int:
        """How often the round was served, if it may be served again: `most` times in all, and below `rounds`.

        Raises:
            PolicyError: it may not.
            StateError: the file cannot be read.
        """
        if not 0 <= round_ < rounds:
            raise PolicyError(
                f"round: expected one from 0 to {rounds - 1} (run.rounds), found {round_}; start a new run"
            )
        found = self._read()
        if found.purged:
            raise PolicyError("run.name: this site has purged what it kept of this run; start a new run")
        last, times = found.round, found.times
        if round_ < last:
            raise PolicyError(
                f"round: expected {last} or a later one, found {round_}: this site serves no older round; start a new "
                "run"
            )
        times = times if round_ == last else 0
        if times >= most:
            raise PolicyError(
                f"round: this site serves one at most {most} times, found that it was asked for round {round_} once "
                "more; start a new run, or agree on a larger max-repeats with the site"
            )
        return times

    def count(self, round_: int, rounds: int, most: int) -> None:
        """Counts one serving before it begins. Raises as `check`, or StateError where it cannot be written."""
        with self._locked():
            times = self.check(round_, rounds, most)
            try:
                self._write(_Last(round_, times + 1, rounds))
            except OSError as error:
                raise StateError(f"{self._file}: expected to write it, found {error}; free space") from error

    @property
    def ended(self) -> bool:
        """Whether the run's last round was served. Raises StateError."""
        found = self._read()
        return found.rounds > 0 and found.round == found.rounds - 1

    @property
    def purged(self) -> bool:
        """Whether `forget` was called. Raises StateError."""
        return self._read().purged

    def forget(self) -> None:
        """Serves no round of this run again, for its private state is about to go. Raises OSError, StateError."""
        with self._locked():
            self._write(replace(self._read(), purged=True))

    def _write(self, last: _Last) -> None:
        write_atomic(self._file, json.dumps(asdict(last)).encode())

    @property
    def _file(self) -> Path:
        return self.folder / "served.json"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.folder / "served.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _read(self) -> _Last:
        if not self._file.exists():
            return _Last()
        try:
            content = json.loads(self._file.read_text())
            found = _Last(int(content["round"]), int(content["times"]))
            return replace(found, rounds=int(content.get("rounds", 0)), purged=bool(content.get("purged", False)))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateError(
                f"{self._file}: expected the last round that was served, found none that can be read "
                f"({type(error).__name__}); restore it from a backup"
            ) from None
