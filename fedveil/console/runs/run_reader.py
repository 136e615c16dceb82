"""Read a run folder as written by server_app/run_folder.py: a run's config, progress, results and disclosures."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedveil.errors import StateError
from fedveil.records import disclosure_ledger, process_exit
from fedveil.sanitize import sanitize

Row = dict[str, Any]
_CONFIG_BYTES, _PROGRESS_BYTES = 1 << 20, 1 << 16
_CHOSEN_BY = {
    "validation": " on the validation split",
    "sites": " on examples that the sites hold out",
    "test": ", which the test split chose",
}
_MARKS = ("status.json", "config.json")  # every run folder has one of these


@dataclass(frozen=True)
class RunView:
    """One run, finished or not.

    Attributes:
        folder: its folder, named after the run.
        config: config.json; {} if the run failed before it had a valid config.
        status: status.json; its state is "died" if the file says "running" but the process has ended, and "stopped" if
            it failed because it was asked to stop.
        attempts: the round attempts in metrics.jsonl, in order. Those with "void" did not enter the model, because
            the run was resumed from an earlier point; their messages were sent nevertheless.
        before: scores of the initial model, by view; {} if there are none.
        messages: the result of `fedveil.records.disclosure_ledger.read_messages`.
        resumes: the lines of resumes.jsonl.
        progress: progress.json; {} if there is none, or if it belongs to another run.
    """

    folder: Path
    config: Row
    status: Row
    attempts: list[Row]
    before: dict[str, dict[str, float]]
    messages: list[Row]
    resumes: list[Row] = field(default_factory=list)
    progress: Row = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the run's name."""
        return self.folder.name

    @property
    def method(self) -> str:
        """Return the method's name, or "?" if the run had no valid config."""
        return str(self.config.get("method", {}).get("name", "?"))

    @property
    def adapter_weights(self) -> str:
        """Return the adapter and its size, such as "lora, 65.5 k of 1.4 M weights"; "" if unknown."""
        content = self.config.get("adapter")
        if not isinstance(content, dict):
            return ""
        kind, count, of = (content.get(key) for key in ("kind", "weights", "of"))
        if not isinstance(count, int) or not isinstance(of, int):
            return ""
        whole = "" if count == of else f" of {_short_count(of)}"
        return f"{sanitize(str(kind), 40)}, {_short_count(count)}{whole} weights"

    @property
    def rounds_done(self) -> int:
        """Return the number of rounds with an attempt that reached its quorum."""
        return len(self._by_round)

    @property
    def finished_rounds(self) -> list[Row]:
        """Return, for each finished round, the attempt that entered the model, in order."""
        return [self._by_round[round_] for round_ in sorted(self._by_round)]

    @property
    def seconds(self) -> float:
        """Return the total wall time of all attempts in seconds, excluding evaluation on the server."""
        return float(sum(attempt.get("seconds", 0.0) for attempt in self.attempts))

    @property
    def upload_bytes(self) -> int:
        """Return the bytes of all messages from the sites, including refused ones."""
        return self._bytes("up", "upload_bytes")

    @property
    def download_bytes(self) -> int:
        """Return the bytes of all messages to the sites."""
        return self._bytes("down", "download_bytes")

    def unlisted(self, direction: str) -> int:
        """Return the bytes that the ledger does not list by field: refused uploads, keys and shares."""
        listed = sum(int(message["bytes"]) for message in self.messages if message["direction"] == direction)
        return (self.upload_bytes if direction == "up" else self.download_bytes) - listed

    @cached_property
    def view(self) -> str:
        """Return the view whose scores are shown: the server's model, if it is scored."""
        views = [view for row in [{"scores": self.before}, *self.attempts] for view in row.get("scores") or {}]
        return "server" if "server" in views or not views else views[0]

    @cached_property
    def final(self) -> dict[str, float]:
        """Return each metric's last value or, if a score selected the model, that model's value."""
        final_entry = self._said("final")
        last, scores = final_entry.get("round"), dict[str, float]()
        for attempt in self._valid:
            if last is None or attempt["round"] <= last:
                scores |= (attempt.get("scores") or {}).get(self.view, {})
        scores |= (final_entry.get("scores") or {}).get(self.view, {})
        return scores

    @property
    def of_round(self) -> str:
        """Say which round the model comes from and which round was best; "" if no score selects the model."""
        best = self._said("best")
        if not best:
            return ""
        split = _CHOSEN_BY.get(str(best.get("split")), "")  # runs from earlier versions do not have it
        number, value = int(best["round"]) + 1, f"{best['metric']} {float(best['value']):.6g}{split}"
        if best.get("kept"):
            was = "is" if self._said("final") else "is so far"
            return f"the model {was} the one from round {number}, with the best {value}"
        return f"the best {value} was after round {number}; the model is from the last round"

    @property
    def reading(self) -> list[str]:
        """Return notes on how the server read its own data, such as conversions and files that it does not read."""
        notes = self.status.get("reading")
        return [str(note) for note in notes] if isinstance(notes, list) else []

    def _said(self, key: str) -> Row:
        value = self.status.get(key)
        return value if isinstance(value, dict) else {}

    def curve(self, metric: str) -> list[tuple[int, float]]:
        """Return (rounds finished, value) for a metric, starting with the initial model (0 rounds)."""
        start = [(0, self.before[self.view][metric])] if metric in self.before.get(self.view, {}) else []
        rows = ((r, (row.get("scores") or {}).get(self.view, {}).get(metric)) for r, row in self._by_round.items())
        return start + [(round_ + 1, value) for round_, value in rows if value is not None]

    @cached_property
    def uploaded(self) -> list[tuple[int, int]]:
        """Return (rounds finished, bytes uploaded so far), including refused uploads, failed and repeated rounds."""
        total, points = 0, {0: 0}
        for attempt in self.attempts:
            total += int(attempt.get("upload_bytes", 0))
            if not attempt.get("void"):
                points[int(attempt["round"]) + bool(attempt.get("weights"))] = total
        return sorted(points.items())

    @cached_property
    def sites(self) -> list[str]:
        """Return all sites that were asked to take part or to send their keys."""
        keys = ("cohort", "failed", "unlisted")
        asked = {site for attempt in self.attempts for key in keys for site in attempt.get(key) or []}
        return sorted(asked | {str(message["site"]) for message in self.messages})

    @property
    def unseen(self) -> list[Row]:
        """Return the secure-aggregation attempts, whose uploads were masked."""
        return [attempt for attempt in self.attempts if attempt.get("unseen")]

    @property
    def _by_round(self) -> dict[int, Row]:
        return {int(attempt["round"]): attempt for attempt in self._valid if attempt.get("weights")}

    @property
    def _valid(self) -> list[Row]:
        return [attempt for attempt in self.attempts if not attempt.get("void")]

    def _bytes(self, direction: str, total: str) -> int:
        listed, recorded = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        for message in self.messages:
            listed[disclosure_ledger.counted_in(message)] += (message["direction"] == direction) * int(message["bytes"])
        for attempt in self.attempts:
            recorded[int(attempt["round"]), int(attempt.get("attempt", 0))] += int(attempt.get(total, 0))
        return (listed | recorded).total()  # the larger of the two, because a current attempt has no line yet


