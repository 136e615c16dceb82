"""The epsilon that a run may cost, asked of epsilon.py in a separate process: this one must not import torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from fedveil import places
from fedveil.client_app.site.assignment import Assignment
from fedveil.errors import PolicyError

_SECONDS = 120.0


def epsilon(assignment: Assignment, delta: float, root: Path | None = None) -> float:
    """The run's epsilon at `delta`. Raises PolicyError."""
    asked = {"method": assignment.order.method, "fields": assignment.order.fields, "config": assignment.config.flat()}
    text = json.dumps({**asked, "delta": delta})
    command = [sys.executable, "-P", "-m", "fedveil.client_app.site.epsilon"]
    environment = {**os.environ, "PYTHONPATH": str(root or places.root())}
    try:
        done = subprocess.run(
            command, input=text, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=True
        )
        return float(json.loads(done.stdout)["epsilon"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        reason = (getattr(error, "stderr", "") or type(error).__name__).strip().splitlines()[-1][:200]
        raise PolicyError(
            f"epsilon: expected one from the method, found none ({reason}); see the site's log"
        ) from error
