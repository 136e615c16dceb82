"""Detect the installed Flower version and select the guard parts that only some versions need.

| Flower | SuperNodes speak | sites are served at | fleet port | a connection that has gone dead |
|---|---|---|---|---|
| 1.39 | gRPC | a port of their own, by Flower | fleet_grpc.py | keepalive.py finds it |
| 1.41, 1.42 | HTTP | one of their own, by us: Flower has one for all | fleet_http.py | Flower waits at most 30 s |

The rest of the guard is the same for all versions. For a version missing from this table, the guard exits
with an explanation.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from fedveil.errors import ConfigError


@dataclass(frozen=True)
class FlowerRelease:
    """A release of Flower that FedVeil knows.

    Attributes:
        release: "1.39"; its patches are of the same line.
        speaks: what its SuperNodes speak with the server.
    """

    release: str
    speaks: Literal["gRPC", "HTTP"]


LINES = (FlowerRelease("1.39", "gRPC"), FlowerRelease("1.41", "HTTP"), FlowerRelease("1.42", "HTTP"))


class RefusalBehavior(Enum):
    """Reaction of a SuperNode to a refused request."""

    SAYS_WHY = "it logs the reason and ends"
    ENDS = "it ends without a word"
    ASKS_AGAIN = "it asks again"


def release_of(version: str) -> FlowerRelease:
    """Return the release that a Flower version belongs to. Raises ConfigError for an unknown one."""
    for line in LINES:
        if version == line.release or version.startswith(f"{line.release}."):
            return line
    known = ", ".join(f"{line.release} ({line.speaks})" for line in LINES)
    raise ConfigError(
        f"flwr: expected version {known}, found {version[:40]}; see docs/deploy/provision.md for the version to install"
    )


def installed_release() -> FlowerRelease:
    """Return the installed Flower's release. Raises ConfigError for an unknown one, or if Flower is missing."""
    try:
        return release_of(importlib.metadata.version("flwr"))
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError("flwr: expected Flower, found none; run: pip install -r constraints.txt") from None
