"""Locate the bundled bases: each task's own small model, in the folder `tiny-<task>`, for offline use.

The scripts that created them are in the repository's `tools/`. The app bundle that Flower sends contains no weights.
Inside a running app, the app's own copy of `fedveil/` hides the installed one; `bundled_folder` searches both places.

It imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlparse

from fedveil import paths
from fedveil.models.published_name import bundled_task

FILES = ("config.json", "model.safetensors", "tokenizer.json")
ASSETS_VARIABLE = "FEDVEIL_ASSETS"
HOW_TO_GET_IT = f"install fedveil with pip, or set {ASSETS_VARIABLE} to a copy of the repository's fedveil/assets"


def bundled_folder(task: str) -> Path | None:
    """Return the folder of a task's tiny base; None if the task has none, or if it is not installed.

    The search covers $FEDVEIL_ASSETS, this package's folder, the installed distribution "fedveil" (also an editable
    one), and every folder in sys.path. A folder that lacks any of FILES does not count.
    """
    for assets in dict.fromkeys(_assets()):
        folder = assets / f"tiny-{bundled_task(task)}"
        if all((folder / file).is_file() for file in FILES):
            return folder
    return None


def _assets() -> Iterator[Path]:
    """Yield the folders that may contain bundled bases."""
    if os.environ.get(ASSETS_VARIABLE):
        yield Path(os.environ[ASSETS_VARIABLE])
    yield paths.package_folder() / "assets"
    for root in [*_installed_roots(), *map(Path, sys.path)]:
        yield root / "fedveil" / "assets"


def _installed_roots() -> Iterator[Path]:
    """Yield the folders where pip installed the distribution: site-packages, or an editable install's checkout."""
    try:
        distribution = importlib.metadata.distribution("fedveil")
    except importlib.metadata.PackageNotFoundError:
        return
    yield Path(str(distribution.locate_file("")))
    url = urlparse(json.loads(distribution.read_text("direct_url.json") or "{}").get("url", ""))
    if url.scheme == "file":
        yield Path(unquote(url.path))
