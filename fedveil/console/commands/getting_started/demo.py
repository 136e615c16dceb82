"""`fedveil demo`: runs methods side by side on this machine, and attacks each one.

It starts one SuperLink and one SuperNode per site, with TLS and node authentication. It writes a report and a chart of
quality, bytes sent, and what an attacker could learn, and leaves no processes behind. With the defaults it takes a few
minutes on two cores. Appending "+secure" to a method adds secure aggregation; "+dp" adds noise with epsilon 8.

    fedveil demo
    fedveil demo --methods fedavg,ffa_lora,fedpara+secure --rounds 6
    fedveil demo --set train.max-steps=40 --set 'method.params="rho = 0.3"' --methods fedrand
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fedveil import config, strategies
from fedveil.console.demo_settings import DATA, DEFENSES, METHODS, ROUNDS, SETTINGS, SITES
from fedveil.console.flower.local_deployment import LocalDeployment, LocalSite, RunOutcome
from fedveil.console.run_config_args import parse_overrides
from fedveil.console.runs import run_reader as runs
from fedveil.console.runs import summary, workers
from fedveil.console.runs.progress_bar import RunProgress
from fedveil.console.terminal import make_console, say
from fedveil.console.web.report import demo_files as left_by
from fedveil.errors import ConfigError, FedVeilError
from fedveil.guard import flower
from fedveil.sanitize import sanitize, suggest_name

if TYPE_CHECKING:
    from fedveil.console.web.report.demo_report import DemoMeasurements

RUN_TIMEOUT = 1800.0
_LEAST_SUMMED = 3  # secure.min-sites, by default
# Keys that `_run_arm` sets, or that would undo its settings, with advice for the user.
_OWN = {
    "method.name": "name methods with --methods",
    "run.dir": "name a folder with --out",
    "run.name": "a run is named after its method; name a folder with --out",
    "run.rounds": "use --rounds",
    "run.resume": "the demo always starts new runs; leave it out",
    "cohort.sites": "use --sites",
    "cohort.min-sites": "the demo's quorum is 2; leave it out",
}


@dataclass(frozen=True)
class DemoRun:
    """One demo run: a method, optionally with a defense."""

    method: str
    defense: str = ""

    @property
    def name(self) -> str:
        """Return the name of the run folder."""
        return f"{self.method}-{self.defense}" if self.defense else self.method

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the run config settings; `given` overrides the defaults."""
        return {"method.name": self.method, **DEFENSES[self.defense], **given}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--methods", default=METHODS, metavar="NAMES", help=f"default: {METHODS}")
    parser.add_argument(
        "--rounds", type=_positive, default=ROUNDS, metavar="N", help=f"rounds per method; default: {ROUNDS}"
    )
    parser.add_argument("--sites", type=_positive, default=SITES, metavar="N", help=f"default: {SITES}")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo"), metavar="FOLDER",
        help="folder for runs, summary and report; default: runs/demo",
    )  # fmt: skip
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="run config override such as train.epochs=2; repeatable",
    )
    parser.add_argument("--keep-logs", action="store_true", help="keep every process's log in FOLDER/logs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run all methods in one federation and attack each run; write the chart, summary.json and report.html."""
    given = parse_overrides(None, args.set)
    arms, settings, noise, notes = _arms(args.methods, args.sites), {**SETTINGS, **given}, dict[str, Any](), list[str]()
    if given:
        _check_keys(settings)
    if given or (args.sites, args.rounds) != (SITES, ROUNDS):
        settings, noise, notes = _planned(arms, given, settings, args.sites, args.rounds)
        _check(arms, settings)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads must not spin on cores that others need
    console, out, started = make_console(), _writable(args.out.absolute()), time.monotonic()
    if old := [arm.name for arm in arms if (out / arm.name / "status.json").is_file()]:
        say(f"This demo replaces an earlier demo's runs in {out}: {', '.join(old)}")
    speaks = flower.installed_release().speaks
    say(f"Starting one SuperLink and {args.sites} SuperNodes: {speaks}, TLS, node authentication")
    for note in notes:
        say(note)
    data = Path(settings.get("task.data", DATA))
    federation = LocalDeployment([LocalSite(f"site-{i}", data) for i in range(args.sites)], guarded=True)
    failed = False
    measured: list[Future[DemoMeasurements]] = []
    # A run is attacked while the next run waits for its processes.
    with _aside(measured) as aside, federation:
        say(f"All {args.sites} sites are online after {time.monotonic() - started:.1f} s")
        if words := _drawn(args.sites, float(settings.get("cohort.fraction", 1.0))):
            say(words)
        left_by.remove_demo_files(out)
        for arm in arms:
            own = {**noise, **settings} if arm.defense == "dp" else settings
            failed = not _run_arm(federation, console, out, arm, args.rounds, own)
            if failed:
                break
            measured.append(aside.submit(_measure, out / arm.name, data, measured[-1:]))
        if args.keep_logs or failed:
            shutil.copytree(federation.processes.logs, out / "logs", dirs_exist_ok=True)
    left = federation.processes.alive()
    _results(console, out, arms, measured)
    names = ", ".join(str(p.pid) for p in left) or "none"
    say(f"Processes left: {names}. Total {time.monotonic() - started:.0f} s.")
    return 1 if failed or left else 0


@contextmanager
def _aside(begun: Sequence[Future[DemoMeasurements]]) -> Iterator[ThreadPoolExecutor]:
    """Provide a thread for the attacks. If the demo is interrupted, print a note, wait for the current attack (which
    cannot be stopped), and start no more."""
    pool = ThreadPoolExecutor(1)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        if any(attack.running() for attack in begun):
            say("The federation has stopped; waiting about a minute for the current attack to finish")
        raise
    finally:
        pool.shutdown()


def _run_arm(
    federation: LocalDeployment, console: Console, out: Path, arm: DemoRun, rounds: int, settings: dict[str, Any]
) -> bool:
    _forget(out / arm.name)
    run = federation.run(
        None,
        {
            **arm.settings(settings),
            "run.dir": str(out),
            "run.name": arm.name,
            "run.rounds": rounds,
            "cohort.sites": len(federation.sites),
            "cohort.min-sites": min(2, len(federation.sites)),
        },
    )
    step_reader = workers.steps_by_and_by([federation.folder / "sites" / name for name in federation.sites])
    with RunProgress(console, out / arm.name, arm.name, rounds, step_reader) as progress:
        ended = federation.wait(run, RUN_TIMEOUT, progress.tick)
    if not ended.completed:
        _explain(federation, run, arm.name, ended, out)
    return ended.completed


def _drawn(sites: int, fraction: float) -> str:
    """Return a note on how many sites each round samples; "" if every round includes all sites."""
    drawn = math.ceil(round(fraction * sites, 9))  # same as federation/aggregation_rules.py, which needs torch
    if drawn == sites:
        return ""
    return (
        f"Each round samples {drawn} of the {sites} sites (cohort.fraction = {fraction:g}), because real federations "
        "rarely have all sites online at once; --set cohort.fraction=1 uses all"
    )


def _explain(federation: LocalDeployment, run: int, method: str, ended: RunOutcome, out: Path) -> None:
    say(f"error: {method} failed: {sanitize(ended.reason)}", file=sys.stderr)
    for site in federation.sites:
        if reason := federation.last_error(site):
            say(f"{site}: {sanitize(reason)}", file=sys.stderr)
    say(f"All logs are in {out / 'logs'}", file=sys.stderr)
    if not federation.status(run).get("reason"):  # otherwise the reason was printed, and the log adds nothing to it
        say("Last lines of the ServerApp's log:", file=sys.stderr)
        say("\n".join(map(sanitize, federation.server_log(run).splitlines())), file=sys.stderr)


def _measure(folder: Path, data: Path, before: list[Future[DemoMeasurements]]) -> DemoMeasurements:
    from fedveil.console.web.report import demo_report  # imports torch, which would delay the start by a second

    return demo_report.measure_runs(folder, data, before[0].result().told if before else None)


def _results(console: Console, out: Path, arms: list[DemoRun], measured: list[Future[DemoMeasurements]]) -> None:
    from fedveil.cards.card import DeclaredFacts
    from fedveil.console.runs import card_update
    from fedveil.console.web.report import demo_report

    demo_runs = [runs.load_run(out / arm.name) for arm in arms if (out / arm.name / "status.json").is_file()]
    demo_runs = [run for run in demo_runs if run.rounds_done]
    if not demo_runs:
        return
    attacked = {}
    for arm, done in zip(arms, measured, strict=False):  # a failed run is not measured
        try:
            if of_run := done.result().attacked:
                attacked[out / arm.name] = of_run
        except FedVeilError as error:  # the trained models are still worth showing
            say(f"{arm.name}: not attacked: {sanitize(error)}")
    demo_report.write_comparisons(attacked)
    for folder in attacked:  # the run wrote its card before the attack
        card_update.rewrite_card(runs.load_run(folder), DeclaredFacts())
    demo_report.write_demo_report(out, demo_runs)
    console.print(summary.summary_table(demo_runs))
    for line in demo_report.summary_sentences(demo_runs):
        say(line)
    picture = out / left_by.PICTURE
    drawn = picture if picture.is_file() else "none, because no attack results could be judged"
    say(f"Picture: {drawn}\nReport:  {out / 'report.html'}")
    say(f"Summary: {out / 'summary.json'}")


def _writable(out: Path) -> Path:
    """Return the folder, creating it if necessary. Raises ConfigError if runs cannot be written to it."""
    problem = ""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = (error.strerror or type(error).__name__).lower()
    if problem or not os.access(out, os.W_OK | os.X_OK):
        raise ConfigError(
            f"--out: expected a writable folder, found {out}: {problem or 'permission denied'}; name another"
        )
    return out


def _forget(folder: Path) -> None:
    """Remove an earlier demo's run folder; any other folder is kept, and the new run then refuses to use it."""
    if (folder / "status.json").is_file():
        shutil.rmtree(folder)


def _arms(text: str, sites: int) -> list[DemoRun]:
    """Return the runs, after checking their names against all methods, without importing any."""
    known = strategies.list_methods()
    parts = [name.strip().partition("+") for name in text.split(",") if name.strip()]
    arms = [DemoRun(method, defense) for method, _, defense in parts]
    wrong = [arm for arm in arms if arm.method not in known or arm.defense not in DEFENSES]
    if not arms or wrong or len(set(arms)) != len(arms):
        defenses = " or ".join(f'"+{name}"' for name in DEFENSES if name)
        near = ""
        if wrong:
            first = wrong[0]
            near = suggest_name(first.method, known) if first.method not in known else ""
            near = near or suggest_name(first.defense, filter(None, DEFENSES))
        raise ConfigError(
            f"--methods: found {sanitize(text, 200)!r}; {near}expected names from {known}, optionally with {defenses}, "
            "each once"
        )
    if sites < _LEAST_SUMMED and any(arm.defense == "secure" for arm in arms):
        raise ConfigError(f"--sites: expected at least {_LEAST_SUMMED} for a method with +secure, found {sites}")
    return arms


def _check_keys(settings: Mapping[str, Any]) -> None:
    if own := [key for key in _OWN if key in settings]:
        raise ConfigError(f"--set {own[0]}: expected a key that the demo does not set itself; {_OWN[own[0]]}")


def _planned(
    arms: Sequence[DemoRun], given: Mapping[str, Any], settings: Mapping[str, Any], sites: int, rounds: int
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return the settings for all arms, the extra noise settings for "+dp" arms, and notes for the user."""
    from fedveil.console import demo_plan  # imports torch, so only if there is something to plan

    has_noise = any(arm.defense == "dp" for arm in arms)
    plan = demo_plan.plan_demo(given, settings, arms[0].method, sites, rounds, has_noise)
    return plan.settings, plan.noise, plan.lines


def _check(arms: list[DemoRun], settings: dict[str, Any]) -> None:
    """Raise an error for anything the ServerApp would refuse, before starting any process."""
    from fedveil import tasks  # imports torch, so only if there is something to check
    from fedveil.privacy.guarantee_source import check_guarantee
    from fedveil.server_app.evaluation import ModelSelection
    from fedveil.training import optimizers
    from fedveil.training.per_example import PerExampleLoss

    for arm in arms:
        parsed = config.parse(arm.settings(settings))
        method = strategies.create_method(arm.method, parsed.method.params)
        task = tasks.load_task(parsed, method.adapter)
        check_guarantee(method, parsed, isinstance(task, PerExampleLoss))
        optimizers.check_optimizer(method, parsed)
        ModelSelection.from_config(parsed, tasks.task_info(parsed.task.name).metrics(parsed.task), method)
        task.examples(Path(parsed.task.data or DATA), "train")
        if parsed.task.evaluation:
            task.examples(Path(parsed.task.evaluation), "test")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, found {text!r}")
    return int(text)
