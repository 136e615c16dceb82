"""`fedveil explain`: shows what a run would send from here before it starts.

It lists the fields sent, bytes, frequency and epsilon, and whether this site's policy permits the run. The
exit code is 1 if the policy forbids it.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from fedveil import strategies, tasks
from fedveil.client_app.policy import decisions, run_config_rules
from fedveil.client_app.policy import site_policy as policies
from fedveil.config import RunConfig, parse
from fedveil.console.doctor.policy_checks import privacy_limits_warnings
from fedveil.console.doctor.run_refusals import list_run_refusals, read_policy, verify_bundle
from fedveil.console.run_config_args import parse_overrides
from fedveil.console.runs.sampling_plan import plan_sampling
from fedveil.console.runs.secagg_preview import MaskedUploadPreview
from fedveil.console.runs.site_requirements import site_requirements
from fedveil.console.terminal import say
from fedveil.contract import held_out_report, row_counts
from fedveil.contract.layout import Direction
from fedveil.contract.method import TRAINING_FIELDS
from fedveil.contract.privacy import PrivacyGuarantee
from fedveil.errors import ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.secagg.adversary_model import server_learns
from fedveil.privacy import accounting
from fedveil.privacy.distributed_dgauss import DistributedDiscreteGaussian
from fedveil.privacy.guarantee_source import as_planned, guarantee_of, untimed
from fedveil.privacy.guarantee_words import describe_guarantee
from fedveil.privacy.own_share import WITHOUT_ROSTER, OwnShareGuarantee, charged_guarantee
from fedveil.privacy.privacy_warnings import privacy_warnings
from fedveil.privacy.server_side_bound import promised_epsilon
from fedveil.records import disclosure_summary
from fedveil.sanitize import sanitize
from fedveil.training import optimizers
from fedveil.training.held_out import RECEIVED_LOSS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help='run config override, such as --set method.name="fedrand"; repeatable',
    )
    parser.add_argument("--config", type=Path, help="TOML file with the run config, as for flwr run -c")
    parser.add_argument("--policy", type=Path, help="check whether this site policy permits the run")
    parser.add_argument("--app", type=Path, default=None, help="the app that would run, if the policy lists digests")
    parser.add_argument("--delta", type=float, help="delta of the stated epsilon; only the run's own is accepted")
    parser.add_argument(
        "--examples",
        type=int,
        metavar="N",
        help="number of training examples at this site: adds the epsilon that the noise gives",
    )
    parser.add_argument(
        "--sites",
        type=int,
        default=0,
        metavar="N",
        help="participating sites, for secure.enabled; default: the minimum",
    )
    parser.add_argument(
        "--permits",
        action="store_true",
        help="print only what a site policy needs for this run: [permits], and a comment with the keys to put above it",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Return 0, or 1 if the policy forbids the run."""
    config = parse(parse_overrides(args.config, args.set))
    method = strategies.create_method(config.method.name, config.method.params)
    if args.permits:
        print(run_config_rules.permits_for_run(config))
        return 0
    optimizers.check_optimizer(method, config)
    policy = None if args.policy is None else read_policy(args.policy)
    say(f"Reading {sanitize(config.task.model)} to find its trained tensors", file=sys.stderr, flush=True)
    task = tasks.load_task(config, method.adapter, "cpu")
    exchange = MessageExchange(method, config.method.name, task.spec)
    masked = MaskedUploadPreview.from_exchange(exchange, config, args.sites) if config.secure.enabled else None
    claim = guarantee_of(method, config)
    _require_own_delta(args.delta, claim)
    lines = [*explain_run(exchange, config, masked, policy, args.examples), *_scores(config, policy)]
    say("\n".join(sanitize(line, 4000) for line in lines))
    known = [args.examples or (policy.min_examples if policy and policy.min_examples else 0)]
    for warning in [*privacy_warnings(claim, known), *(privacy_limits_warnings(policy) if policy else [])]:
        say(f"Warning: {sanitize(warning, 1000)}.")
    if policy is None:
        return 0
    largest = masked.bytes if masked else exchange.largest("up")
    bundle = decisions.VerifiedBundle()
    if policy.app_digests is not None or policy.signers is not None or config.task.module:
        bundle = verify_bundle(args.app, config)
    if refusals := list_run_refusals(args.policy, bundle, exchange, config, largest):
        say(f"\nThis site's policy FORBIDS it: {sanitize(refusals[0], 2000)}")
        for further in refusals[1:]:
            say(f"and: {sanitize(further, 2000)}")
        return 1
    say(f"\nThis site's policy permits it: {args.policy}")
    return 0


def explain_run(
    exchange: MessageExchange,
    config: RunConfig,
    masked: MaskedUploadPreview | None = None,
    policy: policies.SitePolicy | None = None,
    examples: int | None = None,
) -> list[str]:
    """Explain the run in plain words, as lines.

    Args:
        policy: None explains the run for a site without a policy.
        examples: the site's number of training examples; None omits the epsilon that the noise gives.
    """
    rounds, share = config.run.rounds, config.cohort.fraction
    often = "in every round" if share == 1 else f"in about {100 * share:g} % of rounds"
    lines = [
        f"{exchange.name} on {config.task.name}, base model {config.task.model}: {rounds} rounds, this site {often}.",
        "",
        *(masked.words(site_requirements(policy)) if masked else _in_the_clear(exchange, policy)),
        "This site would receive:",
        *_variants(exchange, "down"),
        "",
        f"Over the whole run, at most {rounds * (masked.bytes if masked else exchange.largest('up')):,} bytes of "
        "fields leave this site.",
        "Examples, prepared examples and the method's private state stay in this site's own folders.",
    ]
    lines += _epsilon(exchange, config, policy, examples)
    words = disclosure_summary.what_is_learned(exchange.name)
    return [
        *lines,
        "",
        *(disclosure_summary.what_is_learned_in_sum(words, server_learns(masked.partial)) if masked else words),
    ]


