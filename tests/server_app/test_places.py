"""A method that must know where a tensor stands in the model learns it on the server too."""

from __future__ import annotations

import pytest
import torch

from fedveil.config import parse
from fedveil.errors import ConfigError, TaskError
from fedveil.server_app.app import prepare
from fedveil.server_app.record import RunFolder
from fedveil.server_app.strategy import MethodStrategy
from fedveil.training.adapted import AdaptedTask
from tests.conftest import ROOT


def test_fedqsn_starts_on_the_server_with_the_tasks_places(tmp_path):
    config = parse({"method.name": "fedqsn", "run.name": "r"})
    strategy = prepare(config, RunFolder(tmp_path / "run"), "r")
    weights = strategy.rounds.server.tensors
    assert {n: tuple(w.shape) for n, w in weights.items()} == {n: t.shape for n, t in strategy.rounds._spec.items()}
    bare = MethodStrategy(strategy.rounds.method)
    with pytest.raises(ConfigError, match="linear"):
        bare.rounds.initialise(weights)


def test_the_server_works_where_its_task_computes(tmp_path, monkeypatch):
    monkeypatch.setattr(AdaptedTask, "accelerator", torch.device("meta"))
    for name, named in (("fedqsn", True), ("fedavg", False)):
        strategy = prepare(parse({"method.name": name, "run.name": "r"}), RunFolder(tmp_path / name), "r")
        assert strategy.rounds._device == (torch.device("meta") if named else None)


FEDSP = {"method.name": "fedsp", "run.name": "r", "train.batch-size": 2}


def test_fedsp_distils_its_proxy_on_the_servers_rows_before_round_0(tmp_path):
    """The prefix stays what it was; the cells become those that `distil` makes of the server's own rows."""
    fields = FEDSP | {"task.server-data": str(ROOT / "data" / "e2e"), "task.max-examples": 4}
    before, after, again = (
        prepare(
            parse(fields | {"method.fields": f"distil_steps = {steps}"}), RunFolder(tmp_path / f"{i}"), "r"
        ).rounds.server.tensors
        for i, steps in enumerate((0, 2, 2))
    )
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "prefix" not in changed
    assert len(changed) > 0.9 * (len(before) - 1)
    assert all(torch.equal(after[name], again[name]) for name in after)


def test_rows_of_the_servers_own_that_are_not_there_are_named_by_their_own_key(tmp_path):
    with pytest.raises(TaskError, match=r"^task\.server-data: expected a folder or file of rows"):
        prepare(parse(FEDSP | {"task.server-data": str(tmp_path / "nowhere")}), RunFolder(tmp_path / "run"), "r")


def test_fedsp_without_rows_of_the_servers_own_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(ConfigError, match=r"task.server-data: expected a folder .* distil_steps = 0"):
        prepare(parse(FEDSP), RunFolder(tmp_path / "run"), "r")


def test_noisy_steps_need_a_task_whose_rows_have_gradients_of_their_own(tmp_path):
    flat = {"method.name": "fedrand", "dp.clip": 1.0, "dp.noise": 1.0, "task.name": "vision-language", "run.name": "r"}
    with pytest.raises(ConfigError, match="found the task vision-language, which has no gradients of single rows"):
        prepare(parse(flat), RunFolder(tmp_path / "run"), "r")
