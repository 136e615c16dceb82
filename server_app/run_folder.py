"""The run folder: events, disclosures, and checkpoints to resume from.

config.json               run config, method with its parameters, versions; written at the start, never on a resume
resume.toml               the same run config with run.resume = true, for `fedveil submit --config`
resumes.jsonl             one line per resume: what changed, where it continued, how the previous process ended
status.json               state, round, reason, end, stopped sinks, process memory; replaced whole
progress.json             the current round (server_app/round_progress.py); replaced whole
lock                      held while the ServerApp is alive (fedveil/records/process_exit.py)
../audit-log.jsonl        hash-chained log of all runs in the parent folder: every message, its site and the decision
                          (fedveil/records/audit_log.py)
id                        8 hex digits that distinguish this run from others with its name, and their checksum
flower-run                Flower's run ID
metrics.jsonl             one line per attempt at a round: cohort, accepted, unsigned, failed with reasons, bytes,
                          reports, scores; one line per resume, which voids earlier lines for that round and later ones
disclosure.jsonl          data that left each side: one line per message (fedveil/records/disclosure_ledger.py)
checkpoint.safetensors    the server's state after the last complete round; replaced whole
checkpoint-before.safetensors   the previous checkpoint
best-<round>.safetensors  the best round's checkpoint so far, with evaluate.select-model = "best" (checkpoints.py)
final/<view>.safetensors  the final model weights of each view
final/*                   the server's model in PEFT or transformers format (fedveil/adapters/export.py), and its
                          privacy card (fedveil/cards)
tensorboard/              if sinks.use names it (server_app/metrics/sinks/); mlflow.db and prometheus.token are in
                          run.dir

Lines are appended and never removed: disclosed data stays disclosed, even if the round fails.
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
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from fedveil import __version__
from fedveil.config import RunConfig
from fedveil.contract.layout import Direction
from fedveil.contract.method import FederatedState, Method, RoundContext, hyperparameters_of
from fedveil.contract.param_spec import Weights
from fedveil.encrypted_files import FileSeal
from fedveil.errors import StateError
from fedveil.records import atomic_files, audit_log, disclosure_ledger, process_exit
from fedveil.records.disclosure_ledger import DisclosureLedger
from fedveil.records.tensor_state import save_state
from fedveil.server_app import checkpoints
from fedveil.server_app.metrics.dispatcher import MetricsDispatcher
from fedveil.server_app.metrics.samples import samples_from_line
from fedveil.server_app.round_progress import RoundProgressFile
from fedveil.server_app.round_record import RoundRecord
from fedveil.wire.capture import MessageCapture

Save = Callable[[Weights, Path], None]  # writes weights to a folder in a format that other programs load
_RESERVE, _RESERVED_BYTES = ".reserve", 1 << 18  # leaves space to record that the disk is full


class RunFolder:
    """Writes one run's folder and locks it until `close` or the end of the process.

    Refuses a folder that contains another run, unless it resumes that run, and a folder that another process
    is using.
    """

    def __init__(self, folder: Path, resume: bool = False) -> None:
        self.folder, self.last_round = folder, -1
        self.outlets, self.underway = MetricsDispatcher({}), RoundProgressFile(folder)
        self.reading: list[str] = []  # notes on how the server read its own data
        if not resume:
            checkpoints.require_new(folder)
        else:
            checkpoints.require_resumable(folder)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.close = weakref.finalize(self, os.close, process_exit.lock_folder(folder))
        except OSError as error:
            raise StateError(
                f"run.dir: the server cannot write to {folder}: {error.strerror}; name another folder"
            ) from error
        if not resume:
            checkpoints.require_new(folder)  # another process may have been faster
        # Before the first checkpoint, no site has been asked for anything: such a run starts at round 0.
        self.resumed = resume and checkpoints.has_checkpoint(folder)
        self.restarted = resume and not self.resumed
        self.notes = checkpoints.repair_folder(folder) if resume else {}
        if not (folder / "id").exists():
            atomic_files.write_atomic(folder / "id", checkpoints.sealed_id(secrets.token_hex(4)))
        atomic_files.write_atomic(folder / _RESERVE, bytes(_RESERVED_BYTES))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        (self.folder / _RESERVE).unlink(missing_ok=True)
        self.close()

    @property
    def id(self) -> str:
        """Return 8 hex digits that distinguish this run from others with its name; a resumed run keeps them."""
        return checkpoints.read_id(self.folder)

    @functools.cached_property
    def _disclosures(self) -> DisclosureLedger:
        return DisclosureLedger(self.folder / disclosure_ledger.NAME)

    @property
    def _checkpoint(self) -> Path:
        return self.folder / checkpoints.CHECKPOINT

    def config(
        self,
        config: RunConfig,
        method: Method,
        adapter: Mapping[str, object] | None = None,
        in_process: bool = False,
    ) -> None:
        """Write the run's config and environment. A resumed run does not overwrite them.

        Args:
            adapter: the adapter and its number of weights (`count_adapter_weights`); None if the task has no adapter.
            in_process: the server and all sites run in this process (fedveil.local); the card says so.
        """
        self.underway.deadline_seconds = config.cohort.deadline_seconds
        self.underway.unseen = config.secure.enabled
        least = config.cohort.buffer_size or config.cohort.min_sites
        self.underway.quorum = max(least, config.secure.enabled * config.secure.min_sites)
        if self.resumed:
            return
        content = {
            "config": config.flat(),
            "method": {"name": config.method.name, "version": method.version, "fields": hyperparameters_of(method)},
            **({"adapter": adapter} if adapter else {}),
            **({"in_process": True} if in_process else {}),
            **_versions(),
            "started": _now(),
        }
        self._write_json("config.json", content)
        flat = config.flat() | {"run.name": self.folder.name, "run.resume": True}
        lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in flat.items()]
        atomic_files.write_atomic(self.folder / "resume.toml", "".join(lines).encode())

    def status(self, state: str, round_: int, rounds: int, reason: str = "", **about: Any) -> None:
        """Write the run's state: "running", "completed" or "failed". The last two end the sinks. `about` adds keys."""
        self.last_round = round_
        if state == "running":
            self.underway.waits(round_)
        else:
            self.outlets.close(state)
        ended: dict[str, Any] = {"sinks": sinks} if (sinks := self.outlets.ended()) else {}
        ended |= {} if state == "running" else {"ended": _now()}
        ended |= {"reading": self.reading} if self.reading else {}
        about = {"state": state, "round": round_, "rounds": rounds, "reason": reason, **about, **ended}
        self._write_json("status.json", about | {"process": process_exit.note_memory()})

    def failed(self, rounds: int, reason: str) -> None:
        """Record the failure in the audit log and the status, even on a full disk. Raises the first error."""
        (self.folder / _RESERVE).unlink(missing_ok=True)
        try:
            self.status("failed", self.last_round, rounds, reason)
        finally:
            self.audit("ended", {"state": "failed", "reason": reason})

    def round(self, record: RoundRecord) -> None:
        """Append one finished attempt at a round."""
        self._row(dataclasses.asdict(record))
        self.underway.done()

    def scores(self, round_: int, scores: Mapping[str, Mapping[str, float]]) -> None:
        """Append scores from before round 0, as round -1."""
        self._row({"round": round_, "scores": scores})

    def last_scores(self) -> dict[str, dict[str, float]]:
        """Return the scores of the last scored round, by view; {} if there is none."""
        all_scores = (
            row.get("scores") for row in reversed(list(checkpoints.read_lines(self.folder / "metrics.jsonl")))
        )
        return next((scores for scores in all_scores if scores), {})

    def is_scored(self, round_: int) -> bool:
        """Return whether metrics.jsonl has a line for this round; -1 is the scoring before round 0."""
        return any(row["round"] == round_ for row in checkpoints.read_lines(self.folder / "metrics.jsonl"))

    def disclosed(
        self,
        disclosed: Mapping[str, Any],
        ctx: RoundContext,
        cohort: Sequence[str],
        direction: Direction,
        step: tuple[int, int] | None = None,
    ) -> None:
        """Append one message's disclosures, in the format of `fedveil.wire.envelope.describe_message`.

        `step` is the round and attempt whose server step takes an upload, if that can be a later one.
        """
        where = {"round": ctx.round, "attempt": ctx.address.attempt, "site": ctx.client}
        if step is not None:
            where |= {"step": step[0]} | ({"step-attempt": step[1]} if step[1] else {})
        self._disclosures.append(where, direction, disclosed)
        if direction == "down":
            self.underway.asked(ctx.round, ctx.address.attempt, list(cohort), ctx.client, disclosed["bytes"])
        else:
            self.underway.accepted(ctx.client, disclosed["bytes"])

    def flower_run(self, run_id: int) -> None:
        """Write Flower's run ID, for `fedveil watch`."""
        atomic_files.write_atomic(self.folder / "flower-run", str(run_id).encode())

    def audit(self, event: str, about: Mapping[str, Any]) -> str:
        """Append one line to the server's audit log. Return the log's anchor after it."""
        if event == "failed":
            self.underway.failed(about["site"], about["reason"], about.get("up_bytes", 0))
        run = {"run": f"{self.folder.name}-{self.id}"}
        return str(audit_log.append_entry(self.folder.parent / audit_log.NAME, event, run | dict(about)))

    def tap(self) -> MessageCapture:
        """Return the capture, which stores whole messages, encrypted if the environment names a key file."""
        return MessageCapture(self.folder / "tap", FileSeal.of_environment())

    def checkpoint(self, server: FederatedState, loop: Mapping[str, Any]) -> None:
        """Write the state after a complete round and the loop's own state. Preserve the previous checkpoint."""
        scalars = {"server": dict(server.scalars), "loop": dict(loop), "id": self.id}
        save_state(
            dataclasses.replace(server, scalars=scalars), self._checkpoint, keep=self.folder / checkpoints.BEFORE
        )

    def load_checkpoint(self) -> tuple[FederatedState, dict[str, Any]]:
        """Read the last checkpoint; if it is damaged, the previous one.

        Raises:
            StateError: neither can be read.
        """
        saved, note = checkpoints.newest_checkpoint(self.folder)
        if note:
            self.notes["checkpoint"] = note
            self.audit("checkpoint", {"reason": note})
        loop: Any = saved.scalars["loop"]
        scalars: Any = saved.scalars["server"]
        return dataclasses.replace(saved, scalars=scalars), loop

    def resume(self, round_: int, changes: Mapping[str, Any]) -> None:
        """Record that the run continues at `round_`, and what happened to unfinished attempts."""
        for row in checkpoints.interrupted_attempts(self.folder):
            self.round(RoundRecord(**row))
        self._append("metrics.jsonl", checkpoints.resume_mark(self.folder, round_))
        about = {"round": round_, "changes": dict(changes), **self.notes}
        self.audit("resumed", about)
        self._append("resumes.jsonl", {"time": _now(), **about, **_versions()})

    def final(self, deployed: Mapping[str, Weights], save: Save | None = None) -> None:
        """Write the models' weights; `save` also writes the server's model in a format that other programs load."""
        for view, weights in deployed.items():
            save_state(FederatedState(weights), self.folder / "final" / f"{view}.safetensors")
        if save is not None:
            with atomic_files.fill_folder(self.folder / "final") as folder:
                save(deployed["server"], folder)

    def _row(self, row: Mapping[str, Any]) -> None:
        """Write a line of metrics.jsonl, and pass its metrics to the sinks."""
        self._append("metrics.jsonl", row)
        if self.outlets:
            self.outlets.put(samples_from_line(row, self.underway.sizes))

    def _append(self, name: str, content: Mapping[str, Any]) -> None:
        atomic_files.append_line(self.folder / name, content)

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        atomic_files.write_atomic(self.folder / name, json.dumps(content, indent=1).encode())


def _versions() -> dict[str, str]:
    packages = ("flwr", "torch", "transformers", "peft")
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {"fedveil": __version__, **versions, "python": platform.python_version()}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
