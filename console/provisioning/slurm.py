"""What `fedveil site start` asks of Slurm."""

from __future__ import annotations

from collections.abc import Mapping

from fedveil.errors import ConfigError


def require_one_task(environ: Mapping[str, str]) -> None:
    """Raises ConfigError under srun with several tasks: each would be a SuperNode with the same key."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")  # srun's; a batch script has SLURM_NTASKS too, and runs once
    if tasks != "1":
        raise ConfigError(
            f"srun: expected one task, which starts a process for each GPU, found {tasks}; leave srun out of the batch "
            "script, and start the site with --processes N: docs/slurm.md"
        )
