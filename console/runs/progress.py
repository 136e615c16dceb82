"""Shows a run's progress from its run folder: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fedveil.console.runs.folder import Row, loss_of, new_lines
from fedveil.foreign import shown


class RunProgress(AbstractContextManager["RunProgress"]):
    """Follows metrics.jsonl of one run; call `tick` now and then."""

    def __init__(self, console: Console, folder: Path, name: str, rounds: int) -> None:
        self._console, self._file, self._name, self._rounds = console, folder / "metrics.jsonl", shown(name, 80), rounds
        self._read = 0  # bytes
        self._bar = Progress(
            TextColumn("{task.description:<14}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("rounds"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(self._name, total=rounds, note="starting")

    def __enter__(self) -> RunProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def tick(self, status: dict[str, Any]) -> None:
        """Shows what is new; `status` is the run's status.json."""
        if not status:
            return
        rows, self._read = new_lines(self._file, self._read)
        for row in rows:
            self._show(row)

    def _show(self, row: Row) -> None:
        loss = loss_of(row)
        if row.get("resumed"):
            self._tell(int(row["round"]), "resumed")
            return
        note = "" if loss is None else f"loss {loss:.4f}"
        if row["round"] < 0:
            note = f"before any round: {note}"
        else:
            accepted = f"{len(row['accepted'])}/{len(row['cohort'])} sites"
            failures = "".join(f"; {shown(site, 80)}: {shown(why)}" for site, why in row["failed"].items())
            loss_too = f"  {note}" if note else ""
            note = f"{row['seconds']:5.1f} s  {accepted}  up {row['upload_bytes']:,} B{loss_too}{failures}"
        done = row["round"] + 1 if row["round"] < 0 or row.get("weights") else row["round"]
        self._tell(done, note)

    def _tell(self, done: int, note: str) -> None:
        self._bar.update(self._task, completed=done, note=note)
        if not self._console.is_terminal:
            self._console.print(f"{self._name}: round {done}/{self._rounds}  {note}", markup=False, soft_wrap=True)
