"""`fedveil site policy`: prints the site policy that permits a run, for a person at the site to read and keep."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from fedveil.config import parse
from fedveil.console.run_config_args import parse_overrides
from fedveil.console.terminal import say
from fedveil.errors import ConfigError
from fedveil.records.atomic_files import write_atomic
from fedveil.sanitize import sanitize

__all__ = ["add_actions"]


def add_actions(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `policy`."""
    policy = actions.add_parser(
        "policy", help="print a site policy that permits one run, with a comment on each line, to be read and changed"
    )
    policy.add_argument(
        "--from", dest="source", required=True, type=Path, metavar="FILE", help="TOML file with the run config"
    )
    policy.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="run config override; repeatable"
    )
    policy.add_argument(
        "--app", type=Path, metavar="APP", help="folder or .fab file of the app that you reviewed; default: this "
        "installation's own",
    )  # fmt: skip
    policy.add_argument(
        "--examples",
        type=int,
        metavar="N",
        help="this site's number of training examples (of units, for dp.unit-column), to compute max-epsilon",
    )
    policy.add_argument(
        "--sites",
        type=int,
        default=0,
        metavar="N",
        help="participating sites, for secure.enabled; default: the minimum",
    )
    policy.add_argument(
        "--out", type=Path, metavar="FILE", help="write to this new file; default: print to standard output"
    )
    policy.set_defaults(run=_print_policy)


def _print_policy(args: argparse.Namespace) -> int:
    """Print the policy. Returns 1 if it refuses the run, which only its protective lines can cause."""
    # Imported here, because they import torch, which fedveil site start and status must not wait for.
    from fedveil import strategies, tasks
    from fedveil.console.doctor.policy_checks import privacy_limits_warnings
    from fedveil.console.doctor.policy_for_run import list_policy_warnings, write_policy_for_run
    from fedveil.console.doctor.run_refusals import list_run_refusals, read_policy, verify_bundle
    from fedveil.console.runs.secagg_preview import MaskedUploadPreview
    from fedveil.federation.exchange import MessageExchange

    if args.examples is not None and args.examples < 1:
        raise ConfigError(f"--examples: expected at least 1, found {args.examples}")
    if args.out is not None and args.out.exists():
        raise ConfigError(f"--out: expected a new file, found one at {args.out}; a policy is never replaced")
    config = parse(parse_overrides(args.source, args.set))
    method = strategies.create_method(config.method.name, config.method.params)
    say(f"Reading {sanitize(config.task.model)} to find its trained tensors", file=sys.stderr, flush=True)
    exchange = MessageExchange(method, config.method.name, tasks.load_task(config, method.adapter, "cpu").spec)
    masked = MaskedUploadPreview.from_exchange(exchange, config, args.sites) if config.secure.enabled else None
    up = masked.bytes if masked else exchange.largest("up")
    bundle = verify_bundle(args.app, config)
    text = write_policy_for_run(config, exchange, up, bundle, args.examples, args.source.name)
    with tempfile.TemporaryDirectory(prefix="fedveil-policy-") as folder:
        file = Path(folder) / "site-policy.toml"
        file.write_text(text)
        refusals = list_run_refusals(file, bundle, exchange, config, up)
        warnings = [*list_policy_warnings(config), *privacy_limits_warnings(read_policy(file))]
    if args.out is None:
        print(text, end="")
    else:
        write_atomic(args.out, text.encode())
        say(f"Wrote {args.out}", file=sys.stderr)
    for warning in warnings:
        say(f"Warning: {sanitize(warning, 1000)}.", mark="Warning", verdict="warn", file=sys.stderr)
    for refusal in refusals:
        say(f"This policy still refuses the run: {sanitize(refusal, 2000)}", file=sys.stderr)
    return 1 if refusals else 0
