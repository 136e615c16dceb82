"""Whether a site's device is there: asked before anything is started, for else a run's first turn says so.

Another process asks, with the site's own torch: the one that starts a site lives as long as it does, and needs none.
"""

from __future__ import annotations

import subprocess
import sys

from fedveil.errors import ConfigError
from fedveil.foreign import shown

_ASK = "import torch; print(torch.cuda.device_count())"
_SECONDS = 300.0


def require(device: str) -> None:
    """Raises ConfigError where `device` names a GPU that torch does not find; "auto" and "cpu" are always there."""
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return
    if index and not (index.isascii() and index.isdigit()):
        raise ConfigError(f'device: expected "auto", "cpu", "cuda" or "cuda:0", found "{shown(device, 60)}"')
    try:
        asked = subprocess.run(
            [sys.executable, "-P", "-c", _ASK], capture_output=True, text=True, timeout=_SECONDS, check=True
        )
        count = int(asked.stdout.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise ConfigError(
            f"device: expected that torch counts the GPUs for {device!r}, found it does not ({shown(error, 300)}); "
            "fedveil doctor looks closer"
        ) from None
    if int(index or 0) >= count:
        raise ConfigError(
            f'device: expected "auto", "cpu" or one of the {count} GPUs that torch finds here, found "{device}"; '
            "--device auto takes what is there, and fedveil doctor looks closer"
        )
