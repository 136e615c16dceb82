"""The run folder: what happened, what was disclosed, and a checkpoint to resume from.

config.json               run config, method with its fields, versions
status.json               state, round, reason; replaced whole
../audit-log.jsonl        hash-chained log of all runs beside this one: every message, its site and the decision
                          (fedveil/records/audit_log.py)
id                        8 hex digits that tell this run from others of its name
flower-run                Flower's number of the run
metrics.jsonl             one line for each attempt at a round: cohort, accepted, failed with reasons, bytes, reports,
scores disclosure.jsonl          one line for each message: every field with its bytes
checkpoint.safetensors    the server's state after the last whole round; replaced whole
final/<view>.safetensors  the deployed weights at the end
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedveil import __version__
from fedveil.config import RunConfig
from fedveil.contract.layout import Direction
from fedveil.contract.method import Method, State, fields_of
from fedveil.contract.spec import Weights
from fedveil.errors import StateError
from fedveil.records import audit_log
from fedveil.records.files import write_atomic
from fedveil.records.state import load_state, save_state
from fedveil.sealed import Seal
from fedveil.wire.tap import Tap


@dataclasses.dataclass
class RoundRecord:
    """One attempt at a round.

    Attributes:
        failed: reason by site, for every site of the cohort whose upload is not in the sums.
        upload_bytes, download_bytes: of whole messages. Refused uploads count, for they were sent.
        reports: what each accepted site reported, with its num_examples.
        cut: the examples that count, for a site which claimed more than cohort.max-share allows.
        left_out: accepted sites whose uploads the rule did not choose (aggregate.rule = "multi-krum").
        weights: digest of the deployed weights after the round.
    """

    round: int
    attempt: int
    cohort: list[str]
    accepted: list[str] = dataclasses.field(default_factory=list)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    upload_bytes: int = 0
    download_bytes: int = 0
    reports: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    cut: dict[str, int] = dataclasses.field(default_factory=dict)
    left_out: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    weights: str = ""
    scores: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)


class RunFolder:
    """Writes one run's folder. Refuses a folder that holds another run, unless it resumes that run."""

    def __init__(self, folder: Path, resume: bool = False) -> None:
        self.folder, self.last_round = folder, -1
        if (folder / "status.json").exists() and not resume:
            raise StateError(
                f"run folder {folder}: expected a new one, found a run; choose another run.name, or set run.resume "
                "= true"
            )
        if not resume and folder.is_dir() and any(folder.iterdir()):
            raise StateError(f"run folder {folder}: expected an empty one, found other files; choose another run.name")
        if resume and not (folder / "id").exists():
            raise StateError(f"run.resume: expected a run in {folder}, found none; start the run without it")
        self.resumed = (
            resume and self._checkpoint.exists()
        )  # before the first checkpoint no site was asked for anything
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not resume:
            write_atomic(folder / "id", secrets.token_hex(4).encode())

    @property
    def id(self) -> str:
        """8 hex digits that tell this run from others of its name; a resumed run keeps them."""
        return (self.folder / "id").read_text()

    @property
    def _checkpoint(self) -> Path:
        return self.folder / "checkpoint.safetensors"

    def config(self, config: RunConfig, method: Method) -> None:
        """Writes what is about to run, and in which environment."""
        packages = ("flwr", "torch", "transformers", "peft")
        content = {
            "config": config.flat(),
            "method": {"name": config.method.name, "version": method.version, "fields": fields_of(method)},
            "fedveil": __version__,
            **{name: importlib.metadata.version(name) for name in packages},
            "python": platform.python_version(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self._write_json("config.json", content)

    def status(self, state: str, round_: int, rounds: int, reason: str = "", **counts: int) -> None:
        """Writes the run's state: "running", "completed" or "failed"."""
        self.last_round = round_
        self._write_json("status.json", {"state": state, "round": round_, "rounds": rounds, "reason": reason, **counts})

    def round(self, record: RoundRecord) -> None:
        """Appends one finished attempt at a round."""
        self._append("metrics.jsonl", dataclasses.asdict(record))

    def scores(self, round_: int, scores: Mapping[str, Mapping[str, float]]) -> None:
        """Appends scores from before round 0, as round -1."""
        self._append("metrics.jsonl", {"round": round_, "scores": scores})

    def disclosed(self, disclosed: Mapping[str, Any], record: RoundRecord, site: str, direction: Direction) -> None:
        """Appends what one message disclosed, in the form of `fedveil.wire.envelope.describe`."""
        where = {"round": record.round, "attempt": record.attempt, "site": site, "direction": direction}
        self._append("disclosure.jsonl", where | dict(disclosed))

    def flower_run(self, run_id: int) -> None:
        """Writes Flower's number of the run, for `fedveil watch`."""
        write_atomic(self.folder / "flower-run", str(run_id).encode())

    def audit(self, event: str, about: Mapping[str, Any]) -> str:
        """Appends one line to the server's audit log. Returns the log's anchor after it."""
        run = {"run": f"{self.folder.name}-{self.id}"}
        return str(audit_log.append(self.folder.parent / audit_log.NAME, event, run | dict(about)))

    def tap(self) -> Tap:
        """The tap, which stores whole messages, sealed where the environment names a key file."""
        return Tap(self.folder / "tap", Seal.of_environment())

    def checkpoint(self, server: State, loop: Mapping[str, Any]) -> None:
        """Writes the state after a whole round, and what the loop needs to continue."""
        save_state(State(server.tensors, {"server": dict(server.scalars), "loop": dict(loop)}), self._checkpoint)

    def load_checkpoint(self) -> tuple[State, dict[str, Any]]:
        """Reads what `checkpoint` wrote. Removes the lines of later rounds from metrics.jsonl and disclosure.jsonl."""
        saved = load_state(self._checkpoint)
        loop: Any = saved.scalars["loop"]
        scalars: Any = saved.scalars["server"]
        for name in ("metrics.jsonl", "disclosure.jsonl"):
            self._drop_after(name, loop["round"])
        return State(saved.tensors, scalars), loop

    def final(self, deployed: Mapping[str, Weights]) -> None:
        """Writes the deployed weights."""
        for view, weights in deployed.items():
            save_state(State(weights), self.folder / "final" / f"{view}.safetensors")

    def _drop_after(self, name: str, last_round: int) -> None:
        path = self.folder / name
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["round"] <= last_round]
        write_atomic(path, "".join(kept).encode())

    def _append(self, name: str, content: Mapping[str, Any]) -> None:
        with (self.folder / name).open("a") as file:
            file.write(json.dumps(content) + "\n")

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        write_atomic(self.folder / name, json.dumps(content, indent=1).encode())
