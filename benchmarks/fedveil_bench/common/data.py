"""Find the presets' data: $FEDVEIL_DATA/<name>, otherwise shared/data/<name> next to a checkout, otherwise bundled.

A runner whose preset has one folder `data` with train and test examples, and a base in its config, needs nothing else
for `fedveil bench --dry-run`. Other runners define `list_requirements(settings) -> list[DataRequirement]`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil import resources
from fedveil.errors import ConfigError
from fedveil_bench import folders

VARIABLE = "FEDVEIL_DATA"
ROWS = (".jsonl", ".parquet")


@dataclass(frozen=True)
class DataRequirement:
    """A folder that a preset reads.

    Attributes:
        name: name of the folder.
        splits: names of the data files in the folder, without suffix; empty if the folder is a base model.
        suffixes: suffixes that a data file may have.
    """

    name: str
    splits: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ROWS


def find_data_folder(name: str) -> Path:
    """Return the data folder with this name. Raises a ConfigError that lists the places searched."""
    root = folders.checkout_folder()
    looked_in = [resources.data_folder()]
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
    """Return a flat run config with a path as `task.model`: the data folder with that name, unless it is "tiny"."""
    model = flat.get("task.model", "tiny")
    return dict(flat) if model == "tiny" else {**flat, "task.model": str(find_data_folder(model))}


def list_requirements(settings: Mapping[str, Any]) -> list[DataRequirement]:
    """Return the requirements in a preset's settings: examples for training and testing, and a base."""
    rows = [DataRequirement(settings["data"], ("train", "test"))] if "data" in settings else []
    return [*rows, *list_base_requirements(settings)]


def list_base_requirements(settings: Mapping[str, Any]) -> list[DataRequirement]:
    """Return the base named in the settings' run config, or an empty list if it is bundled."""
    model = settings.get("config", {}).get("task.model", "tiny")
    return [] if model == "tiny" else [DataRequirement(model)]


def describe_files(need: DataRequirement) -> str:
    """Describe the files found. Opens every file, but reads no more than its beginning and end.

    Raises:
        ConfigError: a folder or file is missing or cannot be read.
    """
    place = find_data_folder(need.name)
    try:
        return f"{need.name}: {place}, " + (_rows(place, need) if need.splits else _base(place))
    except (OSError, ValueError) as error:
        raise ConfigError(f"data {need.name}: expected files that can be read in {place}, found {error}") from None


def _rows(place: Path, need: DataRequirement) -> str:
    found = []
    for split in need.splits:
        file = next((f for suffix in need.suffixes if (f := place / f"{split}{suffix}").is_file()), None)
        if file is None:
            asked = " or ".join(f"{split}{suffix}" for suffix in need.suffixes)
            raise ConfigError(f"data {need.name}: expected {asked} in {place}, found none")
        with file.open("rb") as content:
            if file.suffix == ".parquet":
                begin = content.read(4)
                content.seek(-4, os.SEEK_END)
                if begin + content.read(4) != b"PAR1PAR1":
                    raise ValueError(f"{file.name}, which is not a complete parquet file")
            elif not isinstance(json.loads(content.readline()), dict):
                raise ValueError(f"{file.name}, whose first line is not a row")
        found.append(f"{file.name} {file.stat().st_size / 1e6:.1f} MB")
    return ", ".join(found)


def _base(place: Path) -> str:
    kind = json.loads((place / "config.json").read_text()).get("model_type", "a model of unknown type")
    index = place / "model.safetensors.index.json"
    named = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else set()
    files = [place / name for name in sorted(named)] or sorted([*place.glob("*.safetensors"), *place.glob("*.bin")])
    if not files:
        raise ConfigError(f"data {place.name}: expected *.safetensors in {place}, found none")
    for file in files:
        with file.open("rb") as content:
            content.read(8)
    return f"{kind}, {sum(file.stat().st_size for file in files) / 1e9:.2f} GB of weights"
