"""`fedveil privacy plan`: how much noise a wished epsilon takes, and what epsilon given noise is worth.

The relation stands beside every epsilon. What a finished run cost its sites is in its report (`statements`).
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from fedveil.console.runs.folder import Run
from fedveil.contract.budget import Neighbours, Plan, check_delta, joint, stated
from fedveil.errors import ConfigError


def add_parser(sub: Any) -> None:
    """Adds the sub-command."""
    parser = sub.add_parser("privacy", help="plan the noise of a private run")
    plan = parser.add_subparsers(metavar="ACTION", required=True).add_parser(
        "plan", help="from a wished epsilon to noise multipliers, and back"
    )
    plan.add_argument(
        "--epsilon", type=float, help="wished; without it, what --noise, or --noise-local and --noise-global are worth"
    )
    plan.add_argument("--noise", type=float, help="z of dp.noise, which has one release a step")
    plan.add_argument("--noise-local", type=float, help="z of the private part: noise over its clipping bound")
    plan.add_argument("--noise-global", type=float, help="z of the shared part")
    plan.add_argument("--delta", type=float, default=1e-5)
    plan.add_argument("--rounds", type=int, required=True)
    plan.add_argument("--steps", type=int, default=1, help="noisy steps a participation (default: 1)")
    plan.add_argument("--batch", type=int, required=True, help="train.batch-size")
    plan.add_argument("--sites", type=int, nargs="+", required=True, metavar="ROWS", help="training rows of each site")
    plan.add_argument("--sampling", choices=("poisson", "disjoint", "fixed"), default="poisson")
    plan.add_argument("--exchange", choices=("batch", "epoch"), default="batch", help="what a participation is")
    plan.add_argument("--neighbours", type=Neighbours, choices=list(Neighbours), default=Neighbours.REPLACE_ONE)
    plan.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the plan."""
    from rich.console import Console
    from rich.table import Table

    from fedveil.privacy import accounting

    check_delta(args.delta)
    if args.exchange == "batch" and args.steps != 1:
        raise ConfigError(f"--steps: expected 1 with --exchange batch, found {args.steps}; use --exchange epoch")
    plans = [Plan(args.rounds, args.steps, args.batch, rows, args.neighbours) for rows in args.sites]
    costs = [_cost(args, plan) for plan in plans]
    local, shared = args.noise_local, args.noise_global
    given = [noise is not None for noise in (args.epsilon, args.noise, local, shared)]
    if given not in ([True, False, False, False], [False, True, False, False], [False, False, True, True]):
        raise ConfigError(
            "--epsilon: expected it, or --noise, or both --noise-local and --noise-global, found another choice of them"
        )
    if args.noise is not None:
        local = shared = args.noise * math.sqrt(2)
    needed = [0.0] * len(plans)
    if args.epsilon is not None:
        needed = [accounting.multiplier_for(c, args.epsilon, args.delta, args.neighbours) for c in costs]
        local = shared = _rounded_up(max(needed) * math.sqrt(2))  # two releases a step share it
    elif min(local, shared) < 0 or not math.isfinite(local + shared):
        raise ConfigError(f"--noise-local: expected finite numbers of at least 0, found {local} and {shared}")
    table = Table(
        "rows", "batch", "needs z (local = global)", "epsilon", title=f"delta {args.delta:g}, {args.neighbours}"
    )
    for plan, cost, z in zip(plans, costs, needed, strict=True):
        found = accounting.epsilon(cost(joint(local, shared)), args.delta, args.neighbours)
        needs = f"{z * math.sqrt(2):.4f}" if z else "-"
        table.add_row(str(plan.examples), str(plan.batch), needs, stated(found, args.delta, args.neighbours))
    console = Console(highlight=False)
    console.print(table)
    alone = f"; noisy steps, with one release a step: dp.noise = {_rounded_up(joint(local, shared)):.6g}"
    console.print(
        f"noise_local = {local:.6g}, noise_global = {shared:.6g}, for all sites: {args.rounds} rounds of {args.steps} steps, "
        f"{args.sampling} batches{alone if (args.sampling, args.exchange) == ('poisson', 'epoch') else ''}"
    )
    return 0


def _cost(args: argparse.Namespace, plan: Plan) -> Callable[[float], Any]:
    from fedveil.privacy import accounting

    return lambda z: accounting.spent(z, args.sampling, plan, args.exchange == "batch")


def _rounded_up(value: float) -> float:
    """To four decimals, never down: what is printed must keep the epsilon."""
    return math.ceil(value * 1e4) / 1e4


def statements(run: Run) -> list[str]:
    """What the run cost the records of each site at most, by itself: a sentence a site, from the run folder alone."""
    if "method" not in run.config:
        return []
    from fedveil import strategies
    from fedveil.config import parse
    from fedveil.privacy import accounting
    from fedveil.privacy.dp_sgd import DpSgd, claim_of

    config = run.config["config"]
    try:
        method = strategies.create_from_json(run.method, json.dumps(run.config["method"]["fields"]))
    except ConfigError as error:  # a run of another version; the rest of its report is worth having
        return [f"Not known: this version cannot make the run's method ({error}). Take epsilon for infinite."]
    claim = claim_of(method, DpSgd.of(parse(config).dp))
    if claim is None:
        return ["The run makes no claim of differential privacy: epsilon infinite."]
    budget = claim.budget
    if config["run.deterministic"]:
        return ["Not private: seeded noise (run.deterministic = true). Epsilon infinite."]
    nominal = "" if budget.nominal is None else f" The nominal epsilon was {budget.nominal:g}; the honest one follows."
    trusted = (
        " It holds against everyone but the server, which saw the sums without noise." if budget.server_trusted else ""
    )
    sentences = [f"{run.method}: a Gaussian mechanism for every single row.{nominal}{trusted}"]
    for site in run.sites:
        asked = [int(a["round"]) for a in run.attempts if site in a.get("cohort", [])]
        reports = [a["reports"][site] for a in run.attempts if site in a.get("reports", {})]
        if not reports:
            sentences.append(
                f"{site}: no accepted upload, so its number of rows is not known here; its own ledger tells."
            )
            continue
        rows, steps = int(min(r["num_examples"] for r in reports)), int(max(r["steps"] for r in reports))
        # Every round up to the last: with an epoch cut over rounds a site that skips some meets more epochs.
        plan = Plan(max(asked) + 1, max(steps, 1), int(config["train.batch-size"]), rows, budget.neighbours)
        once = Plan(1, plan.steps, plan.batch, rows, budget.neighbours)
        charges = Counter(dict(claim.privacy_spent(plan)))
        for _ in range(len(asked) - len(set(asked))):
            charges.update(dict(claim.privacy_spent(once)))
        found = stated(accounting.epsilon(charges, budget.delta, budget.neighbours), budget.delta, budget.neighbours)
        sentences.append(
            f"{site}: {rows} rows, {len(asked)} participations of {steps} steps: at most {found}, this run alone."
        )
    return sentences
