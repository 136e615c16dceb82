"""Programs that receive each round's metrics during the run. One file per program, found by file name, like methods.

A file defines `EXTRA` (the extra in pyproject.toml that it needs; "" for a package that no extra installs), `NEEDS`
(the module that it imports) and `create(about) -> MetricsSink`. So does a module in another package, named by an entry
point in the group "fedveil.sinks". `create` is called before any site is contacted, and refuses settings that cannot
work. Slow or fallible work belongs in `write`, which has its own thread (fedveil/server_app/metrics/dispatcher.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedveil.config import RunConfig
from fedveil.server_app.metrics import optional_deps
from fedveil.server_app.metrics.dispatcher import MetricsSink


@dataclass(frozen=True)
class SinkRunInfo:
    """Describes the run to its sinks.

    Attributes:
        folder: the run folder.
        id: distinguishes the run from others with its name; a resumed run keeps it.
        config: the run config.
        is_resumed: true if earlier rounds of the run have already been written.
    """

    folder: Path
    id: str
    config: RunConfig
    is_resumed: bool = False

    @property
    def name(self) -> str:
        """Return the run's name."""
        return self.folder.name


def open_sinks(about: SinkRunInfo) -> dict[str, MetricsSink]:
    """Open the sinks that the run config names.

    Raises:
        ConfigError: a sink is unknown, its extra is not installed here, or its settings cannot work.
    """
    return {
        name: module.create(about)
        for name, module in optional_deps.require_installed(about.config, "at the ServerApp").items()
    }
