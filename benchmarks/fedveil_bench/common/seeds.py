"""Run each seed of a preset in its own process with one thread, and as many seeds at a time as there are cores.

A process runs `python -m fedveil_bench.common.seeds MODULE`, which calls MODULE's `of_seed(settings, seed, options)`.

A seed's result is stored in `<result>.seeds.pieces.jsonl` until all seeds are done, so that an interrupted run can
continue. A stored result is reused only for the same commit, settings, form and device; with uncommitted changes,
nothing is stored. A module whose seeds run in pieces stores the pieces instead, and its seeds return the pieces
that are ready in time.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedveil.errors import ConfigError, FedVeilError
from fedveil_bench.common import resumable_rows
from fedveil_bench.provenance import measured_commit
from fedveil_bench.runner import BenchOptions

OfSeed = Callable[[dict[str, Any], int, BenchOptions], Any]


def run_seeds(module: str, settings: dict[str, Any], options: BenchOptions, in_pieces: bool = False) -> list[Any]:
    """Return the JSON results of the module's `of_seed` for each seed, in order, starting with `first_seed`.

    With `in_pieces`, `of_seed` also gets the pieces file, where it stores its pieces, and the remaining minutes.

    An interrupt ends the seeds' processes.

    Raises:
        ConfigError: a seed failed; the message gives the reason.
    """
    first, began = settings.get("first_seed", 0), time.monotonic()
    seeds = range(first, first + (options.seeds or settings["seeds"]))
    file = None if in_pieces else _file(options.pieces)
    asked, writing = _digest(module, settings, options), threading.Lock()
    processes: list[subprocess.Popen[str]] = []
    known = {piece["seed"]: piece["answer"] for piece in resumable_rows.read_pieces(file) if piece["asked"] == asked}

    def answered(seed: int) -> Any:
        if seed in known:
            options.say(f"seed {seed}: measured before, at this commit")
            return known[seed]
        now = options.after(time.monotonic() - began)
        now = now if in_pieces else replace(now, pieces=None, minutes=None)
        answer = _one(module, settings, seed, now, processes.append)
        with writing:
            resumable_rows.append_piece(file, {"seed": seed, "asked": asked, "answer": answer})
        return answer

    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    try:
        asked_for = [pool.submit(answered, seed) for seed in seeds]
        wait(asked_for, return_when=FIRST_EXCEPTION)
        # Seeds that are running when another fails may finish, because their results are stored.
        pool.shutdown(cancel_futures=True)
    except KeyboardInterrupt:  # the seeds' processes may not have received the signal
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()
            process.wait()
        raise
    answers = [each.result() for each in asked_for]  # raises at the failed seed, before any canceled seed
    if file:
        file.unlink(missing_ok=True)  # a new call must measure again
    return answers


def _file(beside: Path | None) -> Path | None:
    """Return the seeds file next to a pieces file, and create its folder; None if the commit is unknown."""
    if beside is None or not measured_commit() or measured_commit().endswith("+"):
        return None
    beside.parent.mkdir(parents=True, exist_ok=True)
    return beside.with_name(beside.name.replace(".pieces.", ".seeds.pieces."))


def _digest(module: str, settings: dict[str, Any], options: BenchOptions) -> str:
    """Return the digest of everything that a seed's result depends on, except its number."""
    asked = [measured_commit(), module, settings, options.form, options.device]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def _one(
    module: str,
    settings: dict[str, Any],
    seed: int,
    options: BenchOptions,
    started: Callable[[subprocess.Popen[str]], None],
) -> Any:
    asked = json.dumps(
        {
            "settings": settings,
            "seed": seed,
            "device": options.device,
            "form": options.form,
            "pieces": str(options.pieces) if options.pieces else None,
            "minutes": options.minutes,
        }
    )
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    started(process)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(asked)
    process.stdin.close()
    for line in process.stdout:
        if line.startswith("{"):
            answer = line
        else:
            options.say(line.rstrip())
    if process.wait():
        raise ConfigError(f"seed {seed}: expected a result, found exit code {process.returncode}; see its error above")
    found = json.loads(answer)
    if "error" in found:
        raise ConfigError(f"seed {seed}: {found['error']}")
    return found["result"]


class SeedProcess(logging.Filter):
    """Logs each message only once, because all federations of a seed report the same overlong rows."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the message is new."""
        text = record.getMessage()
        new = text not in self._said
        self._said.add(text)
        return new


def serve_seed(of_seed: OfSeed) -> None:
    """Compute the result for one seed.

    Reads the settings as JSON from standard input. Writes progress lines, and then the result as one line of JSON.
    """
    warnings = logging.StreamHandler()
    warnings.addFilter(SeedProcess())
    logging.basicConfig(format="%(message)s", handlers=[warnings])
    asked = json.load(sys.stdin)

    def say(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    options = BenchOptions(
        form=asked["form"],
        device=asked["device"],
        say=say,
        pieces=Path(asked["pieces"]) if asked["pieces"] else None,
        minutes=asked["minutes"],
    )
    try:
        answer = {"result": of_seed(asked["settings"], asked["seed"], options)}
    except FedVeilError as error:
        answer = {"error": str(error)}
    say(json.dumps(answer))


if __name__ == "__main__":
    serve_seed(importlib.import_module(sys.argv[1]).of_seed)
