"""Compute a federation's metrics: its members, certificates, runs, disks and logs, without a run being in progress."""

from __future__ import annotations

import math
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from fedveil.console.provisioning.federation_folder import SiteRegistry
from fedveil.console.provisioning.online_status import why_absent
from fedveil.console.provisioning.refused_calls import read_refused_calls
from fedveil.console.provisioning.server_certificate import read_certificate
from fedveil.console.runs.run_reader import RunView
from fedveil.console.web import safe_files
from fedveil.console.web.metrics import GaugeSample
from fedveil.console.web.safe_files import RunLocation
from fedveil.errors import FedVeilError

__all__ = ["certificate_samples", "disk_samples", "federation_samples", "log_samples", "run_samples"]

_DAY = 86_400.0
_STATUSES = ("pending", "starting", "running")
STATES = ("completed", "running", "stopped", "failed", "died")
_OTHER = "other"


def federation_samples(
    name: str, folder: Path, nodes: Mapping[str, str] | None, runs: Mapping[str, str]
) -> Iterator[GaugeSample]:
    """Yield the metrics of a federation's members and of Flower's runs.

    Args:
        nodes: Flower's status of each node by node ID; None if Flower did not answer.
        runs: Flower's status of each unfinished run.
    """
    yield GaugeSample("fedveil_superlink_up", float(nodes is not None), (name,))
    try:
        sites = SiteRegistry(folder).sites
        samples = [*_members(name, sites, nodes), *_refusals(name, folder, sites)]
    except (FedVeilError, OSError, KeyError, TypeError, ValueError, AttributeError):
        yield GaugeSample("fedveil_registry_readable", 0.0, (name,))
    else:
        yield GaugeSample("fedveil_registry_readable", 1.0, (name,))
        yield from samples
    if nodes is not None:
        counted = Counter(status if status in _STATUSES else _OTHER for status in runs.values())
        for status in (*_STATUSES, _OTHER):
            yield GaugeSample("fedveil_flower_runs", counted[status], (name, status))
    files = {file: folder / "server" / file for file in ("ca.crt", "server.pem")}
    yield from certificate_samples(name, files)


def _members(
    name: str, sites: Mapping[str, Mapping[str, str]], nodes: Mapping[str, str] | None
) -> Iterator[GaugeSample]:
    registered = {site: entry for site, entry in sorted(sites.items()) if entry["state"] == "registered"}
    yield GaugeSample("fedveil_sites_registered", len(registered), (name,))
    for site, entry in registered.items():
        days = (datetime.fromisoformat(entry["until"]).timestamp() - time.time()) / _DAY
        yield GaugeSample("fedveil_site_key_days_left", days, (name, site))
    if nodes is None:
        return
    online = {site: not why_absent(dict(entry), dict(nodes)) for site, entry in registered.items()}
    yield GaugeSample("fedveil_sites_online", sum(online.values()), (name,))
    for site, is_online in online.items():
        yield GaugeSample("fedveil_site_online", is_online, (name, site))


def _refusals(name: str, folder: Path, sites: Iterable[str]) -> Iterator[GaugeSample]:
    refused = read_refused_calls(folder)
    for site in sorted(sites):
        calls = refused.get(site)
        yield GaugeSample("fedveil_site_refused_calls", calls.count if calls else 0, (name, site))
        yield GaugeSample("fedveil_site_is_rogue", bool(calls and calls.is_rogue), (name, site))


def certificate_samples(federation: str, files: Mapping[str, Path]) -> Iterator[GaugeSample]:
    """Yield the days left of each certificate; -inf for one that cannot be read."""
    for name, file in files.items():
        try:
            days = (read_certificate(file).not_valid_after_utc.timestamp() - time.time()) / _DAY
        except FedVeilError:
            days = -math.inf
        yield GaugeSample("fedveil_certificate_days_left", days, (federation, name))


def disk_samples(federation: str, folders: Mapping[str, Path]) -> Iterator[GaugeSample]:
    """Yield the free bytes of each folder's disk; of the nearest parent for a folder that does not exist yet."""
    for name, folder in folders.items():
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        yield GaugeSample("fedveil_disk_free_bytes", shutil.disk_usage(there).free, (federation, name))


def run_samples(
    runs: Iterable[tuple[RunLocation, RunView]], broken: int, federations: Iterable[str]
) -> Iterator[GaugeSample]:
    """Yield the number of runs by state for each federation, and the rounds of those that are running.

    `broken`: the number of run folders that cannot be read.
    """
    yield GaugeSample("fedveil_runs_unreadable", broken)
    counted = {federation: Counter[str]() for federation in federations}
    for place, run in runs:
        state = str(run.status.get("state", ""))
        counted.setdefault(place.federation, Counter())[state if state in STATES else _OTHER] += 1
        if state == "running":
            yield GaugeSample("fedveil_run_rounds_done", run.rounds_done, (place.federation, place.name))
    for federation, states in counted.items():
        for state in (*STATES, _OTHER):
            yield GaugeSample("fedveil_runs", states[state], (federation, state))


def log_samples(files: Mapping[str, Path]) -> Iterator[GaugeSample]:
    """Yield the time of each log's last line, without verifying the log; a log without a valid time has no sample."""
    for name, file in files.items():
        for line in safe_files.tail_log(file, 1):
            try:
                at = datetime.fromisoformat(str(line.get("time"))).astimezone(UTC).timestamp()
            except (ValueError, OverflowError, OSError):
                continue
            yield GaugeSample("fedveil_audit_log_last_line_timestamp_seconds", at, (name,))