def _short_count(count: int) -> str:
    for unit, name in ((10**9, " G"), (10**6, " M"), (10**3, " k")):
        if count >= unit:
            return f"{count / unit:.3g}{name}"
    return str(count)


def load_run(folder: Path) -> RunView:
    """Load the run in `folder`. Raises StateError if there is none or a file cannot be read."""
    status = status_of(folder)
    rows = [_checked(row, folder / "metrics.jsonl") for row in json_lines(folder / "metrics.jsonl")]
    return RunView(
        folder=folder.resolve(),
        config=_json(folder / "config.json"),
        status=status,
        attempts=_attempts(rows),
        before=next((row.get("scores") or {} for row in rows if row["round"] < 0), {}),
        messages=disclosure_ledger.read_messages(folder / disclosure_ledger.NAME),
        resumes=json_lines(folder / "resumes.jsonl"),
        progress=progress_of(folder),
    )


def progress_of(folder: Path) -> Row:
    """Read the current round's state (server_app/round_progress.py); {} if the file is missing or malformed."""
    try:
        with (folder / "progress.json").open("rb") as file:
            progress = json.loads(file.read(_PROGRESS_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return progress if isinstance(progress, dict) else {}


def config_of(folder: Path) -> Row:
    """Return the unparsed config of the run in `folder`, such as {"train.batch-size": 16, ...}.

    Raises:
        StateError: there is none, or it cannot be read.
    """
    file = folder / "config.json"
    _require_run(folder)
    if not file.is_file():
        raise StateError(
            f"run folder {folder}: expected the config.json of a run that has started, found none; name another run"
        )
    if (size := file.stat().st_size) > _CONFIG_BYTES:
        raise StateError(f"{file}: expected at most {_CONFIG_BYTES} bytes, found {size}; name another run")
    config = _json(file).get("config")
    if not isinstance(config, dict):
        raise StateError(f"{file}: expected a run config under 'config', found {type(config).__name__}")
    return config


def status_of(folder: Path) -> Row:
    """Read the status of the run in `folder`, using only its small files. Raises the same errors as `load_run`."""
    _require_run(folder)
    status = _json(folder / "status.json")
    if status.get("state") == "running" and process_exit.is_dead(folder):
        status = _json(folder / "status.json")  # its last status may have been written in between
        if status.get("state") == "running":
            about = status.get("process")
            why = process_exit.describe_ending(about if isinstance(about, dict) else {})
            reason = f"its ServerApp ended without a message: {why}; {process_exit.resume_command(folder)}"
            return status | {"state": "died", "reason": reason}
    reason = str(status.get("reason") or "")
    if status.get("state") == "failed" and reason.startswith(process_exit.TOLD_TO_END):
        return status | {"state": "stopped", "reason": reason.partition(": ")[2]}
    return status


def _require_run(folder: Path) -> None:
    if not any((folder / name).is_file() for name in _MARKS):
        raise StateError(f"run folder {folder}: expected a run's status.json or config.json, found {_instead(folder)}")


def _instead(folder: Path) -> str:
    """Describe the folder's contents when it is not a run folder, and the next step."""
    if not folder.is_dir():
        return "no such folder; fedveil status lists the runs in a folder"
    files = itertools.islice((file for name in _MARKS for file in folder.glob(f"*/{name}")), 8)
    inside = ", ".join(sorted({sanitize(folder / file.parent.name, 200) for file in files}))
    return f"runs inside it; name one: {inside}" if inside else "neither; name another folder"


def _attempts(rows: list[Row]) -> list[Row]:
    attempts: list[Row] = []
    for row in rows:
        if row.get("resumed"):
            attempts = [each | {"void": True} if each["round"] >= row["round"] else each for each in attempts]
        elif row["round"] >= 0:
            attempts.append(row)
    return attempts


def json_lines(file: Path) -> list[Row]:
    """Return the complete lines of a JSON Lines file; [] if there is none. A partly written line is omitted."""
    text = ""
    with suppress(FileNotFoundError):
        text = _read(file)
    rows = []
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if line.endswith("\n"):
            rows.append(_parsed(line, f"{file}, line {number}"))
    return rows


def new_lines(file: Path, start: int) -> tuple[list[Row], int]:
    """Return the complete lines of a JSON Lines file from byte `start` on, and the offset after them.

    A file that has become shorter, because a torn line was removed, is read from its current end.
    """
    if not file.is_file():
        return [], start
    with file.open("rb") as lines:
        lines.seek(min(start, file.stat().st_size))
        begin, data = lines.tell(), lines.read()
    data = data[: data.rfind(b"\n") + 1]
    where = f"{file}, after byte {begin}"
    return [_parsed(line.decode(errors="replace"), where) for line in data.splitlines()], begin + len(data)


def _json(file: Path) -> Row:
    return _parsed(_read(file), str(file)) if file.is_file() else {}


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise StateError(f"{file}: expected UTF-8 text, found bytes in a different encoding ({error.reason})") from None


def _parsed(text: str, where: str) -> Row:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StateError(f"{where}: expected JSON, found {text[:40]!r} ({error})") from None
    if not isinstance(value, dict):
        raise StateError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def _checked(row: Row, file: Path) -> Row:
    if "round" not in row:
        raise StateError(f"{file}: expected 'round' on every line, found {sorted(row)}")
    return row
