"""Measure the time and memory needed to prepare a site's rows, by number of rows: the first time, and later.

Each case is a separate process, like a worker. The clock starts once the libraries and the model are loaded and a few
rows have been prepared, and stops when the first batch can be built; "peak_mb" is the growth of resident memory since
then, including mapped files. "row by row" works like FedVeil 0.1: every line becomes a Python object, the tokenizer is
called once per text, and every row is a list. It is omitted above `settings.row_by_row` rows.

The rows are the E2E data, repeated with a different name in the source and target of each copy.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from fedveil.attacks.statistics import confidence_interval
from fedveil.data.batches import TokenExample
from fedveil_bench.common import data
from fedveil_bench.runner import BenchOptions, BenchOutcome

_ASKED = {"rows": 300_000, "first": 12.0, "later": 1.0, "peak_mb": 150.0}
_WARM_UP = 50
_EVERY = 0.02  # seconds between two memory readings


def list_requirements(settings: Mapping[str, Any]) -> list[data.DataRequirement]:
    """Return the requirement for the rows to repeat."""
    return [data.DataRequirement(settings["data"], ("train",), (".jsonl",))]


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return one result row per row count and preparation method."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for count in settings["rows"]:
            folder = Path(scratch) / str(count)
            _write(data.find_data_folder(settings["data"]) / "train.jsonl", folder, count)
            ways = ["row by row"] if count <= settings["row_by_row"] else []
            found = {}
            for way in (*ways, "first", "later"):
                found[way] = _measured(folder, way)
                options.say(f"{count:,} rows, {way}: {found[way]['seconds']:.2f} s, {found[way]['peak_mb']:.0f} MB")
                rows.append(_row(f"{count} rows, {way}", found[way]))
            if len({of["digest"] for of in found.values()}) > 1:
                raise RuntimeError(f"expected the same tokens in every mode, found different ones at {count} rows")
    return BenchOutcome(rows, _verdicts(rows, settings["rows"]))


def _row(name: str, found: dict[str, Any]) -> dict[str, Any]:
    keys = ("seconds", "cpu_seconds", "peak_mb", "kept_mb", "disk_mb")
    return {"name": name, "metrics": {key: confidence_interval([found[key]]) for key in keys}}


def _verdicts(rows: list[dict[str, Any]], counts: list[int]) -> list[str]:
    by_name = {row["name"]: {key: m["mean"] for key, m in row["metrics"].items()} for row in rows}
    lines = []
    for count in counts:
        before, first, later = (by_name.get(f"{count} rows, {way}", {}) for way in ("row by row", "first", "later"))
        asked = [""] * 3
        if count == _ASKED["rows"]:
            asked = [f" (asked: at most {_ASKED[key]:g})" for key in ("first", "later", "peak_mb")]
        line = f"{count:,} rows: {first['seconds']:.2f} s the first time{asked[0]}, {later['seconds']:.2f} s later"
        line += f"{asked[1]}, a peak of {max(first['peak_mb'], later['peak_mb']):.0f} MB{asked[2]}"
        if before:
            line += f"; row by row {before['seconds']:.2f} s and {before['peak_mb']:.0f} MB at every start, "
            line += f"{before['seconds'] / first['seconds']:.1f} and {before['seconds'] / later['seconds']:.0f} times"
            line += " as long"
        lines.append(f"{line}.")
    return lines


def _write(source: Path, folder: Path, count: int) -> None:
    folder.mkdir()
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    with (folder / "train.jsonl").open("w") as file:
        for i in range(count):
            copy, row = i // len(rows), rows[i % len(rows)]
            if copy:
                name = row["mr"].partition("[")[2].partition("]")[0]
                row = {key: text.replace(name, f"{name} {copy}") for key, text in row.items()}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _measured(folder: Path, way: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "fedveil_bench.core.rows", str(folder), way]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _prepared(task: Any, folder: Path, way: str) -> Any:
    if way != "row by row":
        return task.prepare(folder, "train", None, folder / "shelf").rows
    lines = (folder / "train.jsonl").read_bytes().split(b"\n")
    parsed = [json.loads(line) for line in lines if line.strip()]
    encode, separator = task.base.tokenizer.encode, task.base.tokenizer.encode("\n", add_special_tokens=False)
    longest, end = task.config.task.max_tokens, task.base.tokenizer.eos_token_id
    rows = []
    for row in parsed:
        source, target = (encode(row[key], add_special_tokens=False) for key in ("mr", "ref"))
        answer = [*target, end][: longest - len(separator)]
        prompt = [*source[: max(0, longest - len(answer) - len(separator))], *separator]
        rows.append(TokenExample(prompt + answer, len(prompt)))
    return rows


class _Peak:
    """The maximum resident memory, measured by a thread."""

    def __init__(self) -> None:
        self._process, self._end = psutil.Process(), threading.Event()
        self.bytes = self.now
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def now(self) -> int:
        return int(self._process.memory_info().rss)

    def _watch(self) -> None:
        while not self._end.wait(_EVERY):
            self.bytes = max(self.bytes, self.now)

    def ended(self) -> int:
        self._end.set()
        self.bytes = max(self.bytes, self.now)
        return self.bytes


def _digest(rows: Any) -> str:
    found = hashlib.sha256()
    for row in rows:
        found.update(repr((row.ids, row.start)).encode())
    return found.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def main() -> None:
    """Run one case in this process."""
    from fedveil import config, strategies, tasks
    from fedveil.contract.task import Example

    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("way", choices=("row by row", "first", "later"))
    arguments = parser.parse_args()
    parsed = config.parse({"task.max-tokens": 96})
    task: Any = tasks.load_task(parsed, strategies.create_method("fedavg").adapter, "cpu")
    import datasets  # noqa: F401  # part of a bare start

    task.encode(Example.from_columns({"mr": f"name[{i}]", "ref": f"{i}."} for i in range(_WARM_UP)))
    peak, cpu, started = _Peak(), time.process_time(), time.perf_counter()
    bare = peak.bytes
    rows = _prepared(task, arguments.folder, arguments.way)
    task.collate(rows[:16])
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    most, kept = peak.ended() - bare, peak.now - bare
    disk = sum(path.stat().st_size for path in _files(arguments.folder / "shelf"))
    found = {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "peak_mb": most / 1e6,
        "kept_mb": kept / 1e6,
        "disk_mb": disk / 1e6,
    }
    print(json.dumps({**found, "digest": _digest(rows)}))  # noqa: T201  # read by _measured


if __name__ == "__main__":
    main()