def _epsilon(
    exchange: MessageExchange, config: RunConfig, policy: policies.SitePolicy | None, examples: int | None
) -> list[str]:
    """Explain the run's limit on each example's privacy loss, and the epsilon that its noise gives for `examples`."""
    claim = guarantee_of(exchange.method, config)
    if config.run.deterministic:
        return ["Epsilon: not private: seeded noise (run.deterministic)."]
    if claim is None:
        return ["Epsilon: infinite. Its method adds no noise, so this run gives no differential-privacy guarantee."]
    budget, lines = claim.budget, []
    epsilon = promised_epsilon(exchange.method, config, budget.delta)
    if budget.server_trusted:
        lines.append(
            f"Epsilon: infinite at delta = {budget.delta:g} against the server, which gets values without noise."
        )
    elif math.isinf(epsilon):
        key = "epsilon in method.params" if isinstance(exchange.method, PrivacyGuarantee) else "dp.epsilon"
        lines.append(f"Epsilon: no bound is set ({key}), so this site's ledger counts charges but never stops a run.")
    else:
        lines.append(
            f"Epsilon: at most {epsilon:.3g} at delta = {budget.delta:g} ({budget.neighbours.value}) for any example, "
            "in this run; this site's ledger stops the run before it exceeds that. Other runs on an example add to it."
        )
    if examples is not None:
        given = _given(claim, config, exchange, examples)
        lines.append(f"This noise gives, for {examples:,} examples in this run alone: {given}.")
    else:
        lines.append(
            "The epsilon that this noise gives, also against the server and all other sites together, depends on this "
            "site's number of examples: add --examples N."
        )
        if timing := untimed(claim):
            lines.append(timing)
    if isinstance(claim, DistributedDiscreteGaussian):
        lines.append(f"Its {claim.words}.")
    if isinstance(charged_guarantee(claim, policy.roster if policy else None), OwnShareGuarantee):
        lines.append(
            f"But {WITHOUT_ROSTER}. So the limit above holds against the server and all other sites together, and the "
            "run reaches it sooner."
        )
    return lines


def _given(claim: PrivacyGuarantee, config: RunConfig, exchange: MessageExchange, examples: int) -> str:
    """State the epsilon for a site with `examples` examples that takes part in every round."""
    plan = plan_sampling(exchange.method, config, claim.budget.neighbours, examples)
    charges = as_planned(claim).privacy_spent(plan)
    return describe_guarantee(claim, config, charges, accounting.round_epsilon).sentence


def _require_own_delta(delta: float | None, claim: PrivacyGuarantee | None) -> None:
    """Raise ConfigError unless `delta` is the run's own, at which its epsilon and ledger limit hold."""
    if delta is not None and claim is not None and delta != claim.budget.delta:
        raise ConfigError(
            f"--delta: expected the run's own delta, {claim.budget.delta:g}, found {delta:g}; omit the option, or "
            "change the run's delta (dp.delta)"
        )


def _in_the_clear(exchange: MessageExchange, policy: policies.SitePolicy | None) -> list[str]:
    figures = TRAINING_FIELDS  # `_scores` explains the scores
    if policy is not None and not (policy.report_received_loss and policy.max_scores):
        figures -= {RECEIVED_LOSS}
    counts = f"; for text also {', '.join(sorted(row_counts.FIELDS))}"
    return [
        "This site would send, each time:",
        *_variants(exchange, "up"),
        f"  plus the number of examples and these training figures: {', '.join(sorted(figures))}"
        f"{counts if policy is None or policy.report_row_counts else ''}",
    ]


def _scores(config: RunConfig, policy: policies.SitePolicy | None) -> list[str]:
    """Explain what scores on held-out examples would reveal; return [] if the run requests none."""
    part, most = config.held_out_fraction, policy.max_scores if policy else 0
    if not part:
        return []
    asked = (
        f"The run asks this site to hold out {100 * part:g} % of its examples and to score the received weights on "
        f"them, reporting {held_out_report.LOSS} and {held_out_report.ROWS} with each upload."
    )
    if config.held_out_key == "evaluate.validation-share":
        asked += " The server chooses the final model, or when to stop, by the mean of the sites' scores."
    if not most:
        refusal = held_out_report.REFUSALS[held_out_report.NOT_PERMITTED]
        return [asked, f"This site would refuse: {refusal}. It trains on all its examples."]
    return [
        asked,
        f"This site would do so at most {most} times (max-scores). A party that chooses the weights can learn from the "
        "scores whether an example it knows is held out. The held-out examples are the same in every run.",
    ]


def _variants(exchange: MessageExchange, direction: Direction) -> list[str]:
    lines = []
    variants = exchange.layout.variants(direction)
    for variant in variants:
        fields = exchange.layout.fields_of(direction, variant)
        size = sum(map(exchange.nbytes, fields.values()))
        codecs = ", ".join(sorted({field.codec.name for field in fields.values()})) or "nothing"
        most = "at most " if any(None in field.shape for field in fields.values()) else ""
        one_of = f"either {variant!r}: " if len(variants) > 1 else ""
        lines.append(f"  {one_of}{len(fields)} fields as {codecs}, {most}{size:,} bytes: {_named(list(fields))}")
    return lines


def _named(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} ... {names[-1]}"
