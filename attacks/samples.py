"""The auditor's examples: those that each site trained on, and others that no site had."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset

from fedveil import strategies, tasks
from fedveil.config import RunConfig, parse
from fedveil.contract.task import DatasetShard, Example, Examples, Rows, Task
from fedveil.data import partition
from fedveil.errors import ConfigError, TaskError

__all__ = [
    "AuditDataSource",
    "AuditSample",
    "draw_non_members",
    "draw_samples",
    "encode_examples",
    "natural_key",
    "site_members",
]

LEAST = 20  # minimum number of examples per side for a meaningful interval


@dataclass(frozen=True)
class AuditSample:
    """Preprocessed examples with their labels (all "" if they have none)."""

    rows: Rows
    labels: Sequence[str]

    def first(self, most: int) -> AuditSample:
        """Return the first `most` examples, or all of them if there are fewer."""
        return AuditSample(self.rows[:most], self.labels[:most])

    def shuffled(self, seed: int) -> AuditSample:
        """Return the examples in random order."""
        at = random.Random(seed).sample(range(len(self.rows)), len(self.rows))
        return AuditSample([self.rows[i] for i in at], [self.labels[i] for i in at])

    def halves(self, most: int) -> tuple[AuditSample, AuditSample]:
        """Return two disjoint samples of equal size: at most `most` examples each, and at most half of all."""
        size = min(most, len(self.rows) // 2)
        return self.first(size), AuditSample(self.rows[size : 2 * size], self.labels[size : 2 * size])

    def alike(self, labels: Sequence[str], most: int) -> AuditSample:
        """Return at most `most` of the examples whose label is in `labels`."""
        at = [i for i, label in enumerate(self.labels) if label in set(labels)][:most]
        return AuditSample([self.rows[i] for i in at], [self.labels[i] for i in at])


@dataclass(frozen=True)
class AuditDataSource:
    """Location of the auditor's examples. Errors name the options of `fedveil audit`.

    Attributes:
        data: examples of all sites, split as in the run config; None means the run config's task.data.
        sites: alternatively, examples of individual sites by site name.
        non_members: examples that no site has; None means the examples in `data` that task.examples-per-site left
            out, or else the split "test".
        most: maximum number of members, and of non-members.
        seed: seed of the selection.
    """

    data: Path | None = None
    sites: Mapping[str, Path] = field(default_factory=dict)
    non_members: Path | None = None
    most: int = 300
    seed: int = 0

    def __post_init__(self) -> None:
        if self.most < LEAST:
            raise ConfigError(
                f"--max-rows: expected at least {LEAST}, found {self.most}; an interval over fewer examples is "
                "meaningless"
            )

    def some(self, rows: Examples) -> Examples:
        """Return at most `most` of the examples, chosen by the seed."""
        return rows if len(rows) <= self.most else random.Random(self.seed).sample(list(rows), self.most)


def draw_samples(
    source: AuditDataSource, config: RunConfig, task: Task, asked: Sequence[str], took_part: Sequence[str]
) -> tuple[dict[str, AuditSample], AuditSample]:
    """Return the preprocessed members of each site that took part, and non-members. `asked` lists the run's sites.

    Raises:
        ConfigError: `source` names no examples, or there are too few.
    """
    members = site_members(source, config, task, asked, took_part)
    others = source.some(draw_non_members(source, config, members, len(asked)))
    sides = [*map(source.some, members.values()), others]
    rows = iter(encode_examples(task, [example for side in sides for example in side]))
    *of_members, rest = (_prepared(config, side, [next(rows) for _ in side]) for side in sides)
    prepared = dict(zip(members, of_members, strict=True))
    count = sum(len(sample.rows) for sample in prepared.values())
    if min(count, len(rest.rows)) < LEAST:
        raise ConfigError(
            f"--data, --non-members: an interval needs at least {LEAST} members and {LEAST} non-members, found "
            f"{count} and {len(rest.rows)}"
        )
    return prepared, rest


def site_members(
    source: AuditDataSource, config: RunConfig, task: Task, asked: Sequence[str], took_part: Sequence[str]
) -> dict[str, Examples]:
    """Return each participating site's training examples; shares are assigned to the run's sites in name order.

    Raises ConfigError if the sites held out examples, because only they know which.
    """
    if config.held_out_key:
        raise ConfigError(
            f"{config.held_out_key}: the sites held out {config.held_out_fraction:g} of their examples, and only a "
            "site knows which ones, so the audit cannot tell members apart; leave this key out, and run again"
        )
    if source.sites:
        if unknown := sorted(set(source.sites) - set(took_part)):
            raise ConfigError(
                f"--site: {unknown[0]} did not take part in the run; its sites are {', '.join(took_part)}"
            )
        return {site: task.examples(folder, "train") for site, folder in source.sites.items()}
    data = _data(source, config)
    if data is None:
        raise ConfigError(
            "--data: the run config does not name the sites' examples, because each site chose its own folder; "
            "give --data, or --site NAME=FOLDER for each site whose examples you have"
        )
    every = sorted(asked, key=natural_key)
    return {site: task.examples(data, "train", DatasetShard(every.index(site), len(every))) for site in took_part}


def draw_non_members(
    source: AuditDataSource, config: RunConfig, members: Mapping[str, Examples], sites: int
) -> Examples:
    """Return examples that no site has: those in `source`, those beyond examples-per-site, or the split "test"."""
    whole = parse(config.flat() | {"task.examples-per-site": 0})
    task = tasks.load_task(whole, strategies.create_method("fedavg").adapter, "cpu")  # only reads examples
    if source.non_members:
        try:
            return task.examples(source.non_members, "test")
        except TaskError as error:  # its message names task.data, not the option
            raise ConfigError(f"--non-members: {str(error).removeprefix('task.data: ')}") from error
    data = _data(source, config)
    if data is None:
        raise ConfigError("--non-members: give a folder or file with examples that no site has")
    if config.task.examples_per_site and not source.sites:
        used = {row.origin for rows in members.values() for row in rows}
        every = (row for i in range(sites) for row in task.examples(data, "train", DatasetShard(i, sites)))
        if left := [row for row in every if row.origin not in used]:
            return left
    return task.examples(data, "test")


def _data(source: AuditDataSource, config: RunConfig) -> Path | None:
    return source.data or (Path(config.task.data) if config.task.data else None)


def natural_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders site-2 before site-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def encode_examples(task: Task, examples: Sequence[Example]) -> list[Rows]:
    """Preprocess all examples in one call, because a task may log what it truncates; return each example's rows."""
    rows = task.encode(examples)
    if len(rows) != len(examples):  # the task makes several rows from one example
        return [task.encode([example]) for example in examples]
    return [[row] for row in rows]


def _prepared(config: RunConfig, examples: Examples, prepared: Sequence[Rows]) -> AuditSample:
    """Return the rows, each with its example's label, or "" if the data was not partitioned by label."""
    skewed = config.task.partition != "iid"  # otherwise no labels are specific to a site
    name = config.task.label_column
    labels = [""] * len(examples)
    if skewed and examples and name in examples[0].values:
        labels = partition.example_labels(
            Dataset.from_list([{name: example.values[name]} for example in examples]), config.task
        )
    return AuditSample(
        [row for rows in prepared for row in rows],
        [label for label, rows in zip(labels, prepared, strict=True) for _ in rows],
    )
