"""`fedveil demo`: runs methods side by side on this machine, on real text.

One SuperLink and a SuperNode for each site, over gRPC with TLS and node authentication. It ends with a table and a
report, and leaves no process behind. With the defaults it takes some minutes on two cores.

    fedveil demo
    fedveil demo --methods fedavg,fedrand,fedpara --rounds 6
    fedveil demo --set train.max-steps=40 --set 'method.fields="rho = 0.3"' --methods fedrand
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from fedveil import config, places
from fedveil.console.flower.local_federation import Ended, LocalFederation, LocalSite
from fedveil.console.run_config import overrides
from fedveil.console.runs import folder as runs
from fedveil.console.runs import summary
from fedveil.console.runs.progress import RunProgress
from fedveil.console.terminal import terminal
from fedveil.errors import ConfigError
from fedveil.foreign import shown

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("--methods", default="fedavg,fedrand", metavar="NAMES", help="default: fedavg,fedrand")
    parser.add_argument("--rounds", type=_positive, default=4, metavar="N", help="of each method; default: 4")
    parser.add_argument("--sites", type=_positive, default=4, metavar="N", help="default: 4")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo"), metavar="FOLDER",
        help="for the runs, the summary and the report; default: runs/demo",
    )  # fmt: skip
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of the run config, as train.epochs=2; repeatable",
    )
    parser.add_argument("--keep-logs", action="store_true", help="keep every process's log in FOLDER/logs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """One federation, one run a method; then a table, summary.json and report.html."""
    methods, settings = _methods(args.methods), SETTINGS | overrides(None, args.set)
    if args.set:
        _check(methods, settings)
    console, out, started = terminal(), args.out.absolute(), time.monotonic()
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
    print(f"error: {method} failed: {shown(ended.reason)}", file=sys.stderr)
    for site in federation.sites:
        if reason := federation.last_error(site):
            print(f"{site}: {shown(reason)}", file=sys.stderr)
    print(f"The ServerApp's last lines (every log is in {out / 'logs'}):", file=sys.stderr)
    print("\n".join(map(shown, federation.server_log(run).splitlines())), file=sys.stderr)


def _results(console: Console, out: Path, methods: list[str]) -> None:
    from fedveil.console.report import run_page  # needs torch, which takes a second that the start shall not wait for

    found = [runs.load(out / method) for method in methods if (out / method / "status.json").is_file()]
    if not found:
        return
    summary.write(out / "summary.json", "demo", found)
    run_page.write(out / "report.html", found)
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
    from fedveil import strategies, tasks  # torch, only where there is something to check

    for method in methods:
        parsed = config.parse(settings | {"method.name": method})
        task = tasks.load(parsed, strategies.create(method, parsed.method.fields).adapter)
        task.examples(Path(parsed.task.data or DATA), "train")
        task.examples(Path(parsed.task.evaluation), "test")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, found {text!r}")
    return int(text)
