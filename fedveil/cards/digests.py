"""SHA-256 digests of a run's inputs: its base model's files and its config."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedveil.cards.card import BaseModelFiles
from fedveil.models import bundled

_MOST_FILES = 1000


def digest_file(file: Path) -> str:
    """Return the SHA-256 of a file as 64 hex digits."""
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def digest_config(config: Mapping[str, Any], method: Mapping[str, Any]) -> str:
    """Return the SHA-256 of config and method as compact JSON with sorted keys: {"config": {...}, "method": {...}}."""
    content = {"config": dict(config), "method": dict(method)}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def digest_base_model(task: str, model: str) -> BaseModelFiles:
    """Digest the base's files on this machine: a folder, the bundled base, or the Hub cache. No server is contacted."""
    folder, revision = _folder(task, model)
    if folder is None:
        return BaseModelFiles()
    files = sorted(path for path in folder.rglob("*") if path.is_file())[:_MOST_FILES]
    return BaseModelFiles(
        revision=revision, files={path.relative_to(folder).as_posix()[-300:]: digest_file(path) for path in files}
    )


def _folder(task: str, model: str) -> tuple[Path | None, str]:
    if not model:
        return None, ""
    if model == "tiny":
        return bundled.bundled_folder(task), ""
    if (folder := Path(model).expanduser()).is_dir():
        return folder, ""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config_path = try_to_load_from_cache(model, "config.json")
    except HFValidationError:  # a folder that is not on this machine
        return None, ""
    return (Path(config_path).parent, Path(config_path).parent.name) if isinstance(config_path, str) else (None, "")
