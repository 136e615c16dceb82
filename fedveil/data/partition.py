"""Partition one table among several sites, with the partitioners of flwr-datasets.

Every site's process splits the same table with the same seed and uses its own part, so nothing needs to be sent. Each
row is in exactly one part, and no part is empty; if a partition cannot satisfy this, it is refused.

| task.partition | the part for a site |
|---|---|
| iid | an equal share of the shuffled rows |
| dirichlet | a share of each label, drawn from Dirichlet(task.alpha) |
| pathological | the rows of task.classes-per-site labels; sites with the same label split its rows |
| pathological, task.classes-per-site 0 | the rows of whole labels: round(C / sites) of C shuffled labels for each site,
  and the rest for the last site (Tran et al. 2025, DP-FPL) |
| natural | the rows of whole labels; if there are more labels than sites, the sorted labels are assigned in turn |
"""

from __future__ import annotations

import contextlib
import io
import random
import re
import warnings
from typing import TYPE_CHECKING

from fedveil.errors import TaskError

if TYPE_CHECKING:
    from datasets import Dataset
    from flwr_datasets.partitioner import Partitioner

    from fedveil.config import TaskConfig
    from fedveil.contract.task import DatasetShard

__all__ = ["NO_LABEL", "example_labels", "partition_indices", "partition_rows"]

NO_LABEL = "none"
_INDEX, _LABEL = "index", "label"


def partition_rows(rows: Dataset, share: DatasetShard, task: TaskConfig, seed: int) -> Dataset:
    """Return the part of `rows` for site `share.index` out of `share.count`. Raises the same errors as
    `partition_indices`."""
    return rows.select(partition_indices(rows, share, task, seed))


def partition_indices(rows: Dataset, share: DatasetShard, task: TaskConfig, seed: int) -> list[int]:
    """Return the row indices for site `share.index` out of `share.count`, in the order of its part.

    Raises:
        TaskError: the index is out of range, or no partition gives every site some rows and every row a site.
    """
    from datasets import Dataset

    if not 0 <= share.index < share.count:
        raise TaskError(
            f"share: expected an index from 0 to {share.count - 1}, found {share.index}; number the sites from 0, "
            "each with its own index"
        )
    if len(rows) < share.count:
        raise TaskError(
            f"task.data: {len(rows)} rows are too few for {share.count} sites; add rows, or use fewer sites"
        )
    # The partitioners get a separate table, so that they cannot mistake a user's column for one of their own.
    table = Dataset.from_dict({_INDEX: range(len(rows))})
    if task.partition == "iid":
        part = _load(_partitioner([], share, task, seed), table.shuffle(seed=seed), share, task)
        return list(part[_INDEX])
    labels = example_labels(rows, task)
    if task.partition == "natural":
        labels = _dealt(labels, share)
    if _is_apart(task):
        labels = _apart(labels, share, seed)
    part = _load(_partitioner(labels, share, task, seed), table.add_column(_LABEL, labels), share, task)
    return list(part[_INDEX])


def example_labels(rows: Dataset, task: TaskConfig) -> list[str]:
    """Return each row's label: its value in task.label-column, or the part that task.label-pattern captures.

    Raises:
        TaskError: the column is missing, or the pattern is not a regular expression with one group.
    """
    if task.label_column not in rows.column_names:
        raise TaskError(
            f'task.label-column: the data has no column "{task.label_column}"; its columns are '
            f"{', '.join(rows.column_names)}"
        )
    values = ["" if value is None else str(value) for value in rows[task.label_column]]
    if not task.label_pattern:
        return [value or NO_LABEL for value in values]
    try:
        pattern = re.compile(task.label_pattern)
    except re.error as error:
        raise TaskError(f'task.label-pattern: "{task.label_pattern}" is not a regular expression ({error})') from None
    if pattern.groups != 1:
        raise TaskError(
            f"task.label-pattern: expected one group in parentheses, found {pattern.groups} "
            f'in "{task.label_pattern}"; mark the label with (...) and other brackets with (?:...)'
        )
    return [match[1] or NO_LABEL if (match := pattern.search(value)) else NO_LABEL for value in values]


def _dealt(found: list[str], share: DatasetShard) -> list[str]:
    """Assign whole labels to the sites in turn; return a group name for each row, with as many groups as sites."""
    distinct = sorted(set(found))
    if len(distinct) < share.count:
        raise TaskError(
            f"task.partition natural: {len(distinct)} labels are too few for {share.count} sites; use fewer sites, "
            "another task.label-column, or another partition"
        )
    group = {label: f"{position % share.count:09d}" for position, label in enumerate(distinct)}
    return [group[label] for label in found]


def _is_apart(task: TaskConfig) -> bool:
    return task.partition == "pathological" and task.classes_per_site == 0


def _apart(found: list[str], share: DatasetShard, seed: int) -> list[str]:
    """Group whole labels, in a seeded order, in runs of round(C / sites) (half to even); return each row's group."""
    distinct = sorted(set(found))
    random.Random(seed).shuffle(distinct)
    run = round(len(distinct) / share.count)
    if run == 0 or run * (share.count - 1) >= len(distinct):
        raise TaskError(
            f"task.partition pathological: {len(distinct)} labels are too few for {share.count} sites, of which "
            f"all but the last need {max(1, run)} and the last needs one; use fewer sites, or set "
            "task.classes-per-site"
        )
    group = {label: f"{min(position // run, share.count - 1):09d}" for position, label in enumerate(distinct)}
    return [group[label] for label in found]


def _partitioner(found: list[str], share: DatasetShard, task: TaskConfig, seed: int) -> Partitioner:
    from flwr_datasets.partitioner import (
        DirichletPartitioner,
        IidPartitioner,
        NaturalIdPartitioner,
        PathologicalPartitioner,
    )

    if _is_apart(task):
        return NaturalIdPartitioner(_LABEL)
    match task.partition:
        case "iid":
            return IidPartitioner(share.count)
        case "dirichlet":
            return DirichletPartitioner(share.count, _LABEL, task.alpha, min_partition_size=1, seed=seed)
        case "pathological":
            # Here site i has the labels i, i + 1, ..., so all labels are used if the last site reaches the last one.
            distinct = len(set(found))
            reached = share.count + task.classes_per_site - 1
            if reached < distinct:
                raise TaskError(
                    f"task.partition pathological: {share.count} sites with {task.classes_per_site} labels each "
                    f"cover only {reached} of the {distinct} labels; raise task.classes-per-site to "
                    f"{distinct - share.count + 1} or narrow task.label-pattern"
                )
            return PathologicalPartitioner(share.count, _LABEL, task.classes_per_site, "deterministic", seed=seed)
        case "natural":
            return NaturalIdPartitioner(_LABEL)


def _load(partitioner: Partitioner, rows: Dataset, share: DatasetShard, task: TaskConfig) -> Dataset:
    partitioner.dataset = rows
    # flwr-datasets warns about each Dirichlet draw that leaves a site empty, and draws again; it raises the last
    # failure. The natural partitioner writes a progress bar to stderr.
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.filterwarnings("ignore", module=r"flwr_datasets\.", category=UserWarning)
        warnings.filterwarnings("ignore", message="The specified min_partition_size", category=UserWarning)
        try:
            part = partitioner.load_partition(share.index)
        except ValueError:  # the error text may quote a label, which is a row value
            raise TaskError(
                f"task.partition {task.partition}: the labels do not allow at least one row for each of "
                f"{share.count} sites; raise task.alpha, or use fewer sites"
            ) from None
    if not len(part):
        raise TaskError(f"task.partition {task.partition}: site {share.index} gets no rows; use fewer sites")
    return part
