"""The public name of a base, for files that leave this machine: its Hub ID or a plain name, never a path.

It imports neither torch nor transformers.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_SHARED_BASES = {  # tasks that do not have their own small base
    "preference": "text-generation",
    "text-classification": "text-generation",
    "token-classification": "text-generation",
}
_ON_THE_HUB = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}")


def is_on_the_hub(model: str) -> bool:
    """Return whether a base has a Hub name, "owner/name", and is not a local folder, whose path would reveal more."""
    return bool(_ON_THE_HUB.fullmatch(model)) and not Path(model).expanduser().exists()


def published_name(model: str, task: str) -> str:
    """Return the publishable form of `task.model`: a Hub ID unchanged, or the last part of a path.

    "tiny" becomes "fedveil/tiny-<task>": not a Hub ID, but a name that identifies its owner.
    """
    if model == "tiny":
        return bundled_name(task)
    if not model or is_on_the_hub(model):
        return model
    return Path(os.path.abspath(Path(model).expanduser())).name  # for a link, its own last part, not its target's


def bundled_task(task: str) -> str:
    """Return the task whose small base this task uses: its own, unless it shares another task's."""
    return _SHARED_BASES.get(task, task)


def bundled_name(task: str) -> str:
    """Return the name of a task's small base."""
    return f"fedveil/tiny-{bundled_task(task)}"
