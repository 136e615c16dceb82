from __future__ import annotations

import re
import tomllib

import pytest

from fedveil.config import RENAMED_KEYS, RunConfig, parse, parse_class_names, renamed
from fedveil.errors import ConfigError
from tests.conftest import ROOT


def test_pyproject_repeats_the_defaults():
    """Flower refuses an override of a key without a default there, so every key stands in both."""
    sections = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    flat = {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}
    assert flat == RunConfig().flat()


def test_parsing_the_flat_form_gives_the_config_back():
    config = parse({"train.batch-size": 4, "method.params": "rho = 0.3", "run.deterministic": True})
    assert (config.train.batch_size, config.run.deterministic) == (4, True)
    assert parse(config.flat()) == config


@pytest.mark.parametrize(
    "flat,match",
    [
        ({"train.batchsize": 4}, r"train.batchsize: unknown key; .* expected one of \['epochs', 'batch-size'"),
        ({"trian.epochs": 4}, r"trian: unknown key; .* expected a section of \['method', 'task'"),
        ({"trian.epochs": 4}, r"unknown key; did you mean train\? expected "),
        ({"train.batchsize": 4}, r"unknown key; did you mean train.batch-size\? expected "),
        ({"train.lr": 0.1}, r"unknown key; did you mean train.learning-rate\? expected "),
        ({"train.rounds": 3}, r"unknown key; did you mean run.rounds\? expected "),
        ({"train.zzz": 3}, r"in \[train\]$"),
        ({"train." + "x" * 5000: 1}, r"train\.x{94}\.\.\. \(5006 characters\): unknown key"),
        ({"\x1b[2J": 1}, r"^\\x1b\[2J: unknown key"),
        ({"rho": 0.5}, 'rho: unknown key; expected "section.name"'),
        ({"train.epochs": -1}, "train.epochs: input should be greater than or equal to 0, found -1"),
        ({"train.epochs": 1.5}, "train.epochs: .*found 1.5"),
        ({"cohort.fraction": 0.0}, "cohort.fraction: input should be greater than 0, found 0.0"),
        ({"cohort.deadline-seconds": 2_592_001.0}, "cohort.deadline-seconds: .* less than or equal to 2592000"),
        ({"task.alpha": float("nan")}, "task.alpha: input should be a finite number"),
        ({"task.partition": "random"}, "task.partition: input should be 'iid', 'dirichlet'"),
        ({"run.rounds": 0, "run.seed": -1}, "run.rounds: .*; run.seed: "),
    ],
)
def test_a_bad_key_or_value_is_named_in_one_line(flat, match):
    with pytest.raises(ConfigError, match=match) as error:
        parse(flat)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("old", "new"), RENAMED_KEYS.items())
def test_a_key_by_its_old_name_is_refused_with_the_new_one(old, new):
    assert new in parse({}).flat()
    assert old not in parse({}).flat()
    with pytest.raises(ConfigError, match=re.escape(f"{old}: this key is now called {new}; rename it")):
        parse({old: 1})


def test_a_field_of_the_method_by_the_old_key_has_the_new_one():
    assert renamed("method.fields.rho") == "method.params.rho"
    assert renamed("method.params.rho") == renamed("train.epochs") == ""


def test_an_empty_list_of_class_names_is_none():
    assert parse_class_names(" [] ") == ()
    assert parse({"task.class-names": []}).task.class_list == ()
