"""`fedveil privacy`: plans a private run: the noise for an epsilon, or the reverse.

`fedveil privacy plan` reads the run config like `fedveil submit` (--config, --set) and computes the noise for a target
epsilon, or the epsilon that the run's noise gives. Its other options are shortcuts for config keys; an option that
contradicts the config is refused. The last sentence states the epsilon with its unit, relation, delta, sampling,
accountant, and the parties against whom it holds. A finished run's privacy cost is in its report (fedveil report).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedveil import strategies
from fedveil.config import RunConfig, parse, parse_toml
from fedveil.console.run_config_args import parse_overrides
from fedveil.console.runs.sampling_plan import plan_sampling
from fedveil.console.terminal import say
from fedveil.contract.method import Method
from fedveil.contract.privacy import Adjacency, PrivacyGuarantee, SamplingPlan, check_epsilon, stated_guarantee
from fedveil.errors import ConfigError
from fedveil.privacy import accounting
from fedveil.privacy.guarantee_source import as_planned, check_guarantee, guarantee_of
from fedveil.privacy.guarantee_words import GuaranteeWords, describe_guarantee
from fedveil.privacy.privacy_warnings import privacy_warnings

_OF_THE_METHOD = ("sampling", "exchange", "noise_local", "noise_global")  # options that are DP-FPL parameters


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    plan = parser.add_subparsers(metavar="ACTION", required=True).add_parser(
        "plan", help="convert a target epsilon to noise multipliers, or vice versa"
    )
    plan.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="run config override; repeatable")
    plan.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file with run config overrides; --set takes precedence"
    )
    plan.add_argument(
        "--sites",
        type=int,
        nargs="+",
        required=True,
        metavar="EXAMPLES",
        help="each site's number of training examples",
    )
    plan.add_argument(
        "--epsilon",
        type=float,
        metavar="E",
        help="target epsilon; default: compute the epsilon from the run's noise, or, without noise, target dp.epsilon",
    )
    plan.add_argument("--noise-multiplier", type=float, metavar="Z", help="dp.noise-multiplier")
    plan.add_argument(
        "--noise-local",
        type=float,
        metavar="Z",
        help="DP-FPL: z for the private part (noise divided by its clipping bound)",
    )
    plan.add_argument("--noise-global", type=float, metavar="Z", help="DP-FPL: z for the shared part")
    plan.add_argument("--delta", type=float, help="dp.delta, or DP-FPL's")
    plan.add_argument("--rounds", type=int, metavar="N", help="run.rounds")
    plan.add_argument(
        "--steps", type=int, metavar="N", help="noisy steps per participation; default: from train.epochs and max-steps"
    )
    plan.add_argument("--batch", type=int, metavar="N", help="train.batch-size")
    plan.add_argument("--sampling", choices=("poisson", "disjoint", "fixed"), help="DP-FPL: how batches are drawn")
    plan.add_argument("--exchange", choices=("batch", "epoch"), help="DP-FPL: length of a participation")
    plan.add_argument(
        "--honest",
        type=int,
        metavar="H",
        help='noise in the sum (secure.noise = "sum") from H sites, where H = secure.min-sites - secure.max-colluders',
    )
    plan.add_argument("--adjacency", type=Adjacency, choices=list(Adjacency), help="dp.adjacency, or DP-FPL's")
    plan.set_defaults(run=run)


@dataclass(frozen=True)
class _PlannedRun:
    """A run to plan.

    Attributes:
        flat: its config, by dotted key.
        method: its method, with the hyperparameters from the config and the options.
        is_own_noise: whether the method, rather than `dp.*`, adds the noise.
    """

    flat: dict[str, Any]
    method: Method
    is_own_noise: bool

    @property
    def config(self) -> RunConfig:
        """Return the parsed run config."""
        return parse(self.flat)

    def with_noise(self, z: float) -> _PlannedRun:
        """Return the run with noise equivalent to a multiplier of `z` on one release per step."""
        if not self.is_own_noise:
            return replace(self, flat={**self.flat, "dp.noise-multiplier": z})
        if getattr(self.method, "mode", "") != "strict":
            raise ConfigError(
                f'--epsilon: expected a run with dp.*, or DP-FPL in its mode "strict", found {self.flat["method.name"]}'
                "; omit the option to see the epsilon that its own noise gives"
            )
        each = z * math.sqrt(2)  # each step has two releases
        return replace(self, method=replace(self.method, noise_local=each, noise_global=each))  # type: ignore[type-var]

    def claim(self) -> PrivacyGuarantee:
        """Return the guarantee. Raises ConfigError if the run has none."""
        claim = guarantee_of(self.method, self.config)
        if claim is None:
            raise ConfigError("--epsilon: expected a run with noise, found none; set dp.noise-multiplier or --epsilon")
        return as_planned(claim)

    def plan(self, examples: int, steps: int | None) -> SamplingPlan:
        """Return how often the run samples the examples of a site with `examples` examples."""
        noisy = self if self.is_own_noise else self.with_noise(1.0)
        return plan_sampling(noisy.method, noisy.config, noisy.claim().budget.neighbours, examples, steps)


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    planned = _planned_run(args)
    if args.epsilon is not None:
        check_epsilon(args.epsilon)
    plans = [planned.plan(examples, args.steps) for examples in args.sites]
    target, needed = _target(args, planned), [0.0] * len(plans)
    if target is not None:
        needed = list(_needed(planned, plans, target))
        factor = math.sqrt(2) if planned.is_own_noise else 1.0
        configured = planned.config.dp.noise_multiplier
        planned = planned.with_noise(_rounded_up(max(needed) * factor) / factor)
        if 0 < configured < planned.config.dp.noise_multiplier:
            _warn([f"dp.noise-multiplier = {configured:g} in the run config is too low for epsilon {target:g}"])
    config = planned.config
    claim = check_guarantee(planned.method, config, has_row_gradients=True)
    assert claim is not None
    claim = as_planned(claim)
    statements = [
        describe_guarantee(claim, config, claim.privacy_spent(plan), accounting.round_epsilon) for plan in plans
    ]
    _warn(privacy_warnings(claim, args.sites))
    Console(highlight=False).print(_table(planned, plans, needed, statements))
    say(f"{_noise(planned)}, for all sites: {config.run.rounds} rounds")
    most = max(range(len(plans)), key=lambda i: statements[i].epsilon)
    if statements[most].epsilon > claim.budget.epsilon:
        _warn([f"a site's ledger stops this run early, at the run's own limit of {claim.budget.epsilon:g}"])
    say(
        f"In this run alone, for the site with the highest cost ({plans[most].examples:,} examples, in every round): "
        f"{statements[most].sentence}."
    )
    return 0


def _planned_run(args: argparse.Namespace) -> _PlannedRun:
    """Return the run described by the config and the options. Raises ConfigError if they contradict each other."""
    flat = parse_overrides(args.config, args.set)
    for option, key in {"rounds": "run.rounds", "batch": "train.batch-size"}.items():
        _merge(flat, key, getattr(args, option), option)
    if args.honest is not None:
        _merge_honest(flat, args.honest)
    if args.steps is not None and flat.get("train.max-steps", 0) not in (0, args.steps):
        raise ConfigError(
            f"--steps: expected {flat['train.max-steps']}, as train.max-steps in the run config, found {args.steps}; "
            "omit one of the two"
        )
    if (args.noise_local is None) != (args.noise_global is None):
        raise ConfigError("--noise-local: expected it together with --noise-global, found only one; give both")
    if args.noise_local is not None:
        flat.setdefault("method.name", "dp_fpl")  # the only method with noise in two parts
    config = parse(flat)
    method = strategies.create_method(config.method.name, config.method.params)
    if isinstance(method, PrivacyGuarantee) and not any(key.startswith("dp.") for key in flat):
        return _with_own_noise(args, {**flat, "method.name": config.method.name}, config.method.params)
    for option in _OF_THE_METHOD:
        if getattr(args, option) is not None:
            raise ConfigError(
                f"--{option.replace('_', '-')}: expected this option only with --set method.name=dp_fpl, found "
                f"{config.method.name}; dp.* draws Poisson batches and adds noise once per step (dp.noise-multiplier)"
            )
    for option in ("noise_multiplier", "delta", "adjacency"):
        _merge(flat, f"dp.{option.replace('_', '-')}", getattr(args, option), option)
    if args.epsilon is not None and args.noise_multiplier is not None:
        raise ConfigError("--epsilon: expected this option or --noise-multiplier, found both; omit one")
    flat.setdefault("dp.clip-norm", 1.0)  # no epsilon depends on it
    if args.honest is not None or flat.get("secure.noise") == "sum":
        flat.setdefault("train.max-steps", 1)
    parse(flat)
    return _PlannedRun(flat, method, is_own_noise=False)


def _with_own_noise(args: argparse.Namespace, flat: dict[str, Any], params: str) -> _PlannedRun:
    """Return a run whose method adds noise itself. Raises ConfigError for `dp.*` options and for contradictions."""
    name = flat["method.name"]
    if args.noise_multiplier is not None:
        raise ConfigError(
            f"--noise-multiplier: expected --noise-local and --noise-global with {name}, which adds its own noise, "
            "found this option; use those two"
        )
    if args.epsilon is not None and args.noise_local is not None:
        raise ConfigError("--epsilon: expected this option or --noise-local, found both; omit one")
    fields = parse_toml(params, "method.params")
    for option in (*_OF_THE_METHOD, "delta"):
        _merge(fields, option, getattr(args, option), option)
    _merge(fields, "neighbours", None if args.adjacency is None else args.adjacency.value, "adjacency")
    method = strategies.create_from_json(name, json.dumps(fields))
    if getattr(method, "exchange", "epoch") == "batch" and args.steps not in (None, 1):
        raise ConfigError(f'--steps: expected 1 with exchange = "batch", found {args.steps}; use --exchange epoch')
    return _PlannedRun(flat, method, is_own_noise=True)


def _merge(flat: dict[str, Any], key: str, value: Any, option: str) -> None:
    """Set a key to an option's value. Raises ConfigError if the config has a different value."""
    if value is None:
        return
    if key in flat and flat[key] != value:
        raise ConfigError(
            f"--{option.replace('_', '-')}: expected {flat[key]}, as {key} in the run config, found {value}; omit one "
            "of the two"
        )
    flat[key] = value


