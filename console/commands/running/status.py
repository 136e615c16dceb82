"""`fedveil status`: the runs of a folder and, on the server, which sites are online."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from fedveil.errors import FedVeilError

_SILENT_SECONDS = 1800.0


def add_parser(sub: Any) -> None:
    """Adds the sub-command."""
    parser = sub.add_parser(
        "status", help="the runs in a folder, each with its cause of failure; the sites of a federation"
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs"), help="run.dir of the runs; default: runs")
    parser.add_argument(
        "--federation", type=Path, metavar="FOLDER", help="what fedveil provision made: shows its sites too"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0; 1 where a run failed, went silent or cannot be read, or a registered site is not online."""
    lines, well = runs(args.folder)
    if args.federation:
        more, all_online = _sites(args.federation)
        lines, well = lines + more, well and all_online
    print("\n".join(lines))
    return int(not well)


def runs(folder: Path, now: float | None = None) -> tuple[list[str], bool]:
    """A line a run under `folder`, the latest last; whether all of them are well."""
    from fedveil.console.runs.folder import load

    files = sorted(folder.rglob("status.json"), key=lambda file: file.stat().st_mtime)
    if not files:
        return [f"no run under {folder}"], True
    lines, well = [], True
    for file in files:
        name = str(file.parent.relative_to(folder))
        try:
            found = load(file.parent)
        except FedVeilError as error:
            lines.append(f"{name:<24} cannot be read: {error}")
            well = False
            continue
        state = str(found.status.get("state", "unknown"))
        quiet = (now or time.time()) - max(f.stat().st_mtime for f in file.parent.iterdir())
        if state == "running" and quiet > _SILENT_SECONDS:
            state = "silent"
        well &= state in ("running", "completed")
        done = f"{found.rounds_done}/{found.status.get('rounds', '?')} rounds"
        why = found.status.get("reason") or _last_failures(found.attempts)
        why = _silent(quiet) if state == "silent" else why
        lines.append(f"{name:<24} {state:<10} {done:<14} {why}".rstrip())
    return lines, well


def _silent(seconds: float) -> str:
    return f"nothing written for {seconds / 60:.0f} minutes; fedveil watch --federation asks Flower what became of it"


def _last_failures(attempts: list[dict[str, Any]]) -> str:
    """Who failed in the last attempt, and why."""
    failed = attempts[-1].get("failed", {}) if attempts else {}
    return "; ".join(f"{site}: {reason}" for site, reason in failed.items())


def absent(folder: Path) -> dict[str, str]:
    """Members of a federation that are not online, each with what the server knows of why."""
    from fedveil.console.flower.command_line import Flower
    from fedveil.console.provisioning.federation import Members

    states = Flower(folder.absolute() / "server" / "flower").nodes()
    said = {site: _why(entry, states) for site, entry in sorted(Members(folder).sites.items())}
    return {site: why for site, why in said.items() if why}


def _why(entry: dict[str, Any], states: dict[str, str]) -> str:
    """Why a member is not online, "" where it is."""
    state = entry["state"]
    if state == "invited":
        return "has not been registered: no request of its key has come"
    if state != "registered":
        last = entry["until"][:10]
        return f"its key is {state} (its last day was {last}); it needs a new one: fedveil site init --renew"
    return {
        "online": "",
        "offline": "offline: has been online with its key, and is stopped or cut off",
        "registered": "has never been online with its registered key: it has another key, does not trust the server's "
        "certificate (an expired ca.crt), or has no way here; fedveil doctor at the site says which",
    }.get(states.get(entry.get("node", ""), ""), "not known to Flower; fedveil members sync")


def _sites(folder: Path) -> tuple[list[str], bool]:
    from fedveil.console.provisioning.federation import Members

    missing, entries = absent(folder), sorted(Members(folder).sites.items())
    lines = [f"{site:<24} {entry['state']:<10} {missing.get(site, 'online')}" for site, entry in entries]
    return lines, not any(site in missing for site, entry in entries if entry["state"] == "registered")
