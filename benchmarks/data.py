"""Where the data of the presets lies: $FEDVEIL_DATA/<name>, or shared/data/<name> beside the repository."""

from __future__ import annotations

import os
from pathlib import Path

from fedveil.errors import ConfigError

VARIABLE = "FEDVEIL_DATA"


def folder(name: str) -> Path:
    """The data folder of that name. Raises ConfigError with the places looked at."""
    root = Path(__file__).parent.parent
    places = (
        [Path(os.environ[VARIABLE])] if VARIABLE in os.environ else [root.parent / "shared" / "data", root / "data"]
    )
    for place in places:
        if (place / name).is_dir():
            return place / name
    looked = ", ".join(str(p / name) for p in places)
    raise ConfigError(
        f"data {name}: expected a folder, found none at {looked}; set {VARIABLE} to the folder that holds {name}"
    )
