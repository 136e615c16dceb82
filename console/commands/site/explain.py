"""`fedveil explain`: says what a run would send from here, before it runs.

Which fields, how many bytes, how often, at which epsilon, and whether this site's policy permits it. The exit code is 1
where the policy forbids it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from pathlib import Path

from fedveil import strategies, tasks
from fedveil.client_app.site import permits
from fedveil.client_app.site import policy as policies
from fedveil.client_app.site.assignment import Assignment, Order
from fedveil.client_app.site.node_config import Site
from fedveil.config import RunConfig, parse
from fedveil.console.flower.bundle import built
from fedveil.console.run_config import overrides
from fedveil.console.runs.masked import Masked
from fedveil.contract import held_out
from fedveil.contract.budget import stated
from fedveil.contract.layout import Direction
from fedveil.contract.method import REPORT_FIELDS, fields_of
from fedveil.errors import PolicyError
from fedveil.federation.exchange import Exchange
from fedveil.foreign import shown
from fedveil.guard import signature
from fedveil.privacy.claims import claim_of
from fedveil.privacy.in_sum import InSum
from fedveil.privacy.promised import epsilon
from fedveil.records import disclosed
from fedveil.training import optimisers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help='of the run config: --set method.name="fedrand"'
    )
    parser.add_argument("--config", type=Path, help="TOML file with the run config, as for flwr run -c")
    parser.add_argument("--policy", type=Path, help="this site's policy: says whether it permits the run")
    parser.add_argument("--app", type=Path, default=None, help="the app that would run, where the policy names digests")
    parser.add_argument("--delta", type=float, default=1e-5, help="at which epsilon is stated; default 1e-5")
    parser.add_argument(
        "--sites", type=int, default=0, metavar="N", help="that take part, for secure.enabled; default: the fewest"
    )
    parser.add_argument(
        "--permits", action="store_true", help="print only what a site's policy must have under [permits]"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0; 1 where the policy forbids the run."""
    config = parse(overrides(args.config, args.set))
    method = strategies.create(config.method.name, config.method.fields)
    if args.permits:
        print(permits.needed(config))
        return 0
    optimisers.check(method, config)
    policy = None if args.policy is None else _read(args.policy)
    print(f"Reading {shown(config.task.model)}, for what is trained of it", file=sys.stderr, flush=True)
    task = tasks.load(config, method.adapter, "cpu")
    exchange = Exchange(method, config.method.name, task.spec)
    roster = policy is not None and bool(policy.roster)
    masked = Masked.of(exchange, config, args.sites) if config.secure.enabled else None
    lines = [*explained(exchange, config, args.delta, masked, roster), *_scores(config, policy)]
    print("\n".join(shown(line, 4000) for line in lines))
    if policy is None:
        return 0
    largest = masked.bytes if masked else exchange.largest("up")
    if found := _refusals(_site(args.policy), policy, args.app, exchange, config, largest):
        print(f"\nThis site's policy FORBIDS it: {shown(found[0], 2000)}")
        for further in found[1:]:
            print(f"and: {shown(further, 2000)}")
        return 1
    print(f"\nThis site's policy permits it: {args.policy}")
    return 0


def explained(
    exchange: Exchange, config: RunConfig, delta: float, masked: Masked | None = None, roster: bool = False
) -> list[str]:
    """The run in plain words, a line each; `roster`: this site's policy names one."""
    rounds, share = config.run.rounds, config.cohort.fraction
    often = "in every round" if share == 1 else f"in about {100 * share:g} of 100 rounds"
    lines = [
        f"{exchange.name} on {config.task.name}, base model {config.task.model}: {rounds} rounds, this site {often}.",
        "",
        *(masked.words(roster) if masked else _in_the_clear(exchange)),
        "What would come in:",
        *_variants(exchange, "down"),
        "",
        f"Over the whole run at most {rounds * (masked.bytes if masked else exchange.largest('up')):,} bytes of "
        "fields leave this site.",
        "Rows, prepared rows and the method's private state stay in this site's own folders.",
    ]
    found, claim = epsilon(exchange.method, config, delta), claim_of(exchange.method, config)
    if config.run.deterministic:
        lines.append("Epsilon: not private: seeded noise (run.deterministic).")
    elif claim is None:
        lines.append("Epsilon: infinite. This run gives no differential-privacy guarantee: its method adds no noise.")
    elif math.isinf(found):
        lines.append(
            f"Epsilon: infinite at delta = {delta:g} for what leaves this site; the method's own words say why."
        )
    else:
        lines.append(
            f"Epsilon: at most {found:.3g} at delta = {delta:g} ({claim.budget.neighbours.value}) for any row, over "
            "this and all earlier runs; this site's ledger stops the run before."
        )
    if isinstance(claim, InSum):
        lines.append(f"Its {claim.words}.")
        if not math.isinf(found):
            alone = stated(claim.against_all(found), claim.budget.delta, claim.budget.neighbours)
            lines.append(f"Against the server and all other sites together, rows so charged have about {alone}.")
    words = disclosed.words_of(exchange.name)
    return [*lines, "", *(disclosed.in_sum(words, disclosed.THE_SUM) if masked else words)]


def _in_the_clear(exchange: Exchange) -> list[str]:
    figures = REPORT_FIELDS - held_out.FIELDS  # those apart: `_scores`
    return [
        "What would leave this site each time:",
        *_variants(exchange, "up"),
        f"  beside it the number of examples, and of the training: {', '.join(sorted(figures))}",
    ]


def _scores(config: RunConfig, policy: policies.Policy | None) -> list[str]:
    """What scores of held-out rows would tell; nothing where none are asked for."""
    part, most = config.evaluate.held_out, policy.max_scores if policy else 0
    if not part:
        return []
    asked = (
        f"It asks this site to hold out {100 * part:g} of 100 of its rows, and to say how the weights that it "
        f"received do on them: {held_out.LOSS} and {held_out.ROWS}, in the report of each upload."
    )
    if not most:
        return [asked, f"This site would not: {held_out.REFUSALS[held_out.NOT_PERMITTED]}. It trains on all its rows."]
    return [
        asked,
        f"This site would, {most} times at most (max-scores). Whoever chooses the weights can learn by their scores "
        "whether a row that they know is among those held out.",
    ]


def _variants(exchange: Exchange, direction: Direction) -> list[str]:
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


def _site(policy: Path) -> Site:
    return Site(policy=str(policy.absolute()), state_dir=Path("/nonexistent"))


def _read(policy: Path) -> policies.Policy:
    """Raises PolicyError that names the file, which a site's own error does not: the server reads that."""
    try:
        return policies.of_site(_site(policy))
    except PolicyError as error:
        raise PolicyError(f"--policy {policy}: {str(error).removeprefix('policy: ')}") from None


def _refusals(
    site: Site, read: policies.Policy, app: Path | None, exchange: Exchange, config: RunConfig, up: int
) -> list[PolicyError]:
    """What the site would refuse before the run's first round; sizes of fields for those of messages."""
    bundle = policies.Bundle()
    if read.app_digests is not None or read.signers is not None:
        digest = hashlib.sha256(built(app)).hexdigest()
        bundle = policies.Bundle(digest, signature.signer(config.run.signature, config.run.name, digest))
    fields = json.dumps(fields_of(exchange.method))
    order = Order(0, True, "site", "explain", exchange.name, fields)
    down = exchange.largest("down")
    asked = Assignment(order, config, site)
    found = list(policies.refusals(asked, bundle, down))
    try:
        policies.check_upload(asked, down, up, None if config.secure.enabled else read.min_examples)
    except PolicyError as error:
        found.append(error)
    return found
