"""`fedveil submit`: runs an app on a federation, and stays until its end.

Where no app is named, this installation's own is sent. The exit code says what became of the run, as that of
`fedveil watch` does: 0 completed, 1 failed, 3 stopped, 4 still going after --timeout.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fedveil.config import parse
from fedveil.console.flower.command_line import Flower
from fedveil.console.run_config import overrides
from fedveil.console.runs.ending import until_ended
from fedveil.console.runs.folder import new_lines, status_of
from fedveil.foreign import shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument(
        "app", type=Path, nargs="?", default=None, help="folder of the app; default: this installation's own"
    )
    parser.add_argument("--federation", type=Path, required=True, metavar="FOLDER", help="what fedveil provision made")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the run config; repeatable")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the same from a TOML file; --set goes before it")
    parser.add_argument(
        "--timeout", type=float, default=0.0, metavar="SECONDS", help="how long to wait; default: until it has ended"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The exit code says what became of the run."""
    settings = overrides(args.config, args.set)
    config = parse(settings).run
    flower = Flower(args.federation.absolute() / "server" / "flower")
    number = flower.submit(args.app, settings)
    folder = Path(config.dir).expanduser() / (config.name or f"run-{number}")
    print(f"run {number}: submitted; its folder is {folder}", flush=True)
    read_so_far = 0  # bytes of metrics.jsonl

    def read() -> dict[str, Any]:
        """Its status.json; {} until it has one, and where the run folder is another machine's."""
        nonlocal read_so_far
        file = folder / "flower-run"
        if not file.is_file() or file.read_text() != number or not (folder / "status.json").is_file():
            return {}
        rows, read_so_far = new_lines(folder / "metrics.jsonl", read_so_far)
        for attempt in rows:
            if "cohort" in attempt:  # not the scores before round 0, nor a resume's mark
                print(_said(attempt), flush=True)
        return status_of(folder)

    code, word = until_ended(read, lambda: flower.run_status(number), args.timeout)
    print(word)
    return code


def _said(attempt: dict[str, Any]) -> str:
    failed = "".join(f"; {shown(site, 80)}: {shown(why)}" for site, why in attempt.get("failed", {}).items())
    accepted = f"{len(attempt['accepted'])} of {len(attempt['cohort'])} sites"
    cost = f"{attempt['seconds']:.0f} s, up {attempt['upload_bytes']:,} bytes"
    return f"round {attempt['round']}: {accepted}, {cost}{failed}"
