"""Find the files of fedveil-bench: in a wheel, in an editable installation, or in a checkout on PYTHONPATH.

| file | in a wheel | in a checkout |
|---|---|---|
| presets | in the package | benchmarks/presets, linked from the package |
| results | not included | benchmarks/results |

No other module in the package guesses folders.
"""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from fedveil.errors import ConfigError


def package_folder() -> Path:
    """Return the folder of the package `fedveil_bench`."""
    return Path(str(importlib.resources.files("fedveil_bench"))).absolute()


def checkout_folder() -> Path | None:
    """Return the repository that this package runs from; None if it is installed from a wheel."""
    distribution = package_folder().parent
    is_checkout = distribution.name == "benchmarks" and (distribution / "pyproject.toml").is_file()
    return distribution.parent if is_checkout else None


def presets_folder() -> Path:
    """Return the presets folder. In a clone without symbolic links, the package has a text file in its place."""
    inside = package_folder() / "presets"
    return inside if inside.is_dir() else package_folder().parent / "presets"


def results_folder() -> Path | None:
    """Return the folder of the committed results; None outside a checkout."""
    root = checkout_folder()
    return root / "benchmarks" / "results" if root else None


def find_folder(name: str) -> Path:
    """Return a folder of the package: "peers/stock_flower". Raise ConfigError if it is missing."""
    folder = package_folder() / name
    if not folder.is_dir():
        raise ConfigError(
            f"installation: expected the folder {name}, found none in {package_folder()}; reinstall fedveil-bench"
        )
    return folder


def require_results() -> Path:
    """Return the folder of the committed results. Raise ConfigError outside a checkout."""
    folder = results_folder()
    if folder is None:
        raise ConfigError(
            f"results: expected benchmarks/results next to the package, found none at {package_folder()}; run this "
            "in a checkout of the repository"
        )
    return folder
