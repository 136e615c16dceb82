"""Programs that a round's figures go to while the run goes on. One file each; found by its file name, as methods are.

A file has `EXTRA` (the extra of pyproject.toml that it needs), `NEEDS` (the module that this extra brings) and
`create(about) -> MetricsSink`. So has a module of another package that an entry point in the group "fedveil.sinks"
names. `create` is called before any site is asked, and refuses what cannot work; what may take time or fail later
belongs in `write`, which has a thread of its own (fedveil/server_app/metrics/dispatcher.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedveil.config import RunConfig
from fedveil.server_app.metrics import optional_deps
from fedveil.server_app.metrics.dispatcher import MetricsSink


@dataclass(frozen=True)
class SinkRunInfo:
    """The run, for its sinks.

    Attributes:
        folder: the run's.
        id: tells the run from others of its name; a resumed run keeps it.
        config: the run config.
        is_resumed: whether rounds of it were written before.
    """

    folder: Path
    id: str
    config: RunConfig
    is_resumed: bool = False

    @property
    def name(self) -> str:
        """The run's name."""
        return self.folder.name


def open_sinks(about: SinkRunInfo) -> dict[str, MetricsSink]:
    """The sinks that the run config names.

    Raises:
        ConfigError: one is unknown, its extra is not installed here, or it cannot work as it is set.
    """
    return {
        name: module.create(about)
        for name, module in optional_deps.require_installed(about.config, "at the ServerApp").items()
    }
