"""A method that must know where a tensor stands in the model learns it on the server too."""

from __future__ import annotations

import pytest

from fedveil.config import parse
from fedveil.errors import ConfigError
from server_app.app import prepare
from server_app.record import RunFolder
from server_app.strategy import MethodStrategy


def weights_of(arrays):
    import torch

    return {name: torch.from_numpy(array.numpy().copy()) for name, array in arrays.items()}


def test_fedqsn_starts_on_the_server_with_the_tasks_places(tmp_path):
    config = parse({"method.name": "fedqsn", "run.name": "r"})
    strategy, arrays = prepare(config, RunFolder(tmp_path / "run"), "r")
    weights = weights_of(arrays)
    strategy.rounds.initialise(weights)
    assert {n: tuple(w.shape) for n, w in strategy.rounds.server.tensors.items() if n in weights} == {
        n: tuple(w.shape) for n, w in weights.items()
    }
    bare = MethodStrategy(strategy.rounds.method)
    with pytest.raises(ConfigError, match="linear"):
        bare.rounds.initialise(weights)
