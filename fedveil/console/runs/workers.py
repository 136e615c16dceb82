"""The warm workers of this machine's sites: what each holds, since when, and the progress of its client round."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from fedveil.client_app.worker.connection import NAME, Connection, WorkerRecord
from fedveil.client_app.worker.registry import WorkerRegistry
from fedveil.contract.row_counts import FIELDS, RowCounts
from fedveil.data.reading_notes import MAX_NOTES
from fedveil.sanitize import sanitize

_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 2.0
_TAIL_BYTES = 1 << 16
_MOST_LINES = 8
_STEPS_SECONDS = 2.0


@dataclass(frozen=True)
class WorkerStatus:
    """One worker: its site, its registry record, and the status that it reports."""

    site: str
    card: WorkerRecord
    says: dict[str, Any]

    @property
    def where(self) -> str:
        """Return what the worker is working on, such as "fedrand/demo, round 3 of 5"."""
        if "run" not in self.says:
            return f"no run {self._since_when}"
        return f"{self.says['run']} ({self.says['method']}), round {self.says['round'] + 1} of {self.says['rounds']}"

    @property
    def holds(self) -> str:
        """Describe the base model, its device, and its memory use."""
        model = self.says.get("model", f"no model {self._since_when}")
        memory = f"{self.says.get('memory_mb', 0):,} MB"
        if "device_memory_mb" in self.says:
            memory += f" and {self.says['device_memory_mb']:,} MB on the device"
        return f"{model} on {self.says.get('device', 'no device yet')}, {memory}"

    @property
    def _since_when(self) -> str:
        """Return the adverb for a worker without a run: "now" after its last run, "yet" if it never had one."""
        return "now" if "last" in self.says else "yet"

    @property
    def pace(self) -> str:
        """Describe the loss and speed of the current training, or the duration of the last client round."""
        if self.says["state"] == "training":
            left = f", about {self.says['seconds_left']:.0f} s left" if "seconds_left" in self.says else ""
            return f"loss {self.says['loss']:.4f}, {self.says['tokens_per_second']:,} tokens/s{left}"
        last = self.says.get("last")
        if not last:
            return ""
        counts = RowCounts.from_report(last)
        rows = f"; {counts.words}" if counts else ""
        return f"last round {last['seconds']:.1f} s, including {last['load_seconds']:.2f} s of loading{rows}"


def list_workers(state_dir: Path) -> list[WorkerStatus]:
    """Return all running workers in a state folder."""
    workers = []
    for path in sorted((state_dir.expanduser() / "workers").glob("*")):
        folder = WorkerRegistry(state_dir, path.name)
        with folder.locked():
            cards = folder.living()
        workers += [WorkerStatus(path.name, card, _ask(folder.connect(card))) for card in cards]
    return workers


def worker_steps(state_dirs: Iterable[Path]) -> str:
    """List current trainings in these state folders, as in "north step 12/20, loss 1.2345, about 3 s left"."""
    training = [each for folder in state_dirs for each in list_workers(folder) if each.says["state"] == "training"]
    lines = [
        f"{each.site} step {each.says['step']}/{each.says['steps']}, loss {each.says['loss']:.4f}, about "
        f"{each.says.get('seconds_left', 0):.0f} s left"
        for each in training
    ]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"and {len(lines) - _MOST_LINES} more"]
    return "\n".join(lines)


def steps_by_and_by(state_dirs: Sequence[Path]) -> Callable[[], str]:
    """Wrap `worker_steps` so that it queries the workers at most every two seconds."""
    steps_text, asked = "", -_STEPS_SECONDS

    def steps_said() -> str:
        nonlocal steps_text, asked
        if time.monotonic() - asked >= _STEPS_SECONDS:
            steps_text, asked = worker_steps(state_dirs), time.monotonic()
        return steps_text

    return steps_said


def last_failures(state_dir: Path) -> list[str]:
    """Return a line for each site in a state folder whose last client round failed: which round, when and why."""
    failures = []
    for path in sorted((state_dir.expanduser() / "workers").glob("*")):
        if (turn := _last(WorkerRegistry(state_dir, path.name).turns)) and "failed" in turn:
            when = datetime.fromtimestamp(turn["time"]).strftime("%Y-%m-%d %H:%M:%S")
            which = f", round {turn['round'] + 1} of {sanitize(turn['run'], 80)}," if "run" in turn else ""
            failures.append(
                f"{path.name}: the last client round{which} failed at {when}: {sanitize(turn['failed'], 1200)}"
            )
    return failures


def last_row_counts(state_dir: Path) -> list[str]:
    """Return a line for each site in a state folder: how many rows its last client round truncated or dropped."""
    lines = []
    for path in sorted((state_dir.expanduser() / "workers").glob("*")):
        turn = _last(WorkerRegistry(state_dir, path.name).turns)
        counts = RowCounts.from_report(turn) if all(type(turn.get(name)) is int for name in FIELDS) else None
        if counts is not None:
            lines.append(f"{path.name}: in the last client round, {counts.words}")
    return lines


def last_readings(state_dir: Path) -> list[str]:
    """Return a line for each note by a site in a state folder on how it read the data for its last client round."""
    lines = []
    for path in sorted((state_dir.expanduser() / "workers").glob("*")):
        notes = _last(WorkerRegistry(state_dir, path.name).turns).get("reading")
        if isinstance(notes, list):
            lines += [f"{path.name}: {sanitize(note, 400)}" for note in notes[:MAX_NOTES]]
    return lines


def _last(turns: Path) -> dict[str, Any]:
    """Return the last complete line of a site's client-round log; {} if there is none."""
    try:
        with turns.open("rb") as file:
            file.seek(max(0, turns.stat().st_size - _TAIL_BYTES))
            line = next((line for line in reversed(file.readlines()) if line.endswith(b"\n")), b"{}")
        return dict(json.loads(line))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}


