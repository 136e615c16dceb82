"""`fedveil watch RUN`: shows a run until it has ended, and ends with what became of it. `flwr run --stream` returns 0 always.

| exit code | the run |
|---|---|
| 0 | completed |
| 1 | failed, or its ServerApp ended without a word |
| 2 | cannot be watched: wrong arguments, the SuperLink does not answer |
| 3 | was stopped |
| 4 | was still going after --timeout |
| 130 | is still going: Ctrl-C |
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.errors import ConfigError

if TYPE_CHECKING:
    from fedveil.console.flower.command_line import Flower

_POLL_SECONDS = 0.5
_ASK_SECONDS = 10.0  # a question to Flower costs a CPU-second
_BY_FLOWER = {"finished:completed": 0, "finished:failed": 1, "finished:stopped": 3}


def add_parser(sub: Any) -> None:
    """Adds the sub-command."""
    parser = sub.add_parser("watch", help="follow a run to its end; the exit code is what became of it")
    parser.add_argument("run_", metavar="RUN", help="a run folder, or the number that flwr run printed")
    parser.add_argument(
        "--federation", type=Path, metavar="FOLDER", help="what fedveil provision made: to ask Flower too"
    )
    parser.add_argument("--flower-home", type=Path, metavar="FOLDER", help="or the FLWR_HOME with config.toml")
    parser.add_argument("--connection", default="", help="its connection; default: that of fedveil provision")
    parser.add_argument("--timeout", type=float, default=0.0, help="seconds; 0 = until it has ended")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Until the run has ended."""
    from fedveil.console.flower.local_federation import CONNECTION

    folder = Path(args.run_)
    number = args.run_ if args.run_.isdecimal() and not folder.exists() else ""
    home = args.flower_home or (args.federation and args.federation.absolute() / "server" / "flower")
    flower: Flower | None = None
    if home:
        from fedveil.console.flower.command_line import Flower

        flower = Flower(home, args.connection or CONNECTION)
    if number and flower is None:
        raise ConfigError("RUN: a number needs --federation or --flower-home to ask Flower, found neither; name one")
    if not number and not folder.is_dir():
        raise ConfigError(
            f"RUN: expected a run folder or a number, found neither at {folder}; fedveil status lists runs"
        )
    code, word = _watched(args, folder, number, flower)
    print(word)
    return code


def _watched(args: argparse.Namespace, folder: Path, number: str, flower: Flower | None) -> tuple[int, str]:
    if number and flower is not None:
        return until_ended(dict, lambda: flower.run_status(number), args.timeout)
    from rich.console import Console

    from fedveil.console.runs.folder import load
    from fedveil.console.runs.progress import RunProgress

    shown = Console(highlight=False)
    with RunProgress(shown, folder, folder.name, int(load(folder).status.get("rounds", 1))) as progress:

        def read() -> dict[str, Any]:
            status = load(folder).status
            progress.tick(status)
            return status

        def ask() -> str:
            file = folder / "flower-run"
            return flower.run_status(file.read_text().strip()) if flower is not None and file.is_file() else ""

        return until_ended(read, ask, args.timeout)


def until_ended(
    read: Callable[[], dict[str, Any]],
    ask: Callable[[], str],
    timeout: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[int, str]:
    """The exit code, and why in words.

    Args:
        read: status.json, {} where there is none.
        ask: what Flower says of the run, "" where it cannot be asked.
        timeout: seconds; 0 = none.
    """
    started, asked = clock(), clock() - _ASK_SECONDS
    status: dict[str, Any] = {}
    while True:
        status = read()
        if (state := status.get("state")) in ("completed", "failed"):
            return int(state == "failed"), f"{state} {status.get('reason') or ''}".strip()
        if clock() - asked >= _ASK_SECONDS:
            said, asked = ask(), clock()
            if said.startswith("finished"):
                status = read()  # its last word may have come in between
                if status.get("state") in ("completed", "failed"):
                    continue
                if status and said == "finished:completed":
                    return 1, "failed: Flower has finished it, and its own status.json does not say that it completed"
                return _BY_FLOWER.get(
                    said, 1
                ), f"{said.partition(':')[2]}: so says Flower; flwr log has what it printed"
        if timeout and clock() - started >= timeout:
            return 4, f"still going after {timeout:g} s: {status or 'no status yet'}"
        sleep(_POLL_SECONDS)
