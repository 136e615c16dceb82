"""The text of a guarantee, and class names that it must not depend on."""

from __future__ import annotations

import pytest

from fedveil import strategies
from fedveil.config import parse
from fedveil.errors import ConfigError
from fedveil.privacy.guarantee_source import check_guarantee, guarantee_of
from fedveil.privacy.guarantee_words import conditions, describe_unit
from fedveil.strategies.fedavg import FedAvg

DP = {"dp.clip-norm": 1.0, "dp.noise-multiplier": 1.0}


@pytest.mark.parametrize("keys", [{"method.name": "promptfl"} | DP, {"method.name": "dp_fpl"}])
def test_class_names_from_a_site_s_data_are_refused_under_a_guarantee(keys):
    """One row's label can add a class, which changes the loss of every row: no clip bounds that."""
    config = parse({"task.name": "clip-prompt"} | keys)
    method = strategies.create_method(config.method.name, "")
    with pytest.raises(ConfigError, match="task.class-names: a privacy claim requires the public names of all classes"):
        check_guarantee(method, config, has_row_gradients=True)
    named = parse({"task.name": "clip-prompt", "task.class-names": "cat, dog"} | keys)
    assert check_guarantee(method, named, has_row_gradients=True) is not None


def test_class_names_from_the_data_are_permitted_without_a_guarantee():
    config = parse({"task.name": "clip-prompt", "method.name": "promptfl"})
    assert check_guarantee(strategies.create_method("promptfl", ""), config, has_row_gradients=True) is None


def test_a_column_s_name_is_printed_without_control_characters_and_not_at_any_length():
    words = describe_unit(parse({"dp.unit-column": "patient\x1b[31m" + 500 * "x"}))
    assert "\x1b" not in words
    assert len(words) < 300


def test_what_the_author_of_an_own_model_promises_is_a_condition():
    keys = {"dp.clip-norm": 1.0, "dp.noise-multiplier": 1.0, "task.module": "heart"}
    claim = guarantee_of(FedAvg(), config := parse(keys | {"task.name": "own-model"}))
    assert "the own model's file heart.py makes each row from that row alone" in conditions(claim, config)
    claim = guarantee_of(FedAvg(), config := parse({key: keys[key] for key in keys if key != "task.module"}))
    assert not any("own model" in each for each in conditions(claim, config))
