"""The connected sites: Flower's nodes by their registered names."""

from __future__ import annotations

import re
import time

from flwr.serverapp import Grid

from fedveil.errors import ConfigError, QuorumError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_POLL_SECONDS = 0.25


def connected(grid: Grid) -> dict[str, int]:
    """Node ids by site name, sorted by name.

    A node without a registered name, as in the simulation engine, is called "node-<id>".

    Raises:
        ConfigError: two nodes have one name, or a name has other characters than letters, digits, "_", "." and "-".
    """
    found: dict[str, int] = {}
    for node in sorted(grid.get_nodes(), key=lambda n: n.node_id):
        name = node.name or f"node-{node.node_id}"
        if not _NAME.fullmatch(name):
            raise ConfigError(f'site name: expected at most 64 letters, digits, "_", "." or "-", found {name[:80]!r}')
        if name in found:
            raise ConfigError(
                f"site name: expected each name once, found two nodes called {name}; register one under another name"
            )
        found[name] = node.node_id
    return dict(sorted(found.items()))


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
