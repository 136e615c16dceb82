"""The connected sites: map Flower's nodes to registered names, and wait until there are enough of them."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from flwr.common.constant import HEARTBEAT_INTERVAL_INF
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from fedveil.config import CohortConfig
from fedveil.errors import ConfigError, QuorumError
from fedveil.federation import aggregation_rules

if TYPE_CHECKING:
    from fedveil.server_app.round_record import RoundRecord
    from fedveil.server_app.run_folder import RunFolder

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_POLL_SECONDS = 0.25
_SILENT = re.compile("no (reply|answer) within ")
_POLICY = "its policy"
_LEDGER = "its ledger"
_BROKEN = "LedgerError at the site"  # client_app/app.py: the server gets no other details
_REFUSES = {"PolicyError: ": _POLICY, "BudgetError: ": _LEDGER, _BROKEN: f"{_LEDGER}, which must be repaired"}
_FOR_GOOD = ("BudgetError: ", _BROKEN)
_NAMED = 5  # maximum number of sites named in an error
_GONE_SECONDS = 62.0  # Flower treats a SuperNode as connected for a minute after its last heartbeat


def connected_sites(grid: Grid) -> dict[str, int]:
    """Return node ids by site name, sorted by name.

    A node without a registered name is called "node-<id>". The simulation engine draws new ids at every
    start, so there the node is called "partition-<number>": nodes register in the order of their
    partitions.

    Raises:
        ConfigError: two nodes have the same name, or a name contains characters other than letters, digits, "_",
            "." and "-".
    """
    node_ids: dict[str, int] = {}
    nodes = sorted(grid.get_nodes(), key=lambda n: (n.registered_at, n.node_id))
    for number, node in enumerate(nodes):
        name = node.name or (f"partition-{number}" if _simulated(nodes) else f"node-{node.node_id}")
        if not _NAME.fullmatch(name):
            raise ConfigError(f'site name: expected at most 64 letters, digits, "_", "." or "-", found {name[:80]!r}')
        if name in node_ids:
            raise ConfigError(
                f"site name: two nodes are called {name}, but each name may occur only once; register one under another"
            )
        node_ids[name] = node.node_id
    return dict(sorted(node_ids.items()))


def _simulated(nodes: Sequence[NodeInfo]) -> bool:
    return all(not node.name and node.heartbeat_interval >= HEARTBEAT_INTERVAL_INF for node in nodes)


def sites_out(attempt: RoundRecord) -> dict[str, str]:
    """Return, by site, why it can no longer take part in this run: its ledger would also refuse every later round.

    A policy may permit a later round, for example at another hour, so it does not count here.
    """
    return {site: why for site, why in attempt.failed.items() if why.startswith(_FOR_GOOD)}


def wait_for(
    grid: Grid,
    count: int,
    seconds: float,
    because: str = "cohort.sites and cohort.min-sites",
    out: Collection[str] = (),
) -> dict[str, int]:
    """Wait for at least `count` sites and return the connected ones, except for the sites in `out`.

    Raises:
        QuorumError: too few sites after `seconds`; the error names `because`, the settings that require them.
    """
    end = time.monotonic() + seconds
    while len(sites := {name: node for name, node in connected_sites(grid).items() if name not in out}) < count:
        if time.monotonic() > end:
            raise QuorumError(
                f"cohort: {count} sites must connect within {seconds:g} s, but only {len(sites)} did "
                f"({', '.join(sites)}); start the missing sites or lower {because}"
            )
        time.sleep(_POLL_SECONDS)
    return sites


def await_quorum(
    grid: Grid,
    round_: int,
    quorum: int,
    cohort: CohortConfig,
    before: RoundRecord | None,
    folder: RunFolder | None,
    out: Mapping[str, str] | None = None,
) -> None:
    """Wait until a round can succeed, so that no site trains for a round that cannot.

    Sites whose policy or ledger refused the last attempt will also refuse the next one, so the server does not wait
    for them. A site that did not reply may be dead: it counts once it has disconnected and come back, or once enough
    time has passed for Flower to notice that it is gone.

    Args:
        quorum: the quorum of the round.
        before: the previous attempt.
        folder: the run folder, which records the wait.
        out: sites that are no longer asked in this run, with the reasons (`sites_out`).

    Raises:
        QuorumError: no round could succeed within cohort.wait-seconds.
    """
    began, out = time.monotonic(), out or {}
    end, refused = began + cohort.wait_seconds, refusing_sites(before)
    silent = {site for site, why in before.failed.items() if _SILENT.match(why)} if before else set[str]()
    noticed = min(end, began + _GONE_SECONDS)
    last_willing = -1
    while True:
        there, now = {name: id_ for name, id_ in connected_sites(grid).items() if name not in out}, time.monotonic()
        silent = silent & set(there) if now <= noticed else set()
        drawn = aggregation_rules.cohort_size(cohort.fraction, len(there))
        willing = min(drawn, len([site for site in there if site not in refused and site not in silent]))
        if willing >= quorum:
            return
        if now > end:
            why = f"in the last attempt: {before.reasons}" if before else f"{drawn} of them would be drawn"
            raise QuorumError(
                f"round {round_ + 1}: at least {quorum} sites must take part within "
                f"{cohort.wait_seconds:g} s, but only {willing} can (connected: {', '.join(there) or 'none'}; {why}); "
                f"{suggest_remedy(before, out)}"
            )
        if folder and willing != last_willing:
            folder.underway.awaits(willing, end - now, refused)
            last_willing = willing
        time.sleep(_POLL_SECONDS)


def refusing_sites(attempt: RoundRecord | None) -> dict[str, str]:
    """Return, by site, which part of the site refused the attempt: "its policy" or "its ledger"."""
    return _refusals(attempt.failed if attempt else {})


def _refusals(failed: Mapping[str, str]) -> dict[str, str]:
    refusals = ((site, by) for site, why in failed.items() for start, by in _REFUSES.items() if why.startswith(start))
    return dict(refusals)


def suggest_remedy(before: RoundRecord | None, out: Mapping[str, str] | None = None) -> str:
    """Suggest the next step for missing sites, based on the outcome of the last attempt and the sites in `out`."""
    failed = {**(out or {}), **(before.failed if before else {})}
    refused = _refusals(failed)
    if not refused:
        if failed and not any(_SILENT.match(why) for why in failed.values()):
            return (
                "correct these causes. A resumed run repeats the round, and a site refuses it after the "
                "max-retries of its policy: then submit a new run under another name"
            )
        return "start the missing sites, see the sites' logs, or lower cohort.min-sites"
    named = [f"{site}, refused by {by}" for site, by in refused.items()]
    named[_NAMED:] = [f"and {len(named) - _NAMED} more"] * (len(named) > _NAMED)
    mended = _POLICY in refused.values() or any(why.startswith(_BROKEN) for why in failed.values())
    step = "correct it and submit again, or resume; " * mended
    return f"no longer in this run: {'; '.join(named)}; {step}see the sites' logs, or lower cohort.min-sites"
