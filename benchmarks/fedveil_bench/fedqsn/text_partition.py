"""A seed's text data, partitioned over the server and its clients, and a method's run config."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedveil.config import RunConfig, parse
from fedveil_bench.common import data, texts


@dataclass(frozen=True)
class TextPartition:
    """The rows of one data set and seed.

    Attributes:
        clients: each client's rows.
        validation: rows for selecting models.
        test: rows for scoring models.
        server: the server's own rows, for its work before round 0; no client has them.
    """

    clients: Mapping[str, list[texts.Row]]
    validation: list[texts.Row]
    test: list[texts.Row]
    server: list[texts.Row]


def list_requirements(settings: Mapping[str, Any]) -> list[data.DataRequirement]:
    """Return the requirements: the three splits of every data set, and the base."""
    names = [settings["data"]] if isinstance(settings["data"], str) else settings["data"]
    return [
        *(texts.require_splits(name, "train", "validation", "test") for name in names),
        *data.list_base_requirements(settings),
    ]


def partition_rows(name: str, settings: Mapping[str, Any], seed: int) -> TextPartition:
    """Partition the rows by seed: the server's, then equal parts for the clients. Raises ConfigError without data."""
    train = texts.load_rows(name, "train")
    random.Random(seed).shuffle(train)
    train = train[: settings["rows"] + settings["server_rows"]] if settings["rows"] else train
    server, rest = train[: settings["server_rows"]], train[settings["server_rows"] :]
    count = settings["clients"]
    return TextPartition(
        {f"client-{i:02d}": rest[i::count] for i in range(count)},
        texts.select_rows(
            texts.load_rows(name, "validation"), settings["validation_sources"], settings["references"], seed
        ),
        texts.select_rows(texts.load_rows(name, "test"), settings["test_sources"], settings["references"], seed),
        server,
    )


def build_run_config(settings: Mapping[str, Any], chosen: Mapping[str, Any], seed: int) -> RunConfig:
    """Return a method's run config."""
    flat = {**settings["config"], **chosen.get("config", {}), "run.seed": seed, "run.deterministic": True}
    flat |= {"method.name": chosen["name"], "method.params": chosen.get("fields", "")}
    return parse(data.with_model(flat))
