"""SHA-256 of what a run was made from: its base model's files, and its config."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedveil.cards.card import Base
from fedveil.models import tiny

_MOST_FILES = 1000


def of_file(file: Path) -> str:
    """64 hex digits."""
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def of_config(config: Mapping[str, Any], method: Mapping[str, Any]) -> str:
    """Of the run config and the method, as compact JSON with sorted keys: {"config": {...}, "method": {...}}."""
    content = {"config": dict(config), "method": dict(method)}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def of_base(task: str, model: str) -> Base:
    """The base's files where they lie on this machine: a folder, the bundled one, or the Hub's cache. Asks nobody."""
    folder, revision = _folder(task, model)
    if folder is None:
        return Base()
    files = sorted(path for path in folder.rglob("*") if path.is_file())[:_MOST_FILES]
    return Base(revision=revision, files={path.relative_to(folder).as_posix()[-300:]: of_file(path) for path in files})


def _folder(task: str, model: str) -> tuple[Path | None, str]:
    if not model:
        return None, ""
    if model == "tiny":
        return tiny.folder(task), ""
    if (folder := Path(model).expanduser()).is_dir():
        return folder, ""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:  # a folder that is not here
        return None, ""
    return (Path(found).parent, Path(found).parent.name) if isinstance(found, str) else (None, "")
