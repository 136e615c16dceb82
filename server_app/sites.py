"""The connected sites: Flower's nodes by their registered names, and the wait until there are enough of them."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flwr.common.constant import HEARTBEAT_INTERVAL_INF
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from fedveil.config import CohortConfig
from fedveil.errors import ConfigError, QuorumError
from fedveil.federation import cohort as cohorts

if TYPE_CHECKING:
    from fedveil.server_app.record import RoundRecord, RunFolder

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_POLL_SECONDS = 0.25
_SILENT = re.compile("no (reply|answer) within ")
_POLICY = "its policy"
_REFUSES = {"PolicyError: ": _POLICY, "BudgetError: ": "its ledger"}
_NAMED = 5  # sites in an error
_GONE_SECONDS = 62.0  # for a minute after its last sign of life Flower has a SuperNode as connected


def connected(grid: Grid) -> dict[str, int]:
    """Node ids by site name, sorted by name.

    A node without a registered name is called "node-<id>". On the simulation engine, where ids are drawn anew at every
    start, it is called "partition-<number>": nodes register there in the order of their partitions.

    Raises:
        ConfigError: two nodes have one name, or a name has other characters than letters, digits, "_", "." and "-".
    """
    found: dict[str, int] = {}
    nodes = sorted(grid.get_nodes(), key=lambda n: (n.registered_at, n.node_id))
    for number, node in enumerate(nodes):
        name = node.name or (f"partition-{number}" if _simulated(nodes) else f"node-{node.node_id}")
        if not _NAME.fullmatch(name):
            raise ConfigError(f'site name: expected at most 64 letters, digits, "_", "." or "-", found {name[:80]!r}')
        if name in found:
            raise ConfigError(
                f"site name: expected each name once, found two nodes called {name}; register one under another name"
            )
        found[name] = node.node_id
    return dict(sorted(found.items()))


def _simulated(nodes: Sequence[NodeInfo]) -> bool:
    return all(not node.name and node.heartbeat_interval >= HEARTBEAT_INTERVAL_INF for node in nodes)


def wait_for(
    grid: Grid, count: int, seconds: float, because: str = "cohort.sites and cohort.min-sites"
) -> dict[str, int]:
    """Waits for at least `count` sites and returns those connected.

    Raises:
        QuorumError: after `seconds`; it names the settings `because` of which they are needed.
    """
    end = time.monotonic() + seconds
    while len(sites := connected(grid)) < count:
        if time.monotonic() > end:
            raise QuorumError(
                f"cohort: expected {count} connected sites within {seconds:g} s, found {len(sites)} "
                f"({', '.join(sites)}); start the missing sites or lower {because}"
            )
        time.sleep(_POLL_SECONDS)
    return sites


def await_quorum(
    grid: Grid, round_: int, quorum: int, cohort: CohortConfig, before: RoundRecord | None, folder: RunFolder | None
) -> None:
    """Waits until a round can succeed: no site shall train for one that cannot.

    Sites that refused the last attempt, as their policy or their ledger has it, will refuse the next one too: they are
    not waited for. One that was silent may be dead: it counts once it was gone and is back, or Flower would have
    noticed.

    Args:
        quorum: of the round.
        before: the attempt before this one.
        folder: where the wait is told.

    Raises:
        QuorumError: it could not within cohort.wait-seconds.
    """
    began = time.monotonic()
    end, refused = began + cohort.wait_seconds, refusing(before)
    silent = {site for site, why in before.failed.items() if _SILENT.match(why)} if before else set[str]()
    noticed = min(end, began + _GONE_SECONDS)
    told = -1
    while True:
        there, now = connected(grid), time.monotonic()
        silent = silent & set(there) if now <= noticed else set()
        drawn = cohorts.size(cohort.fraction, len(there))
        willing = min(drawn, len([site for site in there if site not in refused and site not in silent]))
        if willing >= quorum:
            return
        if now > end:
            why = f"in the last attempt: {before.reasons}" if before else f"{drawn} of them would be drawn"
            raise QuorumError(
                f"round {round_ + 1}: expected at least {quorum} sites that take part within "
                f"{cohort.wait_seconds:g} s, found {willing} (connected: {', '.join(there) or 'none'}; {why}); "
                f"{remedy(before)}"
            )
        if folder and willing != told:
            folder.underway.awaits(willing, end - now, refused)
            told = willing
        time.sleep(_POLL_SECONDS)


def refusing(attempt: RoundRecord | None) -> dict[str, str]:
    """Of each site that refused an attempt by itself what did so: "its policy", "its ledger"."""
    failed = attempt.failed if attempt else {}
    found = ((site, by) for site, why in failed.items() for start, by in _REFUSES.items() if why.startswith(start))
    return dict(found)


def remedy(before: RoundRecord | None) -> str:
    """The next step where sites are missing, by what became of the last attempt."""
    refused, failed = refusing(before), before.failed if before else {}
    if not refused:
        if failed and not any(_SILENT.match(why) for why in failed.values()):
            return (
                "mend what these say. A resumed run repeats the round, which a site refuses whose policy's max-repeats "
                "it has reached: then submit anew, under another name"
            )
        return "start the missing sites, see the sites' logs, or lower cohort.min-sites"
    named = [f"{site}, refused by {by}" for site, by in refused.items()]
    named[_NAMED:] = [f"and {len(named) - _NAMED} more"] * (len(named) > _NAMED)
    step = "mend it and submit again, or resume; " * (_POLICY in refused.values())
    return f"out of this run: {'; '.join(named)}; {step}see the sites' logs, or lower cohort.min-sites"
