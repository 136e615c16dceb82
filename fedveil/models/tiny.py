"""Where the bundled bases lie: the folder `tiny-<task>` of a task's own small model, for offline use.

The scripts that made them are in `tools/` of the repository. The bundle that Flower carries holds no weights, and
inside a running app the app's own copy of `fedveil/` hides the installed one; `folder` looks in both places.

Imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlparse

from fedveil import places

FILES = ("config.json", "model.safetensors", "tokenizer.json")
ASSETS_VARIABLE = "FEDVEIL_ASSETS"
HOW_TO_GET_IT = f"install fedveil with pip, or set {ASSETS_VARIABLE} to a copy of the repository's fedveil/assets"


def folder(task: str) -> Path | None:
    """The folder of a task's tiny base; None for a task that has none, or where it is not installed.

    Looked for in $FEDVEIL_ASSETS, beside this package, in the installed distribution "fedveil" (also an
    editable one), and in every folder of sys.path. A folder that lacks one of FILES does not count.
    """
    for assets in dict.fromkeys(_assets()):
        if all((assets / f"tiny-{task}" / file).is_file() for file in FILES):
            return assets / f"tiny-{task}"
    return None


def _assets() -> Iterator[Path]:
    """Where bundled bases may lie."""
    if os.environ.get(ASSETS_VARIABLE):
        yield Path(os.environ[ASSETS_VARIABLE])
    yield places.package() / "assets"
    for root in [*_installed_roots(), *map(Path, sys.path)]:
        yield root / "fedveil" / "assets"


def _installed_roots() -> Iterator[Path]:
    """Where pip put the distribution: its site-packages, and the checkout behind an editable install."""
    try:
        distribution = importlib.metadata.distribution("fedveil")
    except importlib.metadata.PackageNotFoundError:
        return
    yield Path(str(distribution.locate_file("")))
    url = urlparse(json.loads(distribution.read_text("direct_url.json") or "{}").get("url", ""))
    if url.scheme == "file":
        yield Path(unquote(url.path))
