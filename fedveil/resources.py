"""Folders that come with every FedVeil installation: the demo data and the bundled base models."""

from __future__ import annotations

from pathlib import Path

from fedveil import paths

__all__ = ["base_folder", "data_folder"]


def data_folder(name: str = "") -> Path:
    """Return the folder of a bundled data set, `data_folder("e2e")`; without a name, the folder with all data sets.

    Raises:
        ConfigError: this installation has no such folder.
    """
    return paths.find_folder(f"data/{name}" if name else "data")


def base_folder(task: str) -> Path:
    """Return the folder of a task's bundled tiny base model: `base_folder("text-generation")`.

    Raises:
        ConfigError: this installation has no such folder.
    """
    return paths.find_folder(f"assets/tiny-{task}")
