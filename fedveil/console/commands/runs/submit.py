"""`fedveil submit`: submits a run to a federation and follows it until it ends.

By default, the command sends this installation's app. A relative run.dir is relative to the folder in which the
server runs apps, which is FOLDER for fedveil server start. Whatever can be checked here is checked before anything is
sent: the method, its parameters, and the rest of the run config. Sinks in sinks.use must be installed here, because
the server normally uses this installation. If it has its own, --extras-at-server leaves this check to the ServerApp,
which refuses before it contacts any site. With --resume N, a run whose process dies, or loses contact with the
SuperLink, is resumed from its checkpoint; sites keep the charge for the interrupted round.

Exit codes are the same as for `fedveil watch`: 0 completed, 1 failed, 3 stopped, 4 still running after --timeout.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from fedveil.config import RunConfig, RunSection, parse
from fedveil.console.flower.flwr_cli import FlowerCli, ServerUnreachableError
from fedveil.console.run_config_args import parse_overrides
from fedveil.console.runs.run_follower import RunFollower
from fedveil.console.terminal import make_console, say
from fedveil.errors import ConfigError, StateError

_RESUME_SECONDS, _RESTART_SECONDS = 15.0, 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "app", type=Path, nargs="?", default=None, help="the app's folder; default: this installation's own"
    )
    parser.add_argument(
        "--federation", type=Path, required=True, metavar="FOLDER", help="the folder made by fedveil provision"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="run config override; repeatable"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file with run config overrides; --set takes precedence"
    )
    parser.add_argument(
        "--timeout", type=float, default=0.0, metavar="SECONDS", help="how long to wait; default: until the run ends"
    )
    parser.add_argument(
        "--extras-at-server",
        action="store_true",
        help="the server has its own packages: check extras and methods only there",
    )
    parser.add_argument(
        "--resume", type=int, default=0, metavar="N", help="if the run's process dies or loses contact with the "
        "SuperLink, resume it from here, at most N times; default: 0",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Submit the run; return an exit code for its outcome."""
    if args.resume < 0:
        raise ConfigError(f"--resume: expected 0 or more, found {args.resume}")
    settings = parse_overrides(args.config, args.set)
    parsed = parse(settings)
    config = parsed.run
    if not args.extras_at_server:
        if args.app is None:
            try:
                _require_possible(parsed)
                _require_new(args.federation, config)
            except (ConfigError, StateError) as error:
                raise ConfigError(f"{error}; nothing was sent") from None
        if parsed.sinks.names:
            _require_sinks(parsed)
    _warn_of_privacy(parsed, is_method_here=args.app is None and not args.extras_at_server)
    flower = FlowerCli(args.federation.absolute() / "server" / "flower")
    try:
        number = flower.submit(args.app, settings)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"the run may have been submitted; list runs with: {flower.by_hand('ls')}") from None
    say(f"run {number}: submitted", flush=True)
    folder = Path(config.dir).expanduser() / (config.name or f"run-{number}")
    # fedveil server start runs apps in the federation's folder; a container runs them in /, like this command.
    follower = RunFollower(make_console(), number, [folder, args.federation / folder], flower)
    code = follower.to_its_end(args.timeout)
    for attempt in range(1, args.resume + 1):
        if code != 1 or (interrupted := follower.interrupted()) is None:
            break
        print(f"resuming it in {_RESUME_SECONDS:g} s ({attempt} of {args.resume})", flush=True)
        time.sleep(_RESUME_SECONDS)
        number = _submit_again(flower, args.app, parse_overrides(interrupted / "resume.toml", []))
        print(f"run {number}: submitted", flush=True)
        follower = RunFollower(make_console(), number, [interrupted], flower)
        code = follower.to_its_end(args.timeout)
    return code


def _submit_again(flower: FlowerCli, app: Path | None, settings: dict[str, Any]) -> str:
    """Submit a resume, waiting up to five minutes for a server that restarts. Raises LaunchError."""
    until = time.monotonic() + _RESTART_SECONDS
    while True:
        try:
            return flower.submit(app, settings)
        except ServerUnreachableError:
            if time.monotonic() > until:
                raise
            time.sleep(_RESUME_SECONDS)


def _require_possible(config: RunConfig) -> None:
    """Raise ConfigError for a config that the ServerApp would refuse, as far as can be checked without the base."""
    from fedveil import strategies, tasks  # imports take a second, and a wrong key is reported without them
    from fedveil.federation import aggregation_rules
    from fedveil.privacy.guarantee_source import check_guarantee, check_public_length
    from fedveil.server_app.evaluation import ModelSelection
    from fedveil.training import optimizers

    method = strategies.create_method(config.method.name, config.method.params)
    claim = check_guarantee(method, config, has_row_gradients=True)  # the base determines this, and it is not here
    check_public_length(claim, config)
    optimizers.check_optimizer(method, config)
    ModelSelection.from_config(config, tasks.task_info(config.task.name).metrics(config.task), method)
    aggregation_rules.check_cohort(config.secure, config.aggregate, config.cohort)
    aggregation_rules.check_entries(method, config.secure, config.cohort)


def _warn_of_privacy(config: RunConfig, is_method_here: bool) -> None:
    """Print a warning for each privacy setting that makes the guarantee next to worthless.

    A method installed only on the server may give a guarantee that is unknown here.
    """
    from fedveil import strategies
    from fedveil.privacy.dp_sgd import DpSgdConfig
    from fedveil.privacy.guarantee_source import guarantee_of
    from fedveil.privacy.privacy_warnings import privacy_warnings

    if is_method_here:
        claim = guarantee_of(strategies.create_method(config.method.name, config.method.params), config)
    else:
        claim = DpSgdConfig.from_config(config.dp)
    for warning in privacy_warnings(claim, [config.task.examples_per_site]):
        say(f"warning: {warning}", file=sys.stderr)


def _require_new(federation: Path, run: RunSection) -> None:
    """Raise StateError if fedveil server start would run the app in a folder that already contains a run."""
    folder = federation / Path(run.dir).expanduser() / run.name
    if run.name and not run.resume and folder.is_dir():
        from fedveil.server_app import checkpoints  # needs torch

        checkpoints.require_new(folder)


def _require_sinks(config: RunConfig) -> None:
    from fedveil.server_app.metrics import optional_deps  # Flower is imported only if a sink is named

    try:
        optional_deps.require_installed(config, "here, where the server normally runs its apps")
    except ConfigError as error:
        raise ConfigError(
            f"{error}; nothing was sent. If the server's own installation has it, use --extras-at-server"
        ) from None
