"""A federation that runs in milliseconds: rows of four numbers, two classes, and a model of one layer."""

from __future__ import annotations

import csv
import random
from pathlib import Path

MODULE = """
import csv

import torch
from torch import nn

independent_rows = True
better = {"accuracy": "higher"}


def model():
    return nn.Linear(4, 2)


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def dataset(folder, split):
    rows = list(csv.reader((folder / f"{split}.csv").open()))
    return [(torch.tensor([float(value) for value in row[:4]]), int(row[4])) for row in rows]


def metrics(model, batches):
    hits = torch.cat([model(x).argmax(1) == y for x, y in batches])
    return {"accuracy": hits.float().mean()}


def predict(model, batch):
    return model(batch[0]), batch[1]
"""
SITES = ("north", "south", "west")


def write_federation(folder: Path, rows: int = 32, sites: tuple[str, ...] = SITES) -> dict[str, Path]:
    """Write the module, each site's rows and a server's. Return the sites' folders."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.py").write_text(MODULE)
    draw = random.Random(0)
    for name, split in [*((site, "train") for site in sites), ("server", "test")]:
        (folder / name).mkdir()
        with (folder / name / f"{split}.csv").open("w", newline="") as file:
            for _ in range(rows):
                values = [draw.gauss(0, 1) for _ in range(4)]
                csv.writer(file).writerow([*values, int(values[0] + values[1] > 0)])
    return {site: folder / site for site in sites}


def settings(folder: Path, **keys: object) -> dict[str, object]:
    """Return a run config; `run__rounds=2` sets run.rounds."""
    flat: dict[str, object] = {
        "task.module": str(folder / "mine.py"), "method.name": "fedavg", "run.rounds": 3, "train.learning-rate": 0.05,
        "task.evaluation": str(folder / "server"), "run.deterministic": True,
    }  # fmt: skip
    return flat | {name.replace("__", ".").replace("_", "-"): value for name, value in keys.items()}
