"""Check a run's maximum privacy cost.

epsilon_main.py computes the run's epsilon in a separate process, because this process must not import torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from fedveil import paths
from fedveil.client_app.instruction import ClientAssignment
from fedveil.config import RunConfig
from fedveil.errors import PolicyError

_SECONDS = 120.0


def run_epsilon(assignment: ClientAssignment, delta: float, root: Path | None = None) -> float:
    """Return the run's epsilon at `delta`. Raises PolicyError."""
    asked = {"method": assignment.order.method, "fields": assignment.order.fields, "config": assignment.config.flat()}
    text = json.dumps({**asked, "delta": delta})
    command = [sys.executable, "-P", "-m", "fedveil.client_app.policy.epsilon_main"]
    environment = {**os.environ, "PYTHONPATH": str(root or paths.import_root())}
    try:
        done = subprocess.run(
            command, input=text, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=True
        )
        return float(json.loads(done.stdout)["epsilon"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        reason = (getattr(error, "stderr", "") or type(error).__name__).strip().splitlines()[-1][:200]
        raise PolicyError(
            f"epsilon: the method's epsilon could not be computed ({reason}); see the site's log"
        ) from error


def require_epsilon(assignment: ClientAssignment, limit: float, delta: float) -> None:
    """Raise PolicyError for a run that may cost more than `limit` at `delta`."""
    epsilon = run_epsilon(assignment, delta)
    if not epsilon <= limit:
        raise PolicyError(
            f"epsilon: this site permits at most {limit:g} at delta = {delta:g}, found {epsilon:g}; "
            "choose a private method, and set epsilon in its parameters"
        )


def require_noise(config: RunConfig, least: float | None) -> None:
    """Raise PolicyError for a run whose steps have less noise than `least`; None requires none."""
    multiplier = config.dp.noise_multiplier if config.dp.clip_norm > 0 else 0.0
    if least is not None and multiplier < least:
        raise PolicyError(
            f"dp.noise-multiplier: this site permits noisy steps of at least {least:g}, found {multiplier:g}; raise it"
        )
