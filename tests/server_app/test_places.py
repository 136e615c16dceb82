"""A method that must know where a tensor stands in the model learns it on the server too."""

from __future__ import annotations

import pytest
import torch

from fedveil.config import parse
from fedveil.errors import ConfigError, TaskError
from fedveil.server_app.flower_strategy import MethodStrategy
from fedveil.server_app.run import prepare_strategy
from fedveil.server_app.run_folder import RunFolder
from fedveil.server_app.run_plan import RunPlan
from fedveil.training.adapter_task import AdaptedTask
from tests.conftest import ROOT


def test_fedqsn_starts_on_the_server_with_the_tasks_places(tmp_path):
    config = parse({"method.name": "fedqsn", "run.name": "r"})
    strategy = prepare_strategy(RunPlan.from_config(config, "r"), RunFolder(tmp_path / "run"))
    weights = strategy.rounds.server.tensors
    assert {n: tuple(w.shape) for n, w in weights.items()} == {n: t.shape for n, t in strategy.rounds._spec.items()}
    bare = MethodStrategy(strategy.rounds.method)
    with pytest.raises(ConfigError, match="linear"):
        bare.rounds.initialise(weights)


def test_the_server_works_where_its_task_computes(tmp_path, monkeypatch):
    monkeypatch.setattr(AdaptedTask, "accelerator", torch.device("meta"))
    for name, named in (("fedqsn", True), ("fedavg", False)):
        strategy = prepare_strategy(
            RunPlan.from_config(parse({"method.name": name, "run.name": "r"}), "r"), RunFolder(tmp_path / name)
        )
        assert strategy.rounds._device == (torch.device("meta") if named else None)


FEDSP = {"method.name": "fedsp", "run.name": "r", "train.batch-size": 2}


def test_fedsp_distils_its_proxy_on_the_servers_rows_before_round_0(tmp_path):
    """The prefix stays what it was; the cells become those that `distil` makes of the server's own rows."""
    fields = FEDSP | {"task.server-data": str(ROOT / "data" / "e2e"), "task.examples-per-site": 4}
    before, after, again = (
        prepare_strategy(
            RunPlan.from_config(parse(fields | {"method.params": f"distil_steps = {steps}"}), "r"),
            RunFolder(tmp_path / f"{i}"),
        ).rounds.server.tensors
        for i, steps in enumerate((0, 2, 2))
    )
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "prefix" not in changed
    assert len(changed) > 0.9 * (len(before) - 1)
    assert all(torch.equal(after[name], again[name]) for name in after)


def test_rows_of_the_servers_own_that_are_not_there_are_named_by_their_own_key(tmp_path):
    plan = RunPlan.from_config(parse(FEDSP | {"task.server-data": str(tmp_path / "nowhere")}), "r")
    with pytest.raises(TaskError, match=r"^task\.server-data: there is no folder or file of rows"):
        prepare_strategy(plan, RunFolder(tmp_path / "run"))


def test_fedsp_without_rows_of_the_servers_own_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(ConfigError, match=r"task.server-data: before round 0, .* distil_steps = 0"):
        prepare_strategy(RunPlan.from_config(parse(FEDSP), "r"), RunFolder(tmp_path / "run"))


def test_noisy_steps_need_a_task_whose_rows_have_gradients_of_their_own(tmp_path):
    flat = {
        "method.name": "fedrand",
        "dp.clip-norm": 1.0,
        "dp.noise-multiplier": 1.0,
        "task.name": "vision-language",
        "run.name": "r",
    }
    with pytest.raises(ConfigError, match="found the task vision-language, which has no per-example gradients"):
        prepare_strategy(RunPlan.from_config(parse(flat), "r"), RunFolder(tmp_path / "run"))
