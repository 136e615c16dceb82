"""The adapter's table in method.params; its errors name the adapter's fields."""

from __future__ import annotations

import re

import pytest

from fedveil.adapters.lora import LoraAdapter
from fedveil.errors import ConfigError
from fedveil.strategies import create_method


@pytest.mark.parametrize(
    "method,adapter,message",
    [
        ("fedrand", "rnk = 4", r"adapter\.rnk: unknown field of the adapter of FedRand; .*'rank', 'alpha', 'targets'"),
        ("fedavg", "rnk = 4", r"adapter\.rnk: unknown field of the adapter lora; .*'rank', 'alpha', 'targets'"),
        ("fedavg", 'kind = "prompt", rnk = 4', r"adapter\.rnk: unknown field of the adapter prompt; .*'length'"),
        ("fixed_position", "rank = 4", r"adapter\.rank: unknown field of the adapter all; expected one of \['kind'\]"),
        ("fedavg", 'rank = "x"', r"adapter\.rank: .* integer"),
        ("fedavg", 'kind = "nope"', r"adapter\.kind: found 'nope'; expected one of \['all', 'hadamard-lora'"),
        ("fedavg", "kind = [1]", r"adapter\.kind: found '\[1\]'; expected one of"),
        ("fedavg", "targets = [1]", r"adapter\.targets: "),
        ("fedavg", "targets = []", r"adapter\.targets: "),
    ],
)
def test_a_wrong_key_of_an_adapter_is_named_with_the_adapters_fields(method, adapter, message):
    with pytest.raises(ConfigError, match=message):
        create_method(method, f"adapter = {{{adapter}}}")


def test_targets_are_a_list_as_peft_takes_it():
    """A module of that name, or one whose last parts are the name; nothing of a name is a regular expression."""
    adapter = create_method("fedavg", 'adapter = {targets = ["q_proj", "mlp.v"], rank = 3, alpha = 6}').adapter
    assert isinstance(adapter, LoraAdapter)
    assert (adapter.rank, adapter.scale) == (3, 2.0)
    chosen = ["q_proj", "model.layers.0.q_proj", "h.1.mlp.v", "mlp.v"]
    others = ["xq_proj", "q_proj.extra", "h.1.v", "mlpxv", "h.1.mlpxv"]
    assert [name for name in chosen + others if re.fullmatch(adapter.targets, name)] == chosen


def test_a_methods_own_fields_are_listed_where_the_key_is_the_methods():
    with pytest.raises(
        ConfigError,
        match=r"adpter: unknown field of fedavg; did you mean adapter\? expected one of \['adapter', 'wire_dtype', 'up",
    ):
        create_method("fedavg", "adpter = 3")
