"""Follow a run until it ends: show its rounds, then its outcome, scores, model and the next command."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from fedveil.console.flower.flwr_cli import FlowerCli, ServerUnreachableError
from fedveil.console.flower.processes import LaunchError, named_error
from fedveil.console.runs import per_site, summary
from fedveil.console.runs.progress_bar import RunProgress, round_stage
from fedveil.console.runs.run_lookup import flower_run
from fedveil.console.runs.run_reader import load_run, status_of
from fedveil.console.terminal import Verdict, say
from fedveil.errors import FedVeilError
from fedveil.records import process_exit
from fedveil.sanitize import sanitize

_POLL_SECONDS = 0.5
_ASK_SECONDS = 10.0  # seconds; a query to Flower costs a CPU second
_GRACE_SECONDS = 15.0  # seconds of silence to allow, in which a stopping server records the end of its runs
_SILENT_SECONDS = 300.0  # wait this long for a server that has answered before, because it may be restarting
_REASON_CHARACTERS = 2000  # the reason ends with the command that resumes the run
_OURS = "fedveil.errors."
_BY_FOLDER = {"completed": 0, "failed": 1, "stopped": 3}  # by status.json
_BY_FLOWER = {"finished:completed": 0, "finished:failed": 1, "finished:stopped": 3}
_VERDICTS: dict[int, Verdict] = {0: "ok", 1: "fail", 3: "warn"}
_TOLD = re.compile(r"\bfedveil: (.{1,1000})$", re.MULTILINE)  # by server_app/run.py
_MOST_TOLD = 5  # lines


@dataclass
class RunFollower:
    """Follows one run.

    Attributes:
        number: Flower's run ID; "" if unknown, or if Flower is not queried.
        places: candidate run folders; the first one that belongs to this run is used once it exists.
        flower: client that queries Flower for the run's state; None to use only the folder.
        folder: the run folder that was found.
        below: folders of runs that are also searched for a run with this ID.
    """

    console: Console
    number: str
    places: Sequence[Path]
    flower: FlowerCli | None
    folder: Path | None = None
    below: Sequence[Path] = ()
    _progress: RunProgress | None = None
    _said: str = ""
    _silent_since: float | None = None
    _silence_said: bool = False
    _stack: ExitStack = field(default_factory=ExitStack)

    def to_its_end(self, timeout: float) -> int:
        """Print progress until the run ends; return the exit code from `until_ended`. `timeout`: seconds; 0 = none."""
        try:
            with self._stack:
                code, word = until_ended(self._read, self._ask, timeout, self._log, where=self._where)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(self._left()) from None
        except LaunchError as error:
            raise LaunchError(f"{error}; the run may continue; {self.by_hand()}") from None
        ended = word.partition(":")[0]
        say(self._filled(word), mark=ended, verdict=_VERDICTS.get(code))
        for line in closing_lines(self.folder) if self.folder else self._told():
            say(line)
        return code

    def interrupted(self) -> Path | None:
        """Return the run's folder if the run was interrupted and can be resumed from there; None otherwise."""
        if self.folder is None or not (self.folder / "resume.toml").is_file():
            return None
        return self.folder if process_exit.is_interruption(status_of(self.folder)) else None

    def _left(self) -> str:
        """Describe what keeps running after following stops."""
        state = "" if self.folder is None else sanitize(status_of(self.folder).get("state", ""), 20)
        if state in (*_BY_FOLDER, "died") or self._said.startswith("finished"):
            return f"the run has ended: {state or sanitize(self._said, 40)}"
        return f"the run continues; {self.by_hand()}"

    def _where(self, status: dict[str, Any]) -> str:
        if self.folder is None:
            return f"Flower reports {sanitize(self._said or 'nothing', 40)}, and no folder of this run was found here"
        return round_stage(status, self.folder)

    def _filled(self, word: str) -> str:
        """Insert the federation's folder, which the ServerApp cannot know, into the command that resumes the run."""
        home = self.flower.home if self.flower is not None else Path()
        return wait_for_sites(word, home.parents[1]) if home.parts[-2:] == ("server", "flower") else word

    def by_hand(self) -> str:
        """Return the commands to follow and to stop the run from now on, without querying Flower."""
        what = shlex.quote(str(self.folder.absolute()) if self.folder else self.number)
        options = f" {self.flower.options()}" if self.flower is not None else ""
        server = options or " --federation PILOT"  # the folder made by fedveil provision
        return f"follow it with: fedveil watch {what}{options}; stop it with: fedveil stop {what}{server}"

    def _read(self) -> dict[str, Any]:
        """Return the run's status.json; {} until there is one, or if the run folder is on another machine."""
        if self.folder is None:
            self.folder = next((place for place in [*self.places, *self._below()] if self._is_ours(place)), None)
            if self.folder is None:
                return {}
            status = status_of(self.folder)
            about = RunProgress(self.console, self.folder, self.folder.name, int(status.get("rounds", 1)))
            self._progress = self._stack.enter_context(about)
            self.console.print(f"its folder is {sanitize(self.folder.absolute(), 1000)}", soft_wrap=True)
        status = status_of(self.folder)
        if self._progress is not None:
            self._progress.tick(status)
        return status

    def _below(self) -> Iterator[Path]:
        for folder in self.below if self.number else ():
            yield from (file.parent for file in folder.glob("*/flower-run"))

    def _is_ours(self, place: Path) -> bool:
        if not any((place / name).is_file() for name in ("status.json", "config.json")):
            return False
        file = place / "flower-run"
        return not self.number or (file.is_file() and file.read_text().strip() == self.number)

    def _ask(self) -> str:
        number = self._number()
        try:
            status = self.flower.run_status(number) if self.flower is not None and number else ""
        except ServerUnreachableError:
            if not self._is_waited_for():
                raise
            return self._said
        if self._silence_said:
            self.console.print("the server answers again")
        self._silent_since, self._silence_said = None, False
        if status != self._said and self.folder is None:  # otherwise its folder is more informative
            self.console.print(f"run {number}: {sanitize(status, 40)}", soft_wrap=True)
        self._said = status
        return status

    def _is_waited_for(self) -> bool:
        """Return whether to retry an unresponsive server, which is so if it answered before and recently."""
        now = time.monotonic()
        if self._said and self._silent_since is None:
            self._silent_since = now
        if self._silent_since is not None and not self._silence_said and now - self._silent_since >= _GRACE_SECONDS:
            self._silence_said = True
            self.console.print(f"the server does not answer; retrying for {_SILENT_SECONDS:g} s, in case it restarts")
        return self._silent_since is not None and now - self._silent_since < _SILENT_SECONDS

    def _number(self) -> str:
        if self.folder is None or not (self.folder / "flower-run").is_file():
            return self.number
        return flower_run(self.folder)

    def _log(self) -> str:
        """Return the output of the run's ServerApp; "" if it is not available."""
        try:
            return self.flower.log(self.number) if self.flower is not None and self.number else ""
        except LaunchError:
            return ""

    def _told(self) -> list[str]:
        """Return the ServerApp's messages for users without access to its folder."""
        return [sanitize(line, 1000) for line in _TOLD.findall(self._log())[-_MOST_TOLD:]]


