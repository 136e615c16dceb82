"""`fedveil audit`: attacks a run's captured messages, with controls.

The run must have captured its messages (run.capture-messages = true). The auditor needs the examples that the
sites trained on, and examples from the same distribution that none of them had. An attack counts only if it succeeds
on the overfitted control and fails on two others: the untrained control, and the control trained on other examples.
Verdicts are corrected for multiple testing. The result goes to RUN/audit.json, which `fedveil report` shows. Skipped
attacks are listed with the reason. With --minutes, the cheapest attacks run first; --fail-above turns the audit into
a gate.

| exit code | with --fail-above X |
|---|---|
| 0 | every model and upload was attacked, controls hold, and no lower bound is above X; always without the option |
| 1 | a lower bound is above X |
| 2 | an error occurred, and nothing was audited |
| 3 | inconclusive: controls failed, or there was too little time |
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedveil.config import parse
from fedveil.console.runs import audit_output
from fedveil.console.runs.run_reader import load_run
from fedveil.console.terminal import make_console, say
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
        "--site", action="append", default=[], metavar="NAME=FOLDER", help="one site's examples, instead of --data"
    )
    parser.add_argument(
        "--non-members",
        type=Path,
        metavar="FOLDER",
        help="similar examples that no site has (default: those beyond task.examples-per-site, else the test split)",
    )
    parser.add_argument(
        "--max-rows",
        type=int,
        default=300,
        metavar="N",
        help="maximum number of members, and likewise of non-members (default: 300)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed for sampling and the bootstrap (default: 0)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="N",
        help="start no new attack after N minutes; controls are trained regardless (default: no limit)",
    )
    parser.add_argument(
        "--fail-above",
        type=float,
        metavar="X",
        help="exit with code 1 if the figure's lower bound is above X, or 3 if the audit is inconclusive",
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
        help="a site that trained on FOLDER/data from fedveil canaries: adds a lower bound on epsilon",
    )
    parser.add_argument("--device", default="auto", help='"auto", "cpu" or "cuda" (default: auto)')
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Attack the run, print the verdicts and the strongest findings, and write RUN/audit.json."""
    run_view = load_run(args.folder)  # before importing torch, so that a missing run is reported at once
    from fedveil.attacks.audit.runner import audit_run
    from fedveil.attacks.audit.schedule import TimeBudget
    from fedveil.attacks.audit.threshold_gate import LeakageThreshold, decide_gate
    from fedveil.attacks.samples import AuditDataSource

    console = make_console()

    def show_step(text: str) -> None:
        console.print(text, style="dim")

    budget = TimeBudget.of_minutes(args.minutes)
    limit = None if args.fail_above is None else LeakageThreshold(args.fail_above, args.figure)
    if "config" not in run_view.config:
        raise StateError(
            f"{args.folder}: expected the config.json of a run that has started, found none; audit another run"
        )
    source = AuditDataSource(
        args.data, dict(_named("--site", text) for text in args.site), args.non_members, args.max_rows, args.seed
    )
    config = parse(run_view.config["config"])
    planted = None if args.canaries is None else _named("--canaries", args.canaries)
    result, sheet = audit_run(args.folder, config, run_view.sites, source, args.device, show_step, budget, planted)
    audit_output.write_audit(args.folder, result, sheet, console)
    audit_output.print_audit(args.folder, result, run_view.name, console)
    if limit is None:
        return 0
    decision = decide_gate(result, limit)
    say(sanitize(decision.says, 2000))
    return decision.code


def _named(option: str, text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise ConfigError(
            f'{option}: expected NAME=FOLDER, found "{text}"; name a site of the run and the folder of its examples'
        )
    return name, Path(folder)
