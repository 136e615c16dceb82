"""Which rounds of a run this site has served last, how often, and with what, whatever a server says.

    <state-dir>/<run>/<site>/served.json    {"checksum": of all that follows,
                                             "rounds": [[round, times, SHA-256 of the message], ...]}, the last two

| asked for | what happens |
|---|---|
| a later round | served |
| one of the last two rounds once more: the quorum was missed, or the server went back to a checkpoint | served
  `max-repeats` times in all, with the same message |
| such a round with another message | PolicyError: it would give a second upload from one private state |
| a round after one that the server went back to | served with any message, for the new sums may differ |
| an older round | PolicyError |
| a round below 0, or at or beyond run.rounds | PolicyError |
| any round, and the file is damaged | StateError |

A turn that fails counts too, for a server can make a turn fail. Round 0 begins in one way only, since nothing is before
it: so what a method sends in its first participation alone leaves a site once, however often it is asked for.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from fedveil.client_app.site.private import safe
from fedveil.errors import PolicyError, StateError
from fedveil.records.files import sealed, unsealed, write_atomic

_KEPT = 2  # rounds: one to repeat, and one for a server that lost its last checkpoint


@dataclass(frozen=True)
class _Round:
    number: int
    times: int = 0
    message: str = ""


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
        return cls(state_dir.expanduser() / safe("run.name", run) / safe("site", site))

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
        served = {found.number: found for found in self._read()}
        if served and round_ not in served and round_ < max(served):
            raise PolicyError(
                f"round: expected {min(served)} or a later one, found {round_}: this site serves no older round; start "
                "a new run"
            )
        times = served.get(round_, _Round(round_)).times
        if times >= most:
            raise PolicyError(
                f"round: this site serves one at most {most} times, found that it was asked for round {round_} once "
                "more; start a new run, or agree on a larger max-repeats with the site"
            )
        return times

    def count(self, round_: int, rounds: int, most: int) -> None:
        """Counts one serving before it begins. Raises as `check`, or StateError where it cannot be written."""
        with self._locked():
            self.check(round_, rounds, most)
            served = {found.number: found for found in self._read()}
            now = served.get(round_, _Round(round_))
            later = [replace(found, message="") for number, found in served.items() if number > round_]
            earlier = [found for number, found in served.items() if number < round_]
            self._write([*earlier, replace(now, times=now.times + 1), *later][-_KEPT:])

    def require_same(self, round_: int, message: str) -> None:
        """Keeps the digest of the message of a round that was counted.

        Raises:
            PolicyError: the round was served with another message.
            StateError: the file cannot be read or written.
        """
        with self._locked():
            served = {found.number: found for found in self._read()}
            now = served.get(round_, _Round(round_))
            if now.message not in ("", message):
                raise PolicyError(
                    f"round: expected the message that this site was sent for round {round_} before, found another; "
                    "start a new run"
                )
            served[round_] = replace(now, message=message)
            self._write(sorted(served.values(), key=lambda found: found.number)[-_KEPT:])

    @property
    def _file(self) -> Path:
        return self.folder / "served.json"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.folder / "served.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _write(self, served: list[_Round]) -> None:
        rounds = [[found.number, found.times, found.message] for found in served]
        try:
            write_atomic(self._file, sealed({"rounds": rounds}))
        except OSError as error:
            raise StateError(f"{self._file}: expected to write it, found {error}; free space") from error

    def _read(self) -> list[_Round]:
        """The rounds in their order."""
        if not self._file.exists():
            return []
        try:
            content = unsealed(self._file.read_bytes())
            return [_Round(int(number), int(times), str(message)) for number, times, message in content["rounds"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StateError(
                f"{self._file}: expected the last rounds that were served, found none that can be read "
                f"({type(error).__name__}); restore it from a backup, or take no further part in this run"
            ) from None
