"""Record the last rounds of a run that this site served, how often and with which message; refuse other repeats.

    <state-dir>/<run>/<site>/served.json    {"checksum": ..., "rounds": [[round, times, served message], ...],
                                             "of": 5, "purged": false, "scores": 3, "held-out": 0.1,
                                             "data-set": "icu"}: the last two rounds, the number of held-out scores
                                             reported, the fraction of rows that the first round held out, and the name
                                             of the data set that the first round used

The site relies on this file, not on the server's claims.

| requested | result |
|---|---|
| a later round | served |
| one of the last two rounds again: the quorum was missed, or the server returned to a checkpoint | served
  again up to `max-retries` times, with the same message |
| such a round with a different message, or from a different round's state | PolicyError: it would be a second query |
| a round after one that the server returned to | served with any message, because the new sums may differ |
| an older round | PolicyError |
| a round below 0, or at or beyond run.rounds | PolicyError |
| any round, if the file is damaged, or missing although there is private state from a served round | StateError |
| any round that holds out a different fraction of rows than the first one | PolicyError |
| any round on a data set with a different name than the first one's | PolicyError: batches and held-out rows are drawn
  alike in all rounds, so that two data sets in one run could be compared |
| any round, after the site has purged its state for the run | PolicyError; the file stays, with {"purged": true} |
| any round, if the file comes from a backup, so that later rounds may have been served since | PolicyError; the file
  stays, with {"restored": true} |

A failed client round also counts, because a server can make a client round fail. A round that ended before it
processed the message (no examples, no base model) does not count: it used no examples, and a site that has repaired
its data must be able to serve the round. Round 0 can begin in only one way, because no round precedes it. So data that
a method sends only in its first participation leaves a site only once, no matter how often a server asks for it.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from fedveil.client_app.state.client_state import RECEIVED, state_folder_of
from fedveil.errors import PolicyError, StateError
from fedveil.records.atomic_files import read_checksummed, write_atomic, write_checksummed

_ROUNDS = 2  # rounds to record: one to repeat, and one for a server that lost its last checkpoint


@dataclass(frozen=True)
class _Round:
    number: int
    times: int = 0
    message: str = ""


@dataclass(frozen=True)
class _Kept:
    """The last served rounds in order, and the total number of rounds from the instruction (0: unknown)."""

    rounds: tuple[_Round, ...] = ()
    of: int = 0
    purged: bool = False
    scores: int = 0
    held_out: float | None = None
    restored: bool = False
    data_set: str = ""

    def round(self, number: int) -> _Round:
        return next((entry for entry in self.rounds if entry.number == number), _Round(number))


@dataclass(frozen=True)
class ReplayGuard:
    """The served rounds of one run at one site.

    Attributes:
        folder: the folder with the run's private state.
    """

    folder: Path

    @classmethod
    def open(cls, state_dir: Path, run: str, site: str) -> ReplayGuard:
        """Open the guard for a run and a site. Raises ConfigError for a name that is not a plain file name."""
        return cls(state_folder_of(state_dir, run, site))

    def check(self, round_: int, rounds: int, most: int, held_out: float = 0.0, data_set: str = "") -> int:
        """Return how often the round was served if the site may serve it again.

        The round must be below `rounds`, have been served fewer than `most` times, and hold out the same fraction of
        rows of the same data set as the run's first round.

        Raises:
            PolicyError: the site may not serve the round again.
            StateError: the file is unreadable.
        """
        if not 0 <= round_ < rounds:
            raise PolicyError(
                f"round: {round_} is not one of the run's rounds, 0 to {rounds - 1} (run.rounds); start a new run"
            )
        state = self._read()
        if state.purged:
            raise PolicyError("run.name: this site has purged all its state for this run; start a new run")
        if state.restored:
            raise PolicyError(
                "run.name: this site restored its record of this run from a backup, so it cannot know which rounds it "
                "has served since; start a new run"
            )
        if state.held_out not in (None, held_out):
            raise PolicyError(
                f"evaluate.held-out: this run began with {state.held_out:g} at this site, but now asks for "
                f"{held_out:g}; submit a new run"
            )
        served = [served.number for served in state.rounds]
        if served and data_set != state.data_set:
            raise PolicyError(
                f'task.data-set: expected "{state.data_set}", with which this run began at this site, found '
                f'"{data_set}"; submit a new run'
            )
        if served and round_ not in served and round_ < served[-1]:
            raise PolicyError(
                f"round: this site has already served round {served[-1]}, and does not serve the older round {round_}; "
                "start a new run"
            )
        times = state.round(round_).times
        if times >= most:
            raise PolicyError(
                f"round: this site has served round {round_} as often as it permits ({most} times); start a new run, "
                "or agree with the site on a larger max-retries"
            )
        return times

    def count(self, round_: int, rounds: int, most: int, held_out: float = 0.0, data_set: str = "") -> None:
        """Count one serving before it begins. Raises like `check`, and StateError if the file cannot be written."""
        with self._locked():
            self.check(round_, rounds, most, held_out, data_set)
            state = self._read()
            now = state.round(round_)
            earlier = [other for other in state.rounds if other.number < round_]
            later = [replace(other, message="") for other in state.rounds if other.number > round_]
            served = (*earlier, replace(now, times=now.times + 1), *later)[-_ROUNDS:]
            self._require_written(replace(state, rounds=served, of=rounds, held_out=held_out, data_set=data_set))

    def give_back(self, round_: int) -> None:
        """Uncount one request for a round whose message was never processed. Raises StateError."""
        with self._locked():
            state = self._read()
            now = state.round(round_)
            if now.times and not now.message:
                served = [replace(r, times=r.times - 1) if r.number == round_ else r for r in state.rounds]
                self._require_written(replace(state, rounds=tuple(served)))

    def require_same(self, round_: int, message: str) -> None:
        """Record the message digest and the starting client round with which a counted round was served.

        Raises:
            PolicyError: the round was served with a different message.
            StateError: the file is not readable or writable.
        """
        with self._locked():
            state = self._read()
            now = state.round(round_)
            if now.message not in ("", message):
                raise PolicyError(
                    f"round: round {round_} was already served here with a different message or previous client round; "
                    "start a new run"
                )
            others = [other for other in state.rounds if other.number != round_]
            served = sorted([*others, replace(now, message=message)], key=lambda other: other.number)
            self._require_written(replace(state, rounds=tuple(served[-_ROUNDS:])))

    def count_score(self, most: int) -> bool:
        """Count one held-out score before computing it; return False if `most` were reported. Raises StateError."""
        with self._locked():
            state = self._read()
            if state.scores >= most:
                return False
            self._require_written(replace(state, scores=state.scores + 1))
            return True

    @property
    def scores(self) -> int:
        """Return the number of counted scores. Raises StateError."""
        return self._read().scores

    def _require_written(self, kept: _Kept) -> None:
        try:
            self._write(kept)
        except OSError as error:
            raise StateError(f"{self._file}: cannot be written: {error}; free some disk space") from error

    @property
    def ended(self) -> bool:
        """Return whether the run's last round was served. Raises StateError."""
        state = self._read()
        return bool(state.rounds) and state.rounds[-1].number == state.of - 1

    @property
    def purged(self) -> bool:
        """Return whether `forget` was called. Raises StateError."""
        return self._read().purged

    def forget(self) -> None:
        """Refuse this run from now on: its private state is about to be removed. Raises OSError or StateError."""
        with self._locked():
            self._write(replace(self._read(), purged=True))

    def close_restored(self) -> None:
        """Refuse this run from now on: its file comes from a backup. Raises OSError or StateError."""
        with self._locked():
            self._write(replace(self._read(), restored=True))

    def _write(self, kept: _Kept) -> None:
        rounds = [[entry.number, entry.times, entry.message] for entry in kept.rounds]
        content: dict[str, object] = {"rounds": rounds, "of": kept.of, "purged": kept.purged, "scores": kept.scores}
        if kept.held_out is not None:
            content["held-out"] = kept.held_out
        if kept.data_set:
            content["data-set"] = kept.data_set
        if kept.restored:
            content["restored"] = True
        write_atomic(self._file, write_checksummed(content))

    @property
    def _file(self) -> Path:
        return self.folder / "served.json"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.folder / "served.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _read(self) -> _Kept:
        if not self._file.exists():
            # Both of these are written at the end of a client round; served.json is written before the round.
            if (self.folder / RECEIVED).exists() or any(self.folder.glob("turn-*.safetensors")):
                raise StateError(
                    f"{self._file}: the record of served rounds is missing, although there is private state for the "
                    "run; restore it from a backup, or take no further part in this run"
                )
            return _Kept()
        try:
            content = read_checksummed(self._file.read_bytes())
            rounds = (_Round(int(number), int(times), str(message)) for number, times, message in content["rounds"])
            held_out = content.get("held-out")
            return _Kept(
                tuple(rounds), int(content["of"]), bool(content["purged"]), int(content.get("scores", 0)),
                None if held_out is None else float(held_out), content.get("restored") is True,
                str(content.get("data-set", "")),
            )  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StateError(
                f"{self._file}: cannot read the record of served rounds ({type(error).__name__}); restore it from a "
                "backup, or take no further part in this run"
            ) from None
