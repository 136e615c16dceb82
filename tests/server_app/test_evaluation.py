from __future__ import annotations

import pytest

from fedveil import tasks
from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.config import parse
from fedveil.errors import TaskError
from fedveil.server_app.evaluation import ServerEvaluator
from fedveil.strategies.fedavg import FedAvg


@pytest.mark.parametrize("there", [True, False])
def test_missing_test_data_are_named_by_their_own_key(tmp_path, there):
    """task.data is a site's, and may be right."""
    folder = tmp_path if there else tmp_path / "nowhere"
    config = parse({"task.evaluation": str(folder)})
    with pytest.raises(TaskError, match=rf"^task\.evaluation: expected .*{folder}"):
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
    with pytest.raises(TaskError, match='each site would number its own, .* task.class-names = "cat,ox"'):
        ServerEvaluator.from_config(tasks.load_task(parse(keys), adapter), parse(keys))
    named = parse(keys | {"task.class-names": "ox,cat"})
    assert ServerEvaluator.from_config(tasks.load_task(named, adapter), named) is not None
