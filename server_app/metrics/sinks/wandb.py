"""Weights & Biases: a run in the project "fedveil", stored in <run folder>/wandb or sent to a server.

Nothing leaves this machine unless the ServerApp's environment says so: with WANDB_API_KEY, the run is sent while it is
in progress; without it, the run is stored offline, and `wandb sync` can send it later. WANDB_MODE overrides this;
WANDB_BASE_URL, WANDB_ENTITY and WANDB_PROJECT name a server, a team and a project. No key is read from the run config,
because sites see it.
Only metrics, failure reasons and five run config keys are logged, with task.model exactly as written: no source code,
git state, console output, package list, host name, or error reports to wandb's developers. wandb itself adds the
versions of Python, wandb and transformers, the operating system and processor type, and which of the libraries that it
knows are imported. A resumed FedVeil run continues its wandb run.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Any, final

from fedveil.sanitize import sanitize
from fedveil.server_app.metrics.samples import RoundMetrics

if TYPE_CHECKING:
    from fedveil.server_app.metrics.sinks import SinkRunInfo

EXTRA, NEEDS = "", "wandb"
PROJECT = "fedveil"
_PARAMETERS = ("method.name", "method.params", "task.name", "task.model", "run.rounds")
_MOST_REASONS, _REASON_CHARACTERS = 50, 300
_SETTINGS: dict[str, Any] = {
    "console": "off", "silent": True, "save_code": False, "disable_code": True, "disable_git": True,
    "disable_job_creation": True, "host": "fedveil", "x_disable_meta": True, "x_disable_stats": True,
    "x_disable_machine_info": True, "x_save_requirements": False, "program": "fedveil",
}  # fmt: skip


@final
class WandbSink:
    """Logs metrics by path against the number of finished rounds; a failed site's last reason is in the summary."""

    def __init__(self, about: SinkRunInfo) -> None:
        self._about = about
        self._run: Any = None

    def write(self, told: RoundMetrics) -> None:
        """Log one attempt's metrics. Raises a wandb exception if the server or the disk rejects them."""
        if self._run is None:
            self._run = self._opened()
        # "round" is a metric, not wandb's step, which must never decrease: attempts repeat, and epsilon comes later.
        self._run.log({"round": told.step, **{figure.path: figure.value for figure in told.figures}})
        for site, reason in list(told.failed.items())[:_MOST_REASONS]:
            self._run.summary[f"failed/{site}"] = f"round {told.step}: {sanitize(reason, _REASON_CHARACTERS)}"

    def close(self, state: str) -> None:
        """Record how the run ended, and wait until everything is written."""
        if self._run is not None:
            self._run.finish(exit_code=0 if state == "completed" else 1)

    def _opened(self) -> Any:
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # wandb reads it at import
        import wandb

        about, flat = self._about, self._about.config.flat()
        settings = wandb.Settings(**_SETTINGS)
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=about.name,
            id=hashlib.sha256(f"{about.name}-{about.id}".encode()).hexdigest()[:16],
            resume="allow" if about.is_resumed else None,
            dir=str(about.folder),
            mode=os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline"),
            config={name: flat[name] for name in _PARAMETERS},
            reinit="create_new",
            settings=settings,
        )
        run.define_metric("*", step_metric="round")
        return run


def create(about: SinkRunInfo) -> WandbSink:
    """Create the sink of a run, without importing wandb or contacting a server yet."""
    return WandbSink(about)