def _merge_honest(flat: dict[str, Any], honest: int) -> None:
    if honest < 1:
        raise ConfigError(f"--honest: expected at least 1, found {honest}; a sum has the noise of one site or more")
    colluders = flat.get("secure.max-colluders", RunConfig().secure.max_colluders)
    for key, value in (
        ("secure.enabled", True), ("secure.noise", "sum"), ("secure.min-sites", honest + int(colluders)),
    ):  # fmt: skip
        _merge(flat, key, value, "honest")


def _target(args: argparse.Namespace, planned: _PlannedRun) -> float | None:
    """Return the epsilon to compute noise for; None for a run whose noise is given."""
    if args.epsilon is not None or planned.is_own_noise:
        return args.epsilon  # type: ignore[no-any-return]
    dp = planned.config.dp
    if dp.noise_multiplier:
        return None
    if not dp.epsilon:
        raise ConfigError(
            "--epsilon: expected this option, --noise-multiplier, or dp.* in the run config, found none of them; use "
            "one, or --set method.name=dp_fpl"
        )
    return dp.epsilon


def _needed(planned: _PlannedRun, plans: list[SamplingPlan], target: float) -> Iterator[float]:
    """Yield each site's multiplier for one release per step; show progress on a terminal."""
    budget = planned.with_noise(1.0).claim().budget
    with Console(stderr=True).status("") as status:
        for number, plan in enumerate(plans, 1):
            status.update(f"site {number} of {len(plans)}, {plan.examples:,} examples: noise for epsilon {target:g}")
            yield accounting.noise_multiplier_for(
                lambda z, plan=plan: planned.with_noise(z).claim().privacy_spent(plan),  # type: ignore[misc]
                target,
                budget.delta,
                budget.neighbours,
            )