def _ask(connection: Connection) -> dict[str, Any]:
    try:
        with connection.open_channel() as link:
            status = dict(json.loads(link.unary_unary(f"/{NAME}/Status")(b"", timeout=_ANSWER_SECONDS)))
            # The run, method and model are text from the server.
            return {key: sanitize(value, 100) if isinstance(value, str) else value for key, value in status.items()}
    except RecursionError:
        raise ValueError("brackets nested too deeply") from None
    except grpc.RpcError as error:
        return {"state": f"does not answer ({error.code().name})"}


def describe_worker(worker: WorkerStatus) -> str:
    """Describe a worker in a few lines."""
    since = datetime.fromtimestamp(worker.card.since).strftime("%Y-%m-%d %H:%M:%S")
    lines = [
        f"{worker.site}: process {worker.card.pid} since {since}: {worker.says['state']}",
        f"  run    {worker.where}",
    ]
    lines += [f"  holds  {worker.holds}", *([f"  pace   {worker.pace}"] if worker.pace else [])]
    return "\n".join(lines)


def follow_worker(console: Console, state_dir: Path, enough: Callable[[], bool] = lambda: False) -> None:
    """Show a bar per worker on a terminal, or a line per change elsewhere, until `enough` returns True, or Ctrl-C."""
    bars = Progress(
        TextColumn("{task.fields[site]:<12} {task.fields[where]}", markup=False),
        BarColumn(bar_width=24),
        TextColumn(
            "{task.completed:.0f}/{task.total:.0f} steps  {task.fields[state]}  {task.fields[note]}", markup=False
        ),
        console=console,
        disable=not console.is_terminal,
    )
    task_ids: dict[str, TaskID] = {}
    last_states: dict[str, tuple[Any, ...]] = {}
    with bars:
        while not enough():
            workers = {worker.card.id: worker for worker in list_workers(state_dir)}
            for gone in set(task_ids) - set(workers):
                bars.remove_task(task_ids.pop(gone))
            for id_, worker in workers.items():
                if id_ not in task_ids:
                    task_ids[id_] = bars.add_task("", total=1, site=worker.site, where="", state="", note="")
                _draw(bars, task_ids[id_], worker)
                now = (worker.says["state"], worker.where, worker.says.get("step"))
                if not console.is_terminal and last_states.get(id_) != now:
                    last_states[id_] = now
                    console.print(_line(worker), markup=False, soft_wrap=True)
            time.sleep(_POLL_SECONDS)


def _draw(bars: Progress, bar: TaskID, worker: WorkerStatus) -> None:
    says = worker.says
    note = f"{worker.pace}  {says.get('memory_mb', 0):,} MB"
    done, total = says.get("step", 0), says.get("steps", 1)
    if says["state"] == "loading":
        done = 0
    bars.update(bar, completed=done, total=total, where=worker.where, state=says["state"], note=note)


def _line(worker: WorkerStatus) -> str:
    step = f"step {worker.says['step']}/{worker.says['steps']}  " if worker.says["state"] == "training" else ""
    return f"{worker.site}: {worker.says['state']}: {worker.where}  {step}{worker.pace}  {worker.holds}"
