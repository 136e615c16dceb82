"""`fedveil privacy`: plans a private run: the noise for an epsilon, or the reverse.

`fedveil privacy plan` computes the noise for a target epsilon, or the epsilon of a given noise. Every
epsilon is shown with its adjacency relation. The privacy cost of a finished run is in its report (fedveil
report).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from fedveil.contract.privacy import UNTIMED, Adjacency, SamplingPlan, check_delta, joint_budget, stated_guarantee
from fedveil.errors import ConfigError
from fedveil.privacy import accounting


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    plan = parser.add_subparsers(metavar="ACTION", required=True).add_parser(
        "plan", help="convert a target epsilon to noise multipliers, or the reverse"
    )
    plan.add_argument(
        "--epsilon",
        type=float,
        metavar="E",
        help="target; if omitted, computed from --noise-multiplier, or --noise-local and --noise-global",
    )
    plan.add_argument(
        "--noise-multiplier",
        type=float,
        metavar="Z",
        help="dp.noise-multiplier of noisy steps, with one release per step",
    )
    plan.add_argument(
        "--noise-local", type=float, metavar="Z", help="z of the private part: noise divided by its clipping bound"
    )
    plan.add_argument("--noise-global", type=float, metavar="Z", help="z of the shared part")
    plan.add_argument("--delta", type=float, default=1e-5, help="delta of the stated epsilon (default: 1e-5)")
    plan.add_argument("--rounds", type=int, required=True, metavar="N", help="run.rounds")
    plan.add_argument("--steps", type=int, default=1, metavar="N", help="noisy steps per participation (default: 1)")
    plan.add_argument("--batch", type=int, required=True, metavar="N", help="train.batch-size")
    plan.add_argument(
        "--sites", type=int, nargs="+", required=True, metavar="ROWS", help="training examples of each site"
    )
    plan.add_argument(
        "--sampling",
        choices=("poisson", "disjoint", "fixed"),
        default="poisson",
        help="how batches are drawn (default: poisson)",
    )
    plan.add_argument("--exchange", choices=("batch", "epoch"), default="batch", help="length of a participation")
    plan.add_argument(
        "--honest",
        type=int,
        metavar="H",
        help='with secure.noise = "sum": secure.min-sites minus secure.max-colluders; adds a second epsilon, '
        "against the server and all other sites together",
    )
    plan.add_argument(
        "--adjacency",
        type=Adjacency,
        choices=list(Adjacency),
        default=Adjacency.REPLACE_ONE,
        help="how neighboring data sets differ (default: replace-one)",
    )
    plan.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the plan."""
    check_delta(args.delta)
    if args.exchange == "batch" and args.steps != 1:
        raise ConfigError(f"--steps: expected 1 with --exchange batch, found {args.steps}; use --exchange epoch")
    if args.honest is not None and (args.honest < 1 or args.steps != 1 or args.sampling == "fixed"):
        raise ConfigError(
            f"--honest: expected at least 1, with --steps 1 and batches that are not fixed, found {args.honest}, "
            f"--steps {args.steps}, {args.sampling}; a second step between two sums would have no noise before it"
        )
    plans = [SamplingPlan(args.rounds, args.steps, args.batch, rows, args.adjacency) for rows in args.sites]
    costs = [_cost(args, plan, 0.0) for plan in plans]
    local, shared = args.noise_local, args.noise_global
    given = [noise is not None for noise in (args.epsilon, args.noise_multiplier, local, shared)]
    if given not in ([True, False, False, False], [False, True, False, False], [False, False, True, True]):
        raise ConfigError(
            "--epsilon: expected this option, --noise-multiplier, or --noise-local with --noise-global, found another "
            "combination"
        )
    if args.noise_multiplier is not None:
        local = shared = args.noise_multiplier * math.sqrt(2)
    needed = [0.0] * len(plans)
    if args.epsilon is not None:
        needed = list(_needed(args, plans, costs))
        local = shared = _rounded_up(max(needed) * math.sqrt(2))  # two releases per step share it
    elif min(local, shared) < 0 or not math.isfinite(local + shared):
        raise ConfigError(f"--noise-local: expected finite numbers of at least 0, found {local} and {shared}")
    seconds = [] if args.honest is None else ["against all others together"]
    title = f"delta {args.delta:g}, {args.adjacency}"
    table = Table("rows", "batch", "needs z (local = global)", "epsilon", *seconds, title=title)
    for plan, cost, z in zip(plans, costs, needed, strict=True):
        own = [_cost(args, plan, 1.0)(_own(args, local, shared)) for _ in seconds]
        figures = [cost(joint_budget(local, shared)), *own]
        guarantees = [
            stated_guarantee(accounting.round_epsilon(c, args.delta, args.adjacency), args.delta, args.adjacency)
            for c in figures
        ]
        needs = f"{z * math.sqrt(2):.4f}" if z else "-"
        table.add_row(str(plan.examples), str(plan.batch), needs, *guarantees)
    console = Console(highlight=False)
    console.print(table)
    multiplier = _rounded_up(joint_budget(local, shared))
    alone = f"; noisy steps, with one release per step: dp.noise-multiplier = {multiplier:.6g}"
    console.print(
        f"noise_local = {local:.6g}, noise_global = {shared:.6g}, for all sites: {args.rounds} rounds of {args.steps} "
        f"steps, {args.sampling} batches{alone if (args.sampling, args.exchange) == ('poisson', 'epoch') else ''}"
    )
    if args.sampling == "poisson":
        console.print(UNTIMED)
    return 0


def _needed(
    args: argparse.Namespace, plans: list[SamplingPlan], costs: list[Callable[[float], Any]]
) -> Iterator[float]:
    """Yield each site's multiplier for one release per step; a terminal shows the progress."""
    with Console(stderr=True).status("") as status:
        for number, (plan, cost) in enumerate(zip(plans, costs, strict=True), 1):
            status.update(
                f"site {number} of {len(plans)}, {plan.examples:,} examples: noise for epsilon {args.epsilon:g}"
            )
            yield accounting.noise_multiplier_for(cost, args.epsilon, args.delta, args.adjacency)


def _cost(args: argparse.Namespace, plan: SamplingPlan, variation: float) -> Callable[[float], Any]:
    """Return the charges by multiplier; `variation` is that of one sum: 0 if it fits into delta, 1 if it may not."""

    def charges(z: float) -> Any:
        cost = accounting.max_charged(z, args.sampling, plan, args.exchange == "batch")
        return cost if args.honest is None else accounting.epsilon_in_sum(cost, {}, (variation, 1.0))

    return charges


def _own(args: argparse.Namespace, local: float, shared: float) -> float:
    """Return the multiplier of a site's own share of the noise; noise given as a multiplier is shared out entirely."""
    root = math.sqrt(args.honest)
    return (
        joint_budget(local, shared) / root if args.noise_multiplier is not None else joint_budget(local, shared / root)
    )


def _rounded_up(value: float) -> float:
    """Round up to four decimals, so that the printed value still satisfies the epsilon."""
    return math.ceil(value * 1e4) / 1e4