def _table(
    planned: _PlannedRun, plans: list[SamplingPlan], needed: list[float], statements: list[GuaranteeWords]
) -> Table:
    factor, needs = 1.0, "needs dp.noise-multiplier"
    if planned.is_own_noise:
        factor, needs = math.sqrt(2), "needs noise_local = noise_global"
    columns = ["examples", "batch", "steps", *([needs] if any(needed) else []), "epsilon"]
    in_sum = planned.config.secure.noise == "sum"
    table = Table(*columns, *(["against all other parties together"] if in_sum else []))
    for plan, z, words in zip(plans, needed, statements, strict=True):
        values = [words.epsilon, *([_finite(words.parties[-1].epsilon)] if in_sum else [])]
        epsilons = [stated_guarantee(value, words.delta, words.neighbours) for value in values]
        noise = [f"{z * factor:.4f}"] if z else []
        table.add_row(str(plan.examples), str(plan.batch), str(plan.steps), *noise, *epsilons)
    return table


def _noise(planned: _PlannedRun) -> str:
    """Return the run's noise as keys and values."""
    if not planned.is_own_noise:
        return f"dp.noise-multiplier = {planned.config.dp.noise_multiplier:.6g}"
    fields = [(name, getattr(planned.method, name, None)) for name in ("noise_local", "noise_global")]
    return ", ".join(f"{name} = {value:.6g}" for name, value in fields if value is not None) or "the method's own noise"


def _finite(epsilon: float | None) -> float:
    """Return the epsilon, or infinity if it is unknown."""
    return math.inf if epsilon is None else epsilon


def _warn(sentences: list[str]) -> None:
    for sentence in sentences:
        say(f"warning: {sentence}", file=sys.stderr)


def _rounded_up(value: float) -> float:
    """Round up to four decimals, so that the printed value still satisfies the epsilon."""
    return math.ceil(value * 1e4) / 1e4
