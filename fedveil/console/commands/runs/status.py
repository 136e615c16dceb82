"""`fedveil status`: lists runs and, on the server, which sites are online.

It prints one line per run, with the reason if the run failed or was stopped. The exit code is 1 if a run
failed, went silent or cannot be read, or if a registered site is offline or was refused
20 calls within a minute. A run that someone stopped is not a failure.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from fedveil.console.provisioning.federation_folder import SiteRegistry, registry_folder
from fedveil.console.provisioning.online_status import absent_members, node_states
from fedveil.console.provisioning.refused_calls import read_refused_calls
from fedveil.console.runs.per_site import sites_left
from fedveil.console.runs.progress_bar import round_underway
from fedveil.console.runs.run_follower import wait_for_sites
from fedveil.console.runs.run_reader import load_run
from fedveil.errors import FedVeilError
from fedveil.sanitize import sanitize

_SILENT_SECONDS = 1800.0


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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Return 0, or 1 if a run failed, went silent or cannot be read, or if a registered site is offline or rogue."""
    own = args.federation / "runs" if args.federation else Path("runs")
    lines, well = runs_table(args.folder or own)
    lines = [wait_for_sites(line, args.federation.absolute()) for line in lines] if args.federation else lines
    print("\n".join(lines), flush=True)  # before querying Flower, which may fail
    if args.federation:
        lines, all_online = _sites(args.federation)
        print("\n".join(lines))
        well &= all_online
    return int(not well)


def runs_table(folder: Path, now: float | None = None) -> tuple[list[str], bool]:
    """Return one line per run under `folder`, the latest last, and whether all runs are healthy."""
    files = sorted(folder.rglob("status.json"), key=lambda file: file.stat().st_mtime)
    if not files:
        return [f"no runs in {folder}"], True
    lines, well = [], True
    for file in files:
        name = sanitize(file.parent.relative_to(folder), 200)
        try:
            run_view = load_run(file.parent)
        except FedVeilError as error:
            lines.append(f"{name:<24} cannot be read: {sanitize(error)}")
            well = False
            continue
        state = sanitize(run_view.status.get("state", "unknown"), 20)
        quiet = (now or time.time()) - max(f.stat().st_mtime for f in file.parent.iterdir())
        if state == "running" and quiet > _SILENT_SECONDS:
            state = "silent"
        well &= state in ("running", "completed", "stopped")
        done = f"{run_view.rounds_done}/{sanitize(run_view.status.get('rounds', '?'), 20)} rounds"
        why = run_view.status.get("reason") or _last_failures(run_view.attempts) or run_view.of_round
        why = _silent(quiet) if state == "silent" else sanitize(why)
        if state in ("running", "completed") and (left := sites_left(run_view)):
            why = f"{left}; {why}" if why else left
        if state == "running" and (now_at := round_underway(file.parent)):
            why = f"{now_at}; last attempt: {why}" if why else now_at
        lines.append(f"{name:<24} {state:<10} {done:<14} {why}".rstrip())
    return lines, well


def _silent(seconds: float) -> str:
    return f"no output for {seconds / 60:.0f} minutes; get its state from Flower with fedveil watch --federation"


def _last_failures(attempts: list[dict[str, Any]]) -> str:
    """List the sites that failed in the last attempt, with reasons."""
    failed = attempts[-1].get("failed", {}) if attempts else {}
    return "; ".join(f"{site}: {reason}" for site, reason in failed.items())


def _sites(folder: Path) -> tuple[list[str], bool]:
    if not registry_folder(folder).is_dir():  # an operator's folder, made by fedveil operators login
        states = node_states(folder)
        online = sum(state == "online" for state in states.values())
        note = f"{online} of {len(states)} registered sites are online; their names are in the server's own folder"
        return [*(f"node {node:<24} {state}" for node, state in sorted(states.items())), note], online == len(states)
    missing, entries = absent_members(folder), sorted(SiteRegistry(folder).sites.items())
    refused = read_refused_calls(folder)
    lines = [
        f"{site:<24} {entry['state']:<10} {missing.get(site, 'online')}"
        + (f"; {refused[site]}" if site in refused else "")
        for site, entry in entries
    ]
    is_well = not any(site in missing for site, entry in entries if entry["state"] == "registered")
    return lines, is_well and not any(calls.is_rogue for calls in refused.values())
