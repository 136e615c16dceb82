from __future__ import annotations

import pytest
import torch

from fedveil import strategies
from fedveil.adapters.prompt import PromptAdapter
from fedveil.errors import ConfigError
from fedveil.strategies.fedavg import FedAvg
from fedveil.strategies.promptfl import PromptFL
from tests.strategies.prompted import Run


def test_one_round_by_hand():
    run = Run(PromptFL(adapter=PromptAdapter(4)), "promptfl")
    before = run.server.tensors["prompt"]
    run.round(0)
    left = 0.96**10  # of the distance, after ten steps of rate 0.02 on a square
    trained = [target + left * (before - target) for target in (1.0, -2.0, 3.0)]
    expected = (3 * trained[0] + 8 * trained[1] + trained[2]) / 12
    torch.testing.assert_close(run.server.tensors["prompt"], expected)
    assert set(run.private.values()) == {None}
    assert torch.equal(run.exchange.method.models(run.server)["server"]["prompt"], run.server.tensors["prompt"])


def test_it_is_fedavg_of_the_prompt_bit_for_bit():
    mine, theirs = (
        Run(method, name)
        for method, name in ((PromptFL(PromptAdapter(4)), "promptfl"), (FedAvg(PromptAdapter(4)), "fedavg"))
    )
    for number in range(3):
        assert torch.equal(mine.round(number).server.tensors["prompt"], theirs.round(number).server.tensors["prompt"])


@pytest.mark.parametrize("form", ["sum", "factored", "transport"])
def test_other_forms_are_refused_by_name(form):
    with pytest.raises(ConfigError, match=f'adapter.form: this method requires "one", found "{form}"'):
        strategies.create_method("promptfl", f'adapter = {{form = "{form}"}}')


def test_the_prompt_is_all_that_is_on_the_wire():
    run = Run(PromptFL(adapter=PromptAdapter(4)), "promptfl")
    assert [f.name for f in run.exchange.layout.fields] == ["prompt", "prompt"]
    assert strategies.create_method("promptfl").adapter == PromptAdapter(16)
