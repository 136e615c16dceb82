"""`fedveil stop`: stops a run; it can be resumed later.

The server ends the run and contacts its sites no more. What is done stays: the run folder with its last checkpoint,
and at each site the private state, the logs and the privacy charges. Nothing is refunded. Uploads on their way are
discarded.

| exit code | meaning |
|---|---|
| 0 | the run is stopped |
| 1 | it ended by itself in the meantime |
| 2 | nothing was stopped: wrong arguments, the run has ended already, or the server does not answer |
| 4 | the server has stopped the run, but its ServerApp still runs after --timeout |
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from fedveil.console.runs.run_follower import until_ended, wait_for_sites
from fedveil.console.runs.run_lookup import add_run_arguments, find_run, flower_run
from fedveil.console.runs.run_reader import status_of
from fedveil.console.terminal import say
from fedveil.errors import ConfigError, StateError
from fedveil.sanitize import sanitize

_ENDED = ("completed", "failed", "stopped")
SITES_KEEP = (
    "Sites keep what they have: private state, logs and privacy charges, of which none is refunded. A client round in "
    "progress may still end at its site; its upload is discarded. To delete a run's state at a site: fedveil site purge"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_run_arguments(parser)
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long to wait for the ServerApp to end; default: 60",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Stop the run through the server's control port; wait until it has ended."""
    named = find_run(args)
    folder = named.find_folder()
    if folder is not None:
        _require_unfinished(folder)
    number = named.number or (flower_run(folder) if folder else "")
    if not number:
        raise StateError(
            f"RUN: expected Flower's run ID in {folder}/flower-run, found none; name the run by its number, which "
            "flwr ls lists"
        )
    if named.flower is None:
        raise ConfigError("RUN: stopping a run needs --federation or --flower-home, found neither; name one")
    said = named.flower.run_status(number)
    if said.startswith("finished"):
        raise StateError(f"RUN: expected a run that has not ended, found {sanitize(said, 40)} for run {number}")
    try:
        named.flower.stop(number)
    except KeyboardInterrupt:
        ls = named.flower.by_hand("ls")
        raise KeyboardInterrupt(f"the run may have been stopped; list runs with: {ls}") from None
    say(f"run {number}: the server has stopped it", flush=True)
    try:
        code = _wait(folder, args) if folder else 0
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the server has stopped the run; only the waiting was interrupted") from None
    say(SITES_KEEP)
    return code


def _require_unfinished(folder: Path) -> None:
    state = status_of(folder).get("state")
    if state in _ENDED:
        raise StateError(f"RUN: expected a run that has not ended, found that {folder} has {_words(str(state))}")


def _words(state: str) -> str:
    return {"completed": "completed", "failed": "failed", "stopped": "been stopped"}[state]


def _wait(folder: Path, args: argparse.Namespace) -> int:
    """Wait for the ServerApp to write how the run ended, or to end without a word; return the exit code."""

    def ask() -> str:
        return "finished:stopped" if status_of(folder).get("state") == "died" else ""

    code, words = until_ended(lambda: status_of(folder), ask, args.timeout)
    words = wait_for_sites(words, args.federation.absolute()) if args.federation else words
    say(f"{sanitize(folder.name, 80)}: {words}", mark=words.partition(":")[0], verdict="warn" if code == 3 else "fail")
    if code == 4:
        say(f"its ServerApp has not ended yet; see it with: fedveil status {shlex.quote(str(folder.parent))}")
    return {3: 0, 4: 4}.get(code, 1)
