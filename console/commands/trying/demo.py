"""`fedveil demo`: methods side by side on real text, over gRPC with TLS and node authentication, on this machine."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil import places
from fedveil.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from fedveil.console.flower.local_federation import Ended, LocalFederation

DATA = places.folder("data/e2e")
RUN_TIMEOUT = 1800.0
# Small enough for two cores, long enough for the curves to show learning.
SETTINGS: dict[str, Any] = {
    "task.evaluation": str(DATA),
    "train.batch-size": 8,
    "train.learning-rate": 3e-3,
    "train.max-steps": 20,
    "cohort.fraction": 0.75,
    "evaluate.max-examples": 40,
}


def add_parser(sub: Any) -> None:
    """Adds the sub-command."""
    parser = sub.add_parser("demo", help="run a real federation on this machine, end with a table and a report")
    parser.add_argument("--rounds", type=_positive, default=4)
    parser.add_argument("--sites", type=_positive, default=4)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for runs, summary and report")
    parser.add_argument("--methods", default="fedavg,fedrand", help="names with commas between them")
    parser.add_argument("--set", type=_setting, action="append", default=[], metavar="KEY=VALUE", help="run config")
    parser.add_argument("--keep-logs", action="store_true", help="keep every process's log in OUT/logs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """One federation, one run a method; then a table, summary.json and report.html."""
    from rich.console import Console

    from fedveil.console.flower.local_federation import LocalFederation, LocalSite

    methods, settings = _methods(args.methods), SETTINGS | dict(args.set)
    if args.set:
        _check(methods, settings)
    console, out, started = Console(highlight=False), args.out.absolute(), time.monotonic()
    console.print(f"Starting one SuperLink and {args.sites} SuperNodes: gRPC, TLS, node authentication")
    data = Path(settings.get("task.data", DATA))
    federation = LocalFederation([LocalSite(f"site-{i}", data) for i in range(args.sites)])
    failed = False
    with federation:
        console.print(f"All {args.sites} sites online after {time.monotonic() - started:.1f} s")
        for method in methods:
            failed = not _run_method(federation, console, out, method, args.rounds, settings)
            if failed:
                break
        if args.keep_logs or failed:
            shutil.copytree(federation.processes.logs, out / "logs", dirs_exist_ok=True)
    left = federation.processes.alive()
    _results(console, out, methods)
    console.print(f"Processes left: {', '.join(str(p.pid) for p in left) or 'none'}.", end=" ")
    console.print(f"Total {time.monotonic() - started:.0f} s.")
    return 1 if failed or left else 0


def _run_method(
    federation: LocalFederation, console: Console, out: Path, method: str, rounds: int, settings: dict[str, Any]
) -> bool:
    from fedveil.console.runs.progress import RunProgress

    _forget(out / method)
    run = federation.run(
        None,
        {
            "method.name": method,
            **settings,
            "run.dir": str(out),
            "run.name": method,
            "run.rounds": rounds,
            "cohort.sites": len(federation.sites),
            "cohort.min-sites": min(2, len(federation.sites)),
        },
    )
    with RunProgress(console, out / method, method, rounds) as progress:
        ended = federation.wait(run, RUN_TIMEOUT, progress.tick)
    if not ended.completed:
        _explain(federation, run, method, ended, out)
    return ended.completed


def _explain(federation: LocalFederation, run: int, method: str, ended: Ended, out: Path) -> None:
    print(f"error: {method} failed: {ended.reason}", file=sys.stderr)
    for site in federation.sites:
        if reason := federation.last_error(site):
            print(f"{site}: {reason}", file=sys.stderr)
    print(f"The ServerApp's last lines (every log is in {out / 'logs'}):", file=sys.stderr)
    print(federation.server_log(run), file=sys.stderr)


def _results(console: Console, out: Path, methods: list[str]) -> None:
    from fedveil.console.commands.running import report
    from fedveil.console.runs import folder as runs
    from fedveil.console.runs import summary

    found = [runs.load(out / method) for method in methods if (out / method / "status.json").is_file()]
    if not found:
        return
    summary.write(out / "summary.json", "demo", found)
    report.write(out / "report.html", found)
    console.print(summary.table(found))
    console.print(f"Summary: {out / 'summary.json'}\nReport:  {out / 'report.html'}", soft_wrap=True)


def _forget(folder: Path) -> None:
    """Removes what an earlier demo left; a folder that is not a run's is left alone, and the run then refuses it."""
    if (folder / "status.json").is_file():
        shutil.rmtree(folder)


def _methods(text: str) -> list[str]:
    """The names, checked against the files of strategies/ without importing them."""
    known = sorted(f.stem for f in places.folder("strategies").glob("*.py") if f.stem != "__init__")
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found or set(found) - set(known) or len(set(found)) != len(found):
        raise ConfigError(f"--methods: expected names out of {known}, each once, found {text!r}")
    return found


def _check(methods: list[str], settings: dict[str, Any]) -> None:
    """What the ServerApp would refuse, refused before anything is started."""
    from fedveil import config, strategies, tasks

    for method in methods:
        parsed = config.parse(settings | {"method.name": method})
        task = tasks.load(parsed, strategies.create(method, parsed.method.fields).adapter)
        task.examples(Path(parsed.task.evaluation), "test")


def _setting(text: str) -> tuple[str, Any]:
    """KEY=VALUE with a TOML value; a value that is none is taken as text."""
    key, _, value = text.partition("=")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, found {number}")
    return number
