"""Detect the installed Flower version and select the guard parts that only some versions need.

| Flower | SuperNodes use | sites connect to | fleet port | dead connections |
|---|---|---|---|---|
| 1.39 | gRPC | a separate Flower port | fleet_grpc.py | keepalive.py detects them |
| 1.41, 1.42 | HTTP | a separate FedVeil port: Flower has only one | fleet_http.py | Flower waits at most 30 s |

The rest of the guard is the same for all versions. With a version that is not in this table, the guard exits
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
    """A Flower release that FedVeil supports.

    Attributes:
        release: for example "1.39", which includes its patch releases.
        speaks: the protocol that its SuperNodes use with the server.
    """

    release: str
    speaks: Literal["gRPC", "HTTP"]


LINES = (FlowerRelease("1.39", "gRPC"), FlowerRelease("1.41", "HTTP"), FlowerRelease("1.42", "HTTP"))


class RefusalBehavior(Enum):
    """A SuperNode's reaction to a refused request."""

    SAYS_WHY = "it logs the reason and ends"
    ENDS = "it ends without a message"
    ASKS_AGAIN = "it asks again"


def release_of(version: str) -> FlowerRelease:
    """Return the release that a Flower version belongs to. Raises ConfigError if the version is unsupported."""
    for line in LINES:
        if version == line.release or version.startswith(f"{line.release}."):
            return line
    known = ", ".join(f"{line.release} ({line.speaks})" for line in LINES)
    raise ConfigError(
        f"flwr: this is version {version[:40]}, but {known} is needed; see docs/deploy/provision.md on installing it"
    )


def installed_release() -> FlowerRelease:
    """Return the installed Flower's release. Raises ConfigError if Flower is unsupported or missing."""
    try:
        return release_of(importlib.metadata.version("flwr"))
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError("flwr: Flower is not installed; run: pip install -r constraints.txt") from None
