"""Every row is in exactly one part, every process cuts alike, and an impossible cut is refused."""

from __future__ import annotations

from collections import Counter

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.config import TaskConfig
from fedveil.contract.task import Share
from fedveil.errors import TaskError
from fedveil.rows.partition import cut, labels

FOODS = ["Italian", "French", "English", "Indian"]


def table(n: int) -> Dataset:
    return Dataset.from_list([{"id": i, "mr": f"name[X{i}], food[{FOODS[i * 3 % 7 % 4]}]"} for i in range(n)])


def task(partition: str, **fields) -> TaskConfig:
    return TaskConfig(partition=partition, label_pattern=r"food\[(.*?)\]", **fields)


def parts(rows: Dataset, count: int, config: TaskConfig, seed: int = 3) -> list[list[int]]:
    """Ids of each part; each one cut anew, as every site does in its own process."""
    return [list(cut(rows, Share(i, count), config, seed)["id"]) for i in range(count)]


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
    found = parts(table(n), count, config, seed)
    assert all(found)
    assert sorted(i for part in found for i in part) == list(range(n))
    assert found == parts(table(n), count, config, seed)


def test_iid_parts_are_even_shuffled_and_keep_the_columns():
    rows = table(41)
    found = parts(rows, 4, task("iid"))
    assert sorted(map(len, found)) == [10, 10, 10, 11]
    assert found[0] != sorted(found[0])
    assert found != parts(rows, 4, task("iid"), seed=4)
    assert cut(rows, Share(0, 4), task("dirichlet", alpha=5.0), 3).column_names == ["id", "mr"]


def test_a_small_alpha_skews_the_labels():
    rows = table(280)

    def skew(alpha: float) -> float:
        """Largest share that one site has of a label, mean over labels."""
        config = task("dirichlet", alpha=alpha)
        held = [Counter(labels(cut(rows, Share(i, 3), config, 1), config)) for i in range(3)]
        shares = [max(h[food] for h in held) / sum(h[food] for h in held) for food in set().union(*held)]
        return sum(shares) / len(shares)

    assert skew(0.05) > 0.8 > 0.45 > skew(500.0)


def test_pathological_sites_hold_as_many_labels_as_asked():
    config = task("pathological", classes_per_site=2)
    rows = table(84)
    for i in range(4):
        assert len(set(labels(cut(rows, Share(i, 4), config, 1), config))) == 2


def test_whole_labels_go_to_one_site_each_by_the_paper_s_rule():
    """round(C / N) labels of a shuffled order to every site, the remainder to the last one."""
    rows = Dataset.from_list([{"id": i, "mr": f"food[F{i % 31:02d}]"} for i in range(93)])
    config = task("pathological", classes_per_site=0)
    held = [set(labels(cut(rows, Share(i, 10), config, 1), config)) for i in range(10)]
    assert [len(h) for h in held] == [3] * 9 + [4]
    assert len(set().union(*held)) == 31
    other = [set(labels(cut(rows, Share(i, 10), config, 2), config)) for i in range(10)]
    assert held != other
    assert held[0] != {"F00", "F01", "F02"}
    assert sorted(i for part in parts(rows, 10, config) for i in part) == list(range(93))
    assert [len(set(labels(cut(rows, Share(i, 4), config, 1), config))) for i in range(4)] == [8, 8, 8, 7]


def test_natural_labels_stay_whole_when_dealt_to_fewer_sites():
    config = task("natural")
    rows = table(84)
    held = [set(labels(cut(rows, Share(i, 2), config, 1), config)) for i in range(2)]
    assert held[0] | held[1] == set(labels(rows, config))
    assert not held[0] & held[1]


def test_labels_by_hand():
    rows = Dataset.from_dict({"mr": ["food[Thai], x", "x", None, "food[]"]})
    assert labels(rows, task("iid")) == ["Thai", "none", "none", "none"]
    assert labels(rows, TaskConfig(label_pattern="")) == ["food[Thai], x", "x", "none", "food[]"]


@pytest.mark.parametrize(
    ("share", "config", "message"),
    [
        (Share(2, 2), task("iid"), "share: expected an index from 0 to 1, found 2"),
        (Share(-1, 2), task("iid"), "found -1"),
        (Share(0, 99), task("iid"), "at least one row a site"),
        (Share(0, 9), task("natural"), "at least 9 labels for 9 sites"),
        (Share(0, 2), task("pathological", classes_per_site=1), "raise task.classes-per-site to "),
        (Share(0, 2), task("pathological", classes_per_site=9), "task.partition pathological"),
        (Share(0, 9), task("pathological", classes_per_site=0), "expected 1 labels for every site"),
        (Share(0, 30), task("dirichlet", alpha=0.001), "raise task.alpha"),
        (Share(0, 2), TaskConfig(partition="natural", label_column="nowhere"), "it has id, mr"),
        (Share(0, 2), TaskConfig(partition="natural", label_pattern="food"), "expected one group"),
        (Share(0, 2), TaskConfig(partition="natural", label_pattern="("), "expected a regular expression"),
    ],
)
def test_impossible_cuts_are_refused(share, config, message):
    with pytest.raises(TaskError, match=message):
        cut(table(40), share, config, 1)
