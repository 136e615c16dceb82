"""Each seed of a preset in a process of its own, with one thread, as many at a time as there are cores.

A process runs `python -m fedveil_bench.common.seeds MODULE` and calls `of_seed(settings, seed, options)` of
MODULE.

What a seed answered is kept in `<result>.seeds.pieces.jsonl` until all have, so that a run that was cut off goes on
from there. Only an answer of the same commit, settings, form and device is taken; one of changed files never is kept.
A module whose seeds are in pieces themselves keeps those instead, and its seeds answer with what there is in time.
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
from fedveil.records.provenance import git_commit
from fedveil_bench.common import resumable_rows
from fedveil_bench.runner import BenchOptions

OfSeed = Callable[[dict[str, Any], int, BenchOptions], Any]


def run_seeds(module: str, settings: dict[str, Any], options: BenchOptions, in_pieces: bool = False) -> list[Any]:
    """Return the JSON results of `of_seed` of `module` for each seed, in order, counted from `first_seed`.

    With `in_pieces` it gets the file of pieces and the minutes that are left, and keeps its pieces there.

    An interrupt ends the seeds' processes.

    Raises:
        ConfigError: a seed that failed, with its reason.
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
        pool.shutdown(cancel_futures=True)  # those that run go on where another has failed: what they answer is kept
    except KeyboardInterrupt:  # no signal reaches their processes where this one alone got it
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()
            process.wait()
        raise
    answers = [each.result() for each in asked_for]  # one that was cancelled stands behind the one that failed
    if file:
        file.unlink(missing_ok=True)  # whoever asks again wants it measured again
    return answers


def _file(beside: Path | None) -> Path | None:
    """The file of seeds beside a file of pieces, in a folder that is there; None where no commit says what ran."""
    if beside is None or not git_commit() or git_commit().endswith("+"):
        return None
    beside.parent.mkdir(parents=True, exist_ok=True)
    return beside.with_name(beside.name.replace(".pieces.", ".seeds.pieces."))


def _digest(module: str, settings: dict[str, Any], options: BenchOptions) -> str:
    """Return the digest of all that a seed's answer depends on except its number."""
    asked = [git_commit(), module, settings, options.form, options.device]
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
    """Lets each text through once: every federation of a seed says of the same rows that they are too long."""

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
    """Answers for one seed.

    It reads settings as JSON on standard input. It writes lines of progress, and then the result as one line of JSON.
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