def wait_for_sites(word: str, federation: Path) -> str:
    """Insert a federation's folder into text with a command for that federation."""
    return word.replace("--federation FOLDER ", f"--federation {shlex.quote(str(federation))} ")


def closing_lines(folder: Path) -> list[str]:
    """Return the lines to show after a run: rounds, scores, model, and the next command."""
    try:
        run = load_run(folder)
    except FedVeilError as error:
        return [sanitize(error)]
    scores = ", ".join(f"{sanitize(name, 40)} {value:.4f}" for name, value in sorted(run.final.items()))
    rounds = sanitize(run.status.get("rounds", "?"), 20)
    if not scores and (losses := per_site.site_losses(run)):
        scores = f"none from the server; loss at the sites, on their training examples: {losses[-1][1]:.4f}"
    lines = [f"rounds: {run.rounds_done} of {rounds}" + (f"; last scores: {scores}" if scores else "")]
    lines += [f"sites: {left}" for left in [per_site.sites_left(run)] if left]
    lines += [sanitize(words, 200) for words in (run.of_round, summary.is_unchanged(run)) if words]
    lines += [f"rows of {sanitize(words, 300)}" for words in per_site.incomplete_rows(run)[:_MOST_TOLD]]
    lines += [f"test data: {sanitize(note, 400)}" for note in run.reading[:_MOST_TOLD]]
    if (folder / "final").is_dir():
        lines.append(f"model: {shlex.quote(sanitize((folder / 'final').absolute(), 1000))}")
    if summary.may_claim_privacy(run):
        from fedveil.console.runs import privacy_statements  # it imports torch, which a watched run does not need

        if privacy := privacy_statements.privacy_summary(run):
            lines.append(sanitize(privacy, 2000))
    return [*lines, f"next: fedveil report {shlex.quote(sanitize(folder, 1000))}"]


def until_ended(
    read: Callable[[], dict[str, Any]],
    ask: Callable[[], str],
    timeout: float,
    log: Callable[[], str] = lambda: "",
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    where: Callable[[dict[str, Any]], str] = round_stage,
) -> tuple[int, str]:
    """Wait for the run to end; return an exit code (0 completed, 1 failed, 3 stopped, 4 still running) and the reason.

    Args:
        read: returns status.json, or {} if there is none.
        ask: returns Flower's status for the run, or "" if Flower cannot be queried.
        timeout: seconds; 0 = none.
        log: returns the run's output, or "" if it is not available.
        where: describes current progress, from status.json.
    """
    started, asked = clock(), clock() - _ASK_SECONDS
    status: dict[str, Any] = {}
    while True:
        status = read()
        if (state := status.get("state")) in _BY_FOLDER:
            return _BY_FOLDER[state], f"{state}: {_why(status)}".removesuffix(": ")
        died = status.get("state") == "died"
        if died or clock() - asked >= _ASK_SECONDS:
            flower_status, asked = ask(), clock()
            if flower_status.startswith("finished"):
                status = read()  # its last status may have been written in between
                if status.get("state") in _BY_FOLDER:
                    continue
                if status and not died and flower_status == "finished:completed":
                    return (
                        1,
                        "failed: Flower reports it as finished, but its status.json does not report it as completed",
                    )
                words = _by_flower(flower_status, log)
                if not died or flower_status == "finished:stopped":
                    return _BY_FLOWER.get(flower_status, 1), words
        if died:
            return 1, f"died: {_why(status)}"
        if timeout and clock() - started >= timeout:
            return 4, f"still running after {timeout:g} s: {where(status)}"
        sleep(_POLL_SECONDS)


def _by_flower(said: str, log: Callable[[], str]) -> str:
    """Describe a run's state as reported by Flower, with the cause printed by the run."""
    state = sanitize(said.partition(":")[2], 40)
    error_line = "" if said in ("finished:completed", "finished:stopped") else named_error(log())
    cause = (
        error_line.partition(": ")[2] if error_line.startswith(_OURS) else error_line
    )  # the message is for users, but the class is not
    return f"{state}: {sanitize(cause, _REASON_CHARACTERS)}" if cause else f"{state}, as reported by Flower"


def _why(status: dict[str, Any]) -> str:
    return sanitize(status.get("reason") or "", _REASON_CHARACTERS)
