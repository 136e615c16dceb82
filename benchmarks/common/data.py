"""Where the data of the presets lie: $FEDVEIL_DATA/<name>, else shared/data/<name> beside a checkout, else bundled."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedveil import places
from fedveil.errors import ConfigError

VARIABLE = "FEDVEIL_DATA"


def folder(name: str) -> Path:
    """The data folder of that name. Raises ConfigError with the places where it was looked for."""
    root = places.checkout()
    looked_in = [places.folder("data")]
    if VARIABLE in os.environ:
        looked_in.insert(0, Path(os.environ[VARIABLE]))
    elif root:
        looked_in.insert(0, root.parent / "shared" / "data")
    for place in looked_in:
        if (place / name).is_dir():
            return place / name
    looked = ", ".join(str(p / name) for p in looked_in)
    raise ConfigError(
        f"data {name}: expected a folder, found none at {looked}; set {VARIABLE} to the folder that holds {name}"
    )


def with_model(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A flat run config whose `task.model` is a path: the data folder of that name, unless it is "tiny"."""
    model = flat.get("task.model", "tiny")
    return dict(flat) if model == "tiny" else {**flat, "task.model": str(folder(model))}
