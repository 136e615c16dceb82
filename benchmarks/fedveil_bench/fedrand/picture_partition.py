"""The images for one part of a table and one seed: members partitioned over the clients, non-members, test rows."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from fedveil.contract.task import DatasetShard, Example, Rows
from fedveil.data import partition
from fedveil.tasks.vision_language import VisionLanguage
from fedveil_bench.common import pictures


@dataclass(frozen=True)
class PicturePartition:
    """The data for one seed of one part.

    Attributes:
        clients: each client's members.
        held_out: examples from the members' distribution that no client has.
        shifted: rows from a different data set.
        test: examples for measuring quality.
        labels: the labels of each client's rows, and of the held-out rows under "".
    """

    clients: Mapping[str, Rows]
    held_out: Rows
    shifted: Rows
    test: Sequence[pictures.Example]
    labels: Mapping[str, Sequence[str]]

    @property
    def members(self) -> list[Any]:
        """Return all clients' rows."""
        return [row for of_client in self.clients.values() for row in of_client]


def draw_partition(
    settings: Mapping[str, Any], part: Mapping[str, Any], task: VisionLanguage, seed: int
) -> PicturePartition:
    """Return the rows for one part and seed. Raises ConfigError or TaskError if the data are missing."""
    pool = _shuffled(pictures.load_examples(part["data"], "train"), seed)
    members, held_out = part["members"], part["held_out"]
    test = _shuffled(pictures.load_examples(part["test"], "test"), 0) if part.get("test") else pool[members:]
    shifted = pictures.load_examples(part["shifted"], "test") if part.get("shifted") else []
    shifted = _shuffled(shifted, 0)[: part.get("shifted_rows", held_out)]
    table = Dataset.from_list([dict(row) for row in pool[:members]])
    parts = [
        partition.partition_rows(table, DatasetShard(i, settings["clients"]), task.config.task, seed)
        for i in range(settings["clients"])
    ]
    of_clients = {f"client-{i:02d}": of_site.to_list() for i, of_site in enumerate(parts)}
    others = pool[members : members + held_out]
    return PicturePartition(
        {client: task.encode(Example.from_columns(rows)) for client, rows in of_clients.items()},
        task.encode(Example.from_columns(others)),
        task.encode(Example.from_columns(shifted)),
        test[: part["test_rows"]],
        {client: [row["label"] for row in rows] for client, rows in {**of_clients, "": others}.items()},
    )


def _shuffled(found: Sequence[pictures.Example], seed: int) -> list[pictures.Example]:
    return random.Random(seed).sample(list(found), len(found))
