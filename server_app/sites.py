"""The connected sites: Flower's nodes by their registered names."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from flwr.common.constant import HEARTBEAT_INTERVAL_INF
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from fedveil.errors import ConfigError, QuorumError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_POLL_SECONDS = 0.25


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
