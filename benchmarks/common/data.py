"""Where the data of the presets lies: $FEDVEIL_DATA/<name>, or shared/data/<name> beside the repository."""

from __future__ import annotations

import os
from pathlib import Path

from fedveil import places
from fedveil.errors import ConfigError

VARIABLE = "FEDVEIL_DATA"


def folder(name: str) -> Path:
    """The data folder of that name. Raises ConfigError with the places looked at."""
    root = places.checkout()
    looked_in = [places.folder("data")]
    if VARIABLE in os.environ:
        looked_in = [Path(os.environ[VARIABLE])]
    elif root:
        looked_in.insert(0, root.parent / "shared" / "data")
    for place in looked_in:
        if (place / name).is_dir():
            return place / name
    looked = ", ".join(str(p / name) for p in looked_in)
    raise ConfigError(
        f"data {name}: expected a folder, found none at {looked}; set {VARIABLE} to the folder that holds {name}"
    )
