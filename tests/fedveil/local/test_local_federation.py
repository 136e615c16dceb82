"""The public Python interface of a federation: the same weights as without it, and errors that say what to do."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import create_autospec

import pytest

from fedveil import paths, rng, strategies, tasks
from fedveil.config import parse
from fedveil.contract.task import DatasetShard, PreparedData, Task
from fedveil.errors import ConfigError, TaskError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.local import LocalFederation
from fedveil.local.local_federation import _rows, _SiteRows

CONFIG = {"method.name": "fedrand", "run.rounds": 1, "run.deterministic": True, "train.max-steps": 2,
          "evaluate.eval-examples": 4, "task.examples-per-site": 60}  # fmt: skip
DATA = paths.find_folder("data/e2e")


def by_hand() -> InProcessFederation:
    config = parse(CONFIG)
    method = strategies.create_method("fedrand", "")
    task = tasks.load_task(config, method.adapter, "cpu")
    rows = {name: task.prepare(DATA, "train", DatasetShard(i, 2)).rows for i, name in enumerate("ab")}
    state = method.init(task.spec, task.initial(rng.initial_stream(0, "weights")), rng.initial_stream(0, "method init"))
    trainer_for = lambda site, ctx: task.trainer(rows[site], ctx.rng("batches"), round_=ctx.round)  # noqa: E731
    return InProcessFederation(
        MessageExchange(method, "fedrand", task.spec), config, trainer_for, ["a", "b"], state, max_share=0.5
    )


@pytest.mark.long
def test_it_ends_with_the_weights_of_the_long_way_and_scores_them():
    local, seen = LocalFederation.from_config(CONFIG, {"a": DATA, "b": str(DATA)}), []
    local.run(lambda now, round_: seen.append((now is local, round_)))
    assert seen == [(True, 0)]
    other = by_hand()
    other.run()
    ours, theirs = local.federation.models()["server"], other.models()["server"]
    assert {name: ours[name].tolist() for name in ours} == {name: theirs[name].tolist() for name in theirs}
    assert abs(local.federation.upload_bytes - other.upload_bytes) <= 2 * 32  # the seconds in a report vary in length
    assert other.upload_bytes > 100_000
    assert local.evaluate(DATA)["loss"] != local.evaluate(DATA, site="a")["loss"]
    with pytest.raises(ConfigError, match="site: expected one of a, b, found 'c'"):
        local.evaluate(DATA, site="c")


def test_rows_are_divided_among_sites_that_name_the_same_folder_alone():
    task = create_autospec(Task, instance=True)
    task.prepare.side_effect = lambda data, split, share: PreparedData([(str(data), split, share)], lambda: ())
    rows_by_site = _rows(task, parse({}), {"a": Path("x"), "b": Path("y"), "c": Path("x")})
    assert rows_by_site == {
        "a": _SiteRows([("x", "train", DatasetShard(0, 2))]), "b": _SiteRows([("y", "train", None)]),
        "c": _SiteRows([("x", "train", DatasetShard(1, 2))]),
    }  # fmt: skip


@pytest.mark.long
def test_patients_are_units_in_one_process_too(tmp_path):
    """Nine rows of three patients, two a step: one whole batch an epoch, where nine rows would make four."""
    rows = [{"mr": f"name[{i}]", "ref": f"{i} is a pub.", "patient": f"p{i % 3}"} for i in range(9)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flat = {"method.name": "fedavg", "run.rounds": 1, "dp.clip-norm": 1.0, "dp.noise-multiplier": 1.0,
            "task.max-tokens": 64, "train.batch-size": 2, "cohort.min-sites": 1}  # fmt: skip
    for unit, steps in (("patient", 1.0), ("", 4.0)):
        local = LocalFederation.from_config({**flat, "dp.unit-column": unit}, {"a": tmp_path})
        local.run()
        assert local.federation.reports["a"] == {"steps": steps}
    with pytest.raises(TaskError, match="would give a unit's rows to several sites"):
        LocalFederation.from_config({**flat, "dp.unit-column": "patient"}, {"a": tmp_path, "b": tmp_path})


@pytest.mark.parametrize(
    ("config", "sites", "error", "words"),
    [({"method.nam": "fedavg"}, {"a": DATA}, ConfigError, "method.nam"),
     ({}, {}, ConfigError, "give a mapping from each site's name to its folder"),
     ({"evaluate.held-out": 0.1}, {"a": DATA}, ConfigError, "evaluate.held-out: a run in one process supports"),
     ({"evaluate.select-model": "best"}, {"a": DATA}, ConfigError, "task.evaluation: .* needs the server's test data"),
     ({}, 3, ConfigError, "sites: a number of sites must be positive and divide task.data"),
     ({"run.resume": True}, {"a": DATA}, ConfigError, "run.name: run.resume = True requires it"),
     ({}, {"a": "/nowhere"}, TaskError, "/nowhere")],
)  # fmt: skip
def test_what_cannot_be_is_said_before_anything_is_loaded(config, sites, error, words):
    with pytest.raises(error, match=words):
        LocalFederation.from_config(CONFIG | config, sites)
