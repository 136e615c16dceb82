"""What a base is called in files that leave this machine: by its id on the Hub, or a name; never by a path.

Imports neither torch nor transformers.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_ON_THE_HUB = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}")


def is_on_the_hub(model: str) -> bool:
    """Whether a base is named as the Hub names one, "owner/name", and is no folder here: a path would tell more."""
    return bool(_ON_THE_HUB.fullmatch(model)) and not Path(model).expanduser().exists()


def published(model: str, task: str) -> str:
    """`task.model` as others may read it: an id of the Hub as it is, of a path its last part.

    "tiny" is the task's own, "fedveil/tiny-<task>": no id of the Hub, but a name that says whose it is.
    """
    if model == "tiny":
        return bundled(task)
    if not model or is_on_the_hub(model):
        return model
    return Path(os.path.abspath(Path(model).expanduser())).name  # a link keeps its own name


def bundled(task: str) -> str:
    """The name of a task's own small base."""
    return f"fedveil/tiny-{task}"
