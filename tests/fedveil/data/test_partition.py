"""Every row is in exactly one part, every process cuts the data in the same way, and impossible cuts are refused."""

from __future__ import annotations

from collections import Counter

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.config import TaskConfig
from fedveil.contract.task import DatasetShard
from fedveil.data.partition import example_labels, partition_rows
from fedveil.errors import TaskError

FOODS = ["Italian", "French", "English", "Indian"]


def table(n: int) -> Dataset:
    return Dataset.from_list([{"id": i, "mr": f"name[X{i}], food[{FOODS[i * 3 % 7 % 4]}]"} for i in range(n)])


def task(partition: str, **fields) -> TaskConfig:
    return TaskConfig(partition=partition, label_pattern=r"food\[(.*?)\]", **fields)


def parts(rows: Dataset, count: int, config: TaskConfig, seed: int = 3) -> list[list[int]]:
    """Ids of each part; each one cut anew, as every site does in its own process."""
    return [list(partition_rows(rows, DatasetShard(i, count), config, seed)["id"]) for i in range(count)]


@pytest.mark.long
@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["iid", "dirichlet", "pathological", "natural"]),
    st.integers(1, 4),
    st.integers(24, 60),
    st.integers(0, 5),
)
def test_parts_cover_the_rows_once(partition, count, n, seed):
    config = task(partition, alpha=2.0, classes_per_site=4)
    shards = parts(table(n), count, config, seed)
    assert all(shards)
    assert sorted(i for part in shards for i in part) == list(range(n))
    assert shards == parts(table(n), count, config, seed)


def test_iid_parts_are_even_shuffled_and_keep_the_columns():
    rows = table(41)
    shards = parts(rows, 4, task("iid"))
    assert sorted(map(len, shards)) == [10, 10, 10, 11]
    assert shards[0] != sorted(shards[0])
    assert shards != parts(rows, 4, task("iid"), seed=4)
    assert partition_rows(rows, DatasetShard(0, 4), task("dirichlet", alpha=5.0), 3).column_names == ["id", "mr"]


def test_a_small_alpha_skews_the_labels():
    rows = table(280)

    def skew(alpha: float) -> float:
        """Largest share that one site has of a label, mean over labels."""
        config = task("dirichlet", alpha=alpha)
        label_counts = [
            Counter(example_labels(partition_rows(rows, DatasetShard(i, 3), config, 1), config)) for i in range(3)
        ]
        shares = [
            max(h[food] for h in label_counts) / sum(h[food] for h in label_counts)
            for food in set().union(*label_counts)
        ]
        return sum(shares) / len(shares)

    assert skew(0.05) > 0.8 > 0.45 > skew(500.0)


def test_pathological_sites_hold_as_many_labels_as_asked():
    config = task("pathological", classes_per_site=2)
    rows = table(84)
    for i in range(4):
        assert len(set(example_labels(partition_rows(rows, DatasetShard(i, 4), config, 1), config))) == 2


def test_whole_labels_go_to_one_site_each_by_the_paper_s_rule():
    """round(C / N) labels of a shuffled order to every site, the remainder to the last one."""
    rows = Dataset.from_list([{"id": i, "mr": f"food[F{i % 31:02d}]"} for i in range(93)])
    config = task("pathological", classes_per_site=0)
    label_sets = [set(example_labels(partition_rows(rows, DatasetShard(i, 10), config, 1), config)) for i in range(10)]
    assert [len(h) for h in label_sets] == [3] * 9 + [4]
    assert len(set().union(*label_sets)) == 31
    other = [set(example_labels(partition_rows(rows, DatasetShard(i, 10), config, 2), config)) for i in range(10)]
    assert label_sets != other
    assert label_sets[0] != {"F00", "F01", "F02"}
    assert sorted(i for part in parts(rows, 10, config) for i in part) == list(range(93))
    assert [
        len(set(example_labels(partition_rows(rows, DatasetShard(i, 4), config, 1), config))) for i in range(4)
    ] == [8, 8, 8, 7]


def test_natural_labels_stay_whole_when_dealt_to_fewer_sites():
    config = task("natural")
    rows = table(84)
    label_sets = [set(example_labels(partition_rows(rows, DatasetShard(i, 2), config, 1), config)) for i in range(2)]
    assert label_sets[0] | label_sets[1] == set(example_labels(rows, config))
    assert not label_sets[0] & label_sets[1]


def test_labels_by_hand():
    rows = Dataset.from_dict({"mr": ["food[Thai], x", "x", None, "food[]"]})
    assert example_labels(rows, task("iid")) == ["Thai", "none", "none", "none"]
    assert example_labels(rows, TaskConfig(label_pattern="")) == ["food[Thai], x", "x", "none", "food[]"]


@pytest.mark.parametrize(
    ("share", "config", "message"),
    [
        (DatasetShard(2, 2), task("iid"), "share: expected an index from 0 to 1, found 2"),
        (DatasetShard(-1, 2), task("iid"), "found -1"),
        (DatasetShard(0, 99), task("iid"), "rows are too few for"),
        (DatasetShard(0, 9), task("natural"), "labels are too few for 9 sites"),
        (DatasetShard(0, 2), task("pathological", classes_per_site=1), "raise task.classes-per-site to "),
        (DatasetShard(0, 2), task("pathological", classes_per_site=9), "task.partition pathological"),
        (
            DatasetShard(0, 9),
            task("pathological", classes_per_site=0),
            "labels are too few for 9 sites, of which all but the last need 1",
        ),
        (DatasetShard(0, 30), task("dirichlet", alpha=0.001), "raise task.alpha"),
        (DatasetShard(0, 2), TaskConfig(partition="natural", label_column="nowhere"), "its columns are id, mr"),
        (DatasetShard(0, 2), TaskConfig(partition="natural", label_pattern="food"), "expected one group"),
        (DatasetShard(0, 2), TaskConfig(partition="natural", label_pattern="("), "is not a regular expression"),
    ],
)
def test_impossible_cuts_are_refused(share, config, message):
    with pytest.raises(TaskError, match=message):
        partition_rows(table(40), share, config, 1)
