from __future__ import annotations

import json

import pytest

from fedveil import rng, tasks
from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.config import parse
from fedveil.contract.method import FederatedState
from fedveil.contract.task import TaskMetric
from fedveil.errors import StateError, TaskError
from fedveil.server_app.evaluation import BestEvaluation, ModelSelection, ServerEvaluator
from fedveil.strategies.fedavg import FedAvg


@pytest.mark.parametrize("there", [True, False])
def test_missing_test_data_are_named_by_their_own_key(tmp_path, there):
    """task.data is a site's, and may be right."""
    folder = tmp_path if there else tmp_path / "nowhere"
    config = parse({"task.evaluation": str(folder)})
    with pytest.raises(TaskError, match=rf"^task\.evaluation: (expected|there is no) .*{folder}"):
        ServerEvaluator.from_config(tasks.load_task(config, FedAvg().adapter), config)


def test_without_test_data_there_is_none():
    config = parse({})
    assert ServerEvaluator.from_config(tasks.load_task(config, FedAvg().adapter), config) is None


def test_a_server_does_not_number_the_classes_of_its_test_data(tmp_path):
    for name in ("cat", "ox"):
        (tmp_path / "test" / name).mkdir(parents=True)
        (tmp_path / "test" / name / "0.png").write_bytes(b"")
    keys = {"task.name": "image-classification", "task.num-classes": 2, "task.evaluation": str(tmp_path)}
    adapter = FedAvg(adapter=AllWeightsAdapter()).adapter
    with pytest.raises(TaskError, match='each site would number its own; .* task.class-names = "cat,ox"'):
        ServerEvaluator.from_config(tasks.load_task(parse(keys), adapter), parse(keys))
    named = parse(keys | {"task.class-names": "ox,cat"})
    assert ServerEvaluator.from_config(tasks.load_task(named, adapter), named) is not None


def rows(count: int) -> str:
    return "".join(json.dumps({"mr": f"name {i}", "ref": f"this is {i}"}) + "\n" for i in range(count))


CHOOSES = {"evaluate.select-model": "best", "task.max-tokens": 32}


def test_the_validation_split_decides_and_the_test_split_is_scored_beside_it(tmp_path):
    """Each is scored by the task's own `evaluate`; a run in which no score decides reads no validation split."""
    (tmp_path / "test.jsonl").write_text(rows(3))
    (tmp_path / "dev.jsonl").write_text(rows(5))
    keys = {"task.evaluation": str(tmp_path), "method.name": "fedavg", "run.rounds": 2}
    config, method = parse(keys | CHOOSES), FedAvg()
    task = tasks.load_task(config, method.adapter)
    evaluator = ServerEvaluator.from_config(task, config)
    state = FederatedState(dict(task.initial(rng.initial_stream(1, "weights"))))
    scores = evaluator.scores(method, state, 0)
    weights = {name: method.models(state)["server"][name] for name in task.spec}
    expected = {
        "server": task.evaluate(weights, task.examples(tmp_path, "test"), False)["loss"],
        "validation": task.evaluate(weights, task.examples(tmp_path, "validation"), False)["loss"],
    }
    assert {view: found["loss"] for view, found in scores.items()} == pytest.approx(expected)
    assert expected["server"] != expected["validation"]
    plain = parse(keys | {"task.max-tokens": 32})
    assert ServerEvaluator.from_config(task, plain).validation is None


def test_a_test_split_that_decides_is_said(tmp_path, caplog):
    (tmp_path / "test.jsonl").write_text(rows(3))
    config = parse({"task.evaluation": str(tmp_path)} | CHOOSES)
    evaluator = ServerEvaluator.from_config(tasks.load_task(config, FedAvg().adapter), config)
    assert evaluator.validation is None
    assert "has no validation split (validation.*, valid, val or dev), so the test split decides" in caplog.text


CHOICE = ModelSelection("loss", TaskMetric("lower"))


def test_the_best_round_is_that_of_the_validation_scores():
    best = BestEvaluation()
    for round_, (test, validation) in enumerate([(1.0, 3.0), (2.0, 2.0), (0.5, 2.5)]):
        best = best.after(CHOICE, round_, {"server": {"loss": test}, "validation": {"loss": validation}})
    assert (best.round, best.value, best.waited, best.split) == (1, 2.0, 1, "validation")
    assert best.about(CHOICE)["best"]["split"] == "validation"
    assert BestEvaluation.read(json.loads(json.dumps(best.saved()))) == best
    with pytest.raises(StateError, match="earlier rounds were scored on the validation split"):
        best.after(CHOICE, 3, {"server": {"loss": 0.1}})
