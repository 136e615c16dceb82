"""`fedveil poc`: rehearses a whole pilot on this machine, like a real one.

It uses the files, keys, policies and commands of a real pilot. In a new folder it provisions a federation, makes and
registers each site's keys, prints the policy that permits the run, starts the server and the sites, submits the run,
and leaves the report, the kits and all logs. Then everything stops; with --stay it runs on until Ctrl-C, for trying
further commands.

    fedveil poc rehearsal
    fedveil poc rehearsal --config run.toml --data hospitals/ --stay

`hospitals/` has one folder per site, named after the site, with its examples. The policy keeps the start-up kit's
protections, so a run that real sites would refuse is refused here, before anything starts.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedveil.config import parse
from fedveil.console.launch.rehearsal import PilotRehearsal, RehearsedSite, list_site_folders
from fedveil.console.run_config_args import parse_overrides
from fedveil.console.terminal import make_console
from fedveil.errors import ConfigError

_SITES = 3
_TRIAL = {"method.name": "fedrand", "run.rounds": 2, "train.max-steps": 8}  # the run, if none is given
_COHORT_SECONDS = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new folder for everything")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file with the run config; default: a short run of FedRand"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="run config override; repeatable"
    )
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="folder with one folder of examples per site; default: some of the "
        "bundled texts for each site",
    )  # fmt: skip
    parser.add_argument("--sites", type=int, metavar="N", help=f"number of sites without --data; default: {_SITES}")
    parser.add_argument("--device", help='device of every site: "auto", "cpu", "cuda"; default: auto')
    parser.add_argument("--stay", action="store_true", help="after the run, keep server and sites until Ctrl-C")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Rehearse the pilot. Returns the run's exit code."""
    if args.data is not None and args.sites is not None:
        raise ConfigError("--sites: with --data, the sites are its folders; omit one of the two options")
    if args.sites is not None and not 2 <= args.sites <= 50:
        raise ConfigError(f"--sites: a rehearsal has 2 to 50 sites, not {args.sites}")
    sites = list_site_folders(args.data) if args.data is not None else _named_sites(args.sites or _SITES)
    settings, added = complete_settings(parse_overrides(args.config, args.set), len(sites))
    parse(settings)
    console = make_console()

    def say(line: str) -> None:
        console.print(line, soft_wrap=True)

    with PilotRehearsal(args.folder, sites, settings, say, args.device) as pilot:
        pilot.write_policy()
        if added and args.config is not None:
            say(f"added to the run config: {', '.join(f'{key} = {value!r}' for key, value in added.items())}")
        pilot.provision()
        pilot.enroll()
        pilot.start_sites()
        if code := pilot.submit():
            say(f"The logs of the server and the sites are in {pilot.folder / 'logs'}")
            return code
        pilot.report()
        _print_next(pilot, sites[0].name, str(settings["run.name"]), args.stay, say)
        if args.stay:
            pilot.wait_for_interrupt()
    return 0


def complete_settings(given: Mapping[str, Any], sites: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the run config to rehearse, and the keys in it that were not given."""
    needed = {"run.name": "rehearsal", "cohort.sites": sites, "cohort.wait-seconds": _COHORT_SECONDS}
    defaults: dict[str, Any] = needed if given else _TRIAL | needed
    added = {key: value for key, value in defaults.items() if key not in given}
    return {**added, **given}, added


def _named_sites(count: int) -> list[RehearsedSite]:
    return [RehearsedSite(f"site-{number}") for number in range(1, count + 1)]


def _print_next(pilot: PilotRehearsal, site: str, name: str, stay: bool, say: Any) -> None:
    """Print the commands to look at what the rehearsal left."""
    kit, operator = pilot.kit(site), pilot.operator
    commands = [
        ["fedveil", "log", "show", str(kit / "state" / "audit-log.jsonl")],
        ["fedveil", "card", str(operator / "runs" / name)],
        ["fedveil", "app", "show"],
    ]
    if stay:
        commands.append(["fedveil", "submit", "--federation", str(operator), "--config", "NEXT.toml"])
        commands.append(["fedveil", "dashboard", "--federation", str(operator)])
    say("next:")
    for command in commands:
        say(f"  {shlex.join(command)}")
    say(
        "For the real pilot, provision a new federation with the server's own name: keys and certificates made here are"
    )
    say("for this machine alone. You can reuse run.toml and, as a draft, site-policy.toml.")
    if stay:
        say("Ctrl-C stops the server and the sites.")
