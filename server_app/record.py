"""The run folder: what happened, what was disclosed, and checkpoints to resume from.

config.json               run config, method with its fields, versions; of the start, whatever a resume changes
resume.toml               the same run config with run.resume = true, for `fedveil submit --config`
resumes.jsonl             one line a resume: what changed, from where it went on, what had become of the one before
status.json               state, round, reason, end, sinks that were ended, memory of the process; replaced whole
progress.json             the round under way (server_app/following/progress.py); replaced whole
lock                      held as long as the ServerApp lives (fedveil/records/process.py)
../audit-log.jsonl        hash-chained log of all runs beside this one: every message, its site and the decision
                          (fedveil/records/audit_log.py)
id                        8 hex digits that tell this run from others of its name, and their checksum
flower-run                Flower's number of the run
metrics.jsonl             one line for each attempt at a round: cohort, accepted, failed with reasons, bytes, reports,
                          scores; and one for each resume: lines above it of that round or a later one are void
disclosure.jsonl          what left each side: a line for each message (fedveil/records/disclosure.py)
checkpoint.safetensors    the server's state after the last whole round; replaced whole
checkpoint-before.safetensors   the one before
best-<round>.safetensors  that of the best round so far, under evaluate.keep = "best" (going_back.py)
final/<view>.safetensors  the deployed weights at the end
final/*                   the server's model as PEFT or transformers load it (fedveil/adapters/written.py), and its
                          privacy card (fedveil/cards)
tensorboard/              where sinks.use names it (server_app/sinks/); mlflow.db and prometheus.token lie in run.dir

Lines are appended and never removed: what left a site has left it, whatever became of the round.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import os
import platform
import secrets
import weakref
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from fedveil import __version__
from fedveil.config import RunConfig
from fedveil.contract.layout import Direction
from fedveil.contract.method import Method, State, fields_of
from fedveil.contract.spec import Weights
from fedveil.errors import StateError
from fedveil.records import audit_log, disclosure, files, process
from fedveil.records.disclosure import Disclosures
from fedveil.records.reasons import by_reason
from fedveil.records.state import save_state
from fedveil.sealed import Seal
from fedveil.server_app import going_back
from fedveil.server_app.following.figures import told
from fedveil.server_app.following.outlets import Outlets
from fedveil.server_app.following.progress import Underway
from fedveil.wire.tap import Tap

Save = Callable[[Weights, Path], None]  # writes weights to a folder as other programs load them
_RESERVE, _RESERVED_BYTES = ".reserve", 1 << 18  # so that a full disk leaves room to say so


@dataclasses.dataclass
class RoundRecord:
    """One attempt at a round.

    Attributes:
        failed: reason by site, for every site of the cohort whose upload is not in the sums.
        upload_bytes, download_bytes: of whole messages. Refused uploads count, for they were sent.
        unlisted: by site bytes up and down, and messages up and down, that disclosure.jsonl does not list: refused
            uploads, and keys and shares of secure aggregation. Older versions wrote the bytes alone.
        reports: what each accepted site reported, with its num_examples.
        cut: the examples that count, for a site which claimed more than cohort.max-share allows.
        left_out: accepted sites whose uploads the rule did not choose (aggregate.rule = "multi-krum").
        unseen: of secure aggregation: sites in the sum, holders and threshold, who opened no shares and why, and why
            there is no sum, if there is none; {} where uploads are added up in the clear.
        weights: digest of the deployed weights after the round.
    """

    round: int
    attempt: int
    cohort: list[str]
    accepted: list[str] = dataclasses.field(default_factory=list)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    upload_bytes: int = 0
    download_bytes: int = 0
    unlisted: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    reports: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    cut: dict[str, int] = dataclasses.field(default_factory=dict)
    left_out: list[str] = dataclasses.field(default_factory=list)
    unseen: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    weights: str = ""
    scores: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)

    @property
    def reasons(self) -> str:
        """Why uploads are missing, in words."""
        reasons = by_reason(self.failed)
        reasons += [f"no sum: {self.unseen['reason']}"] if "reason" in self.unseen else []
        return "; ".join(reasons) or f"accepted: {', '.join(self.accepted) or 'none'}"


class RunFolder:
    """Writes one run's folder, of which it holds the lock until `close` or the end of the process.

    Refuses a folder that holds another run, unless it resumes that run, and one that another process writes.
    """

    def __init__(self, folder: Path, resume: bool = False) -> None:
        self.folder, self.last_round = folder, -1
        self.outlets, self.underway = Outlets({}), Underway(folder)
        if not resume:
            going_back.require_new(folder)
        elif not (folder / "id").exists():
            raise StateError(f"run.resume: expected a run in {folder}, found none; start the run without it")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.close = weakref.finalize(self, os.close, process.lock(folder))
        except OSError as error:
            raise StateError(
                f"run.dir: expected a folder that the server may write, found {folder}: {error.strerror}; name another"
            ) from error
        if not resume:
            going_back.require_new(folder)  # another process may have been quicker
        # Before the first checkpoint no site was asked for anything.
        self.resumed = resume and going_back.has_checkpoint(folder)
        self.notes = going_back.prepared(folder) if resume else {}
        if not resume:
            files.write_atomic(folder / "id", going_back.sealed_id(secrets.token_hex(4)))
        files.write_atomic(folder / _RESERVE, bytes(_RESERVED_BYTES))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        (self.folder / _RESERVE).unlink(missing_ok=True)
        self.close()

    @property
    def id(self) -> str:
        """8 hex digits that tell this run from others of its name; a resumed run keeps them."""
        return going_back.read_id(self.folder)

    @functools.cached_property
    def _disclosures(self) -> Disclosures:
        return Disclosures(self.folder / disclosure.NAME)

    @property
    def _checkpoint(self) -> Path:
        return self.folder / going_back.CHECKPOINT

    def config(self, config: RunConfig, method: Method) -> None:
        """Writes what is about to run, and in which environment. A resumed run keeps what it wrote at its start."""
        self.underway.deadline_seconds = config.cohort.deadline_seconds
        self.underway.unseen = config.secure.enabled
        self.underway.quorum = max(config.cohort.min_sites, config.secure.enabled * config.secure.min_sites)
        if self.resumed:
            return
        content = {
            "config": config.flat(),
            "method": {"name": config.method.name, "version": method.version, "fields": fields_of(method)},
            **_versions(),
            "started": _now(),
        }
        self._write_json("config.json", content)
        flat = config.flat() | {"run.name": self.folder.name, "run.resume": True}
        lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in flat.items()]
        files.write_atomic(self.folder / "resume.toml", "".join(lines).encode())

    def status(self, state: str, round_: int, rounds: int, reason: str = "", **about: Any) -> None:
        """Writes the run's state: "running", "completed" or "failed", which ends the sinks; `about` adds keys."""
        self.last_round = round_
        if state == "running":
            self.underway.waits(round_)
        else:
            self.outlets.close(state)
        ended: dict[str, Any] = {"sinks": sinks} if (sinks := self.outlets.ended()) else {}
        ended |= {} if state == "running" else {"ended": _now()}
        about = {"state": state, "round": round_, "rounds": rounds, "reason": reason, **about, **ended}
        self._write_json("status.json", about | {"process": process.noted()})

    def failed(self, rounds: int, reason: str) -> None:
        """Says in the audit log and the status that the run has failed, on a full disk too. Raises the first error."""
        (self.folder / _RESERVE).unlink(missing_ok=True)
        try:
            self.status("failed", self.last_round, rounds, reason)
        finally:
            self.audit("ended", {"state": "failed", "reason": reason})

    def round(self, record: RoundRecord) -> None:
        """Appends one finished attempt at a round."""
        self._row(dataclasses.asdict(record))
        self.underway.done()

    def scores(self, round_: int, scores: Mapping[str, Mapping[str, float]]) -> None:
        """Appends scores from before round 0, as round -1."""
        self._row({"round": round_, "scores": scores})

    def last_scores(self) -> dict[str, dict[str, float]]:
        """Those of the last round that was scored, by view; {} where none was."""
        found = (row.get("scores") for row in reversed(list(going_back.lines(self.folder / "metrics.jsonl"))))
        return next((scores for scores in found if scores), {})

    def is_scored(self, round_: int) -> bool:
        """Whether there are scores from before round 0, round -1."""
        return any(row["round"] == round_ for row in going_back.lines(self.folder / "metrics.jsonl"))

    def disclosed(self, disclosed: Mapping[str, Any], record: RoundRecord, site: str, direction: Direction) -> None:
        """Appends what one message disclosed, in the form of `fedveil.wire.envelope.describe`."""
        where = {"round": record.round, "attempt": record.attempt, "site": site}
        self._disclosures.append(where, direction, disclosed)
        if direction == "down":
            self.underway.asked(record.round, record.attempt, record.cohort, site, disclosed["bytes"])
        else:
            self.underway.accepted(site, disclosed["bytes"])

    def flower_run(self, run_id: int) -> None:
        """Writes Flower's number of the run, for `fedveil watch`."""
        files.write_atomic(self.folder / "flower-run", str(run_id).encode())

    def audit(self, event: str, about: Mapping[str, Any]) -> str:
        """Appends one line to the server's audit log. Returns the log's anchor after it."""
        if event == "failed":
            self.underway.failed(about["site"], about["reason"], about.get("up_bytes", 0))
        run = {"run": f"{self.folder.name}-{self.id}"}
        return str(audit_log.append(self.folder.parent / audit_log.NAME, event, run | dict(about)))

    def tap(self) -> Tap:
        """The tap, which stores whole messages, sealed where the environment names a key file."""
        return Tap(self.folder / "tap", Seal.of_environment())

    def checkpoint(self, server: State, loop: Mapping[str, Any]) -> None:
        """Writes the state after a whole round, and what the loop needs to continue. Keeps the one before."""
        scalars = {"server": dict(server.scalars), "loop": dict(loop), "id": self.id}
        save_state(State(server.tensors, scalars), self._checkpoint, keep=self.folder / going_back.BEFORE)

    def load_checkpoint(self) -> tuple[State, dict[str, Any]]:
        """Reads what `checkpoint` wrote last; where that is damaged, the one before.

        Raises:
            StateError: neither can be read.
        """
        saved, note = going_back.newest(self.folder)
        if note:
            self.notes["checkpoint"] = note
            self.audit("checkpoint", {"reason": note})
        loop: Any = saved.scalars["loop"]
        scalars: Any = saved.scalars["server"]
        return State(saved.tensors, scalars), loop

    def resume(self, round_: int, changes: Mapping[str, Any]) -> None:
        """Notes that the run goes on with `round_`, and what had become of the attempts under way."""
        for row in going_back.interrupted(self.folder):
            self.round(RoundRecord(**row))
        self._append("metrics.jsonl", going_back.mark(self.folder, round_))
        about = {"round": round_, "changes": dict(changes), **self.notes}
        self.audit("resumed", about)
        self._append("resumes.jsonl", {"time": _now(), **about, **_versions()})

    def final(self, deployed: Mapping[str, Weights], save: Save | None = None) -> None:
        """Writes the deployed weights; `save` writes those of the server's model once more, in others' form."""
        for view, weights in deployed.items():
            save_state(State(weights), self.folder / "final" / f"{view}.safetensors")
        if save is not None:
            with files.filled(self.folder / "final") as folder:
                save(deployed["server"], folder)

    def _row(self, row: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl, and its figures for the sinks."""
        self._append("metrics.jsonl", row)
        if self.outlets:
            self.outlets.put(told(row, self.underway.sizes))

    def _append(self, name: str, content: Mapping[str, Any]) -> None:
        files.append_line(self.folder / name, content)

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        files.write_atomic(self.folder / name, json.dumps(content, indent=1).encode())


def _versions() -> dict[str, str]:
    packages = ("flwr", "torch", "transformers", "peft")
    found = {name: importlib.metadata.version(name) for name in packages}
    return {"fedveil": __version__, **found, "python": platform.python_version()}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
