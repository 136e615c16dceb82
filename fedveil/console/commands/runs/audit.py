"""`fedveil audit`: attacks a run on its own captured messages, with controls.

The run must have captured its messages (run.capture-messages = true). The auditor needs the examples that
the sites trained on, and examples of the same distribution that none of them had. An attack counts only if
it wins against the overfitted control and loses against two others: the untrained control, and the one
trained on other examples. Verdicts are corrected for their number. The result goes to RUN/audit.json, which
`fedveil report` shows. Skipped attacks are listed with the reason. --minutes tries the cheapest attacks
first; --fail-above makes the audit a gate.

| exit code | with --fail-above X |
|---|---|
| 0 | every model and upload was attacked, controls hold, and no lower bound is above X; without the option always |
| 1 | a lower bound is above X |
| 2 | an error: nothing was audited |
| 3 | it cannot tell: controls fail, or the time was too short |
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedveil.config import parse
from fedveil.console.runs import audit_output
from fedveil.console.runs.run_reader import load_run
from fedveil.console.terminal import make_console
from fedveil.errors import ConfigError, StateError
from fedveil.sanitize import sanitize


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run folder: <run.dir>/<run.name>")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="the sites' examples, split as in the run config, sites sorted by name (default: task.data)",
    )
    parser.add_argument(
        "--site", action="append", default=[], metavar="NAME=FOLDER", help="the examples of one site, instead of --data"
    )
    parser.add_argument(
        "--non-members",
        type=Path,
        metavar="FOLDER",
        help="similar examples that no site has (default: those beyond task.examples-per-site, else the split test)",
    )
    parser.add_argument(
        "--max-rows",
        type=int,
        default=300,
        metavar="N",
        help="maximum number of members, and of non-members (default: 300)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed for sampling and the bootstrap (default: 0)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="N",
        help="start no attack after N minutes; controls are trained regardless (default: no limit)",
    )
    parser.add_argument(
        "--fail-above",
        type=float,
        metavar="X",
        help="exit with code 1 if the lower bound of a figure is above X, with 3 if the audit cannot tell",
    )
    parser.add_argument(
        "--figure",
        default="auroc",
        metavar="NAME",
        help="figure for --fail-above: auroc, tpr-at-1, tpr-at-01, epsilon (default: auroc)",
    )
    parser.add_argument(
        "--canaries",
        metavar="NAME=FOLDER",
        help="a site that trained on FOLDER/data of fedveil canaries: adds a lower bound on epsilon",
    )
    parser.add_argument("--device", default="auto", help='"auto", "cpu" or "cuda" (default: auto)')
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Attacks the run, prints the verdicts and the strongest findings, and writes RUN/audit.json."""
    run_view = load_run(args.folder)  # before importing torch, so that a missing run is reported at once
    from fedveil.attacks.audit.runner import audit_run
    from fedveil.attacks.audit.schedule import TimeBudget
    from fedveil.attacks.audit.threshold_gate import LeakageThreshold, decide_gate
    from fedveil.attacks.samples import AuditDataSource

    console = make_console()

    def say(text: str) -> None:
        console.print(text, style="dim")

    budget = TimeBudget.of_minutes(args.minutes)
    limit = None if args.fail_above is None else LeakageThreshold(args.fail_above, args.figure)
    if "config" not in run_view.config:
        raise StateError(
            f"{args.folder}: expected config.json of a run that has started, found none; audit another run"
        )
    source = AuditDataSource(
        args.data, dict(_named("--site", text) for text in args.site), args.non_members, args.max_rows, args.seed
    )
    config = parse(run_view.config["config"])
    planted = None if args.canaries is None else _named("--canaries", args.canaries)
    result, sheet = audit_run(args.folder, config, run_view.sites, source, args.device, say, budget, planted)
    audit_output.write_audit(args.folder, result, sheet, console)
    audit_output.print_audit(args.folder, result, run_view.name, console)
    if limit is None:
        return 0
    decision = decide_gate(result, limit)
    console.print(sanitize(decision.says, 2000), style="bold", soft_wrap=True)
    return decision.code


def _named(option: str, text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise ConfigError(
            f'{option}: expected NAME=FOLDER, found "{text}"; name a site of the run and the folder of its examples'
        )
    return name, Path(folder)
