"""`fedveil status`: lists runs and, on the server, which sites are online.

It prints one line per run: its state, finished rounds, elapsed time and last loss, with the reason if the run
failed or was stopped. The exit code is 1 if a run failed, went silent or cannot be read, or if a registered site
is offline or was refused 20 calls within a minute. A run that someone stopped is not a failure.

With --json, standard output is one JSON object for other programs:

| field | value |
|---|---|
| format | 1; a field changes its name or meaning only with this number |
| is_healthy | whether the exit code is 0 |
| runs | a list, the latest run last |
| sites | a list; null without --federation, and if the server does not answer |

A run has name, folder, state, is_healthy, rounds_done, rounds, elapsed_seconds, loss, loss_of, flower_run and note.
Its state is running, completed, failed, stopped, died, silent, unreadable or unknown. loss_of is "test data", or
"training examples" if only the sites reported a loss. A site has name, state, is_online, note, refused_calls (in the
last 24 hours) and is_rogue. A value that is unknown is null, or "" for text.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedveil.console.provisioning.federation_folder import SiteRegistry, registry_folder
from fedveil.console.provisioning.online_status import absent_members, node_states
from fedveil.console.provisioning.refused_calls import RefusedCalls, read_refused_calls
from fedveil.console.runs import run_list
from fedveil.console.runs.run_follower import wait_for_sites
from fedveil.console.runs.run_list import ListedRun
from fedveil.console.terminal import Verdict, say, say_row
from fedveil.errors import ConfigError, FedVeilError
from fedveil.sanitize import sanitize

JSON_FORMAT = 1
_VERDICTS: dict[str, Verdict] = {
    "completed": "ok", "running": "ok", "stopped": "warn", "failed": "fail", "died": "fail", "silent": "fail",
    "unreadable": "fail",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        help="the runs' folder (run.dir); default: runs, in the --federation folder if given",
    )
    parser.add_argument(
        "--federation", type=Path, metavar="FOLDER", help="the folder made by fedveil provision: also shows its sites"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for other programs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Return 0, or 1 if a run failed, went silent or cannot be read, or if a registered site is offline or rogue."""
    own = args.federation / "runs" if args.federation else Path("runs")
    if args.folder and not args.federation and not args.folder.is_dir():
        raise ConfigError(f"FOLDER: expected a folder of runs, found none at {args.folder}; name your runs' run.dir")
    runs = run_list.list_runs(args.folder or own)
    if args.json:
        return _print_json(runs, args.federation)
    _print_runs(runs, args.folder or own, args.federation)
    well = all(one.is_healthy for one in runs)
    if args.federation:
        sites = list_sites(args.federation)
        _print_sites(sites, registry_folder(args.federation).is_dir())
        well &= all(map(_is_well, sites))
    return int(not well)


def _print_runs(runs: Sequence[ListedRun], folder: Path, federation: Path | None) -> None:
    if not runs:
        say(f"no runs in {folder}", flush=True)
        return
    say(run_list.head_line(runs))
    for one in runs:
        note = wait_for_sites(one.note, federation.absolute()) if federation else one.note
        state, left = one.state, "site" in one.note and "since round" in one.note
        verdict = "warn" if left and state == "completed" else _VERDICTS.get(state)
        say_row(run_list.run_line(one, runs), note, mark=state, verdict=verdict, start=run_list.name_width(runs))
    if any(one.loss_of == run_list.SITES_LOSS for one in runs):
        say(run_list.LOSS_NOTE)
    print(end="", flush=True)  # before querying Flower, which may fail


def _print_json(runs: Sequence[ListedRun], federation: Path | None) -> int:
    sites: list[dict[str, Any]] | None = None
    failure: FedVeilError | None = None
    if federation:
        try:
            sites = list_sites(federation)
        except FedVeilError as error:  # the runs are known all the same
            failure = error
    is_healthy = not failure and all(one.is_healthy for one in runs) and all(map(_is_well, sites or ()))
    document = {"format": JSON_FORMAT, "is_healthy": is_healthy, "runs": [one.to_json() for one in runs]}
    print(json.dumps({**document, "sites": sites}, indent=1, allow_nan=False), flush=True)
    if failure:
        raise failure
    return int(not is_healthy)


def runs_table(folder: Path, now: float | None = None) -> tuple[list[str], bool]:
    """Return one line per run under `folder`, the latest last, and whether all runs are healthy."""
    runs = run_list.list_runs(folder, now)
    if not runs:
        return [f"no runs in {folder}"], True
    lines = [f"{run_list.run_line(one, runs)}  {one.note}".rstrip() for one in runs]
    return lines, all(one.is_healthy for one in runs)


def list_sites(folder: Path) -> list[dict[str, Any]]:
    """Return each site of a federation as in the JSON. Queries Flower. An operator's folder has only node IDs."""
    if not registry_folder(folder).is_dir():  # made by fedveil operators login
        return [
            _site(f"node {node}", "registered", state == "online", "" if state == "online" else state, None)
            for node, state in sorted(node_states(folder).items())
        ]
    missing, refused = absent_members(folder), read_refused_calls(folder)
    return [
        _site(site, entry["state"], site not in missing, missing.get(site, ""), refused.get(site))
        for site, entry in sorted(SiteRegistry(folder).sites.items())
    ]


def _site(name: str, state: str, is_online: bool, why: str, calls: RefusedCalls | None) -> dict[str, Any]:
    note = "; ".join(filter(None, (why, str(calls) if calls else "")))
    return {
        "name": name, "state": state, "is_online": is_online, "note": note,
        "refused_calls": calls.count if calls else 0, "is_rogue": bool(calls and calls.is_rogue),
    }  # fmt: skip


def _is_well(site: dict[str, Any]) -> bool:
    return not site["is_rogue"] and (site["is_online"] or site["state"] != "registered")


def _print_sites(sites: Sequence[dict[str, Any]], has_names: bool) -> None:
    say(f"\n{'site':<24} {'state':<10} online")
    for site in sites:
        row, word = (
            f"{sanitize(site['name'], 80):<24} {site['state']:<10} ",
            "online" if site["is_online"] else "offline",
        )
        verdict: Verdict = "fail" if not _is_well(site) else "ok" if site["is_online"] else "warn"
        say_row(row + word, site["note"], mark=word, verdict=verdict, start=len(row))
    if not has_names:
        online = sum(site["is_online"] for site in sites)
        say(f"{online} of {len(sites)} registered sites are online; their names are in the server's own folder")
