"""The run config from a file and from KEY=VALUE."""

from __future__ import annotations

import pytest

from fedveil.console.run_config_args import parse_overrides
from fedveil.errors import ConfigError


@pytest.mark.parametrize(
    "text,flat",
    [
        ("train.epochs = 3", {"train.epochs": 3}),
        ("run.deterministic=true", {"run.deterministic": True}),
        ("task.model=/a/b", {"task.model": "/a/b"}),
        ('task.model="tiny"', {"task.model": "tiny"}),
        ("train={epochs = 3, batch-size = 7}", {"train.epochs": 3, "train.batch-size": 7}),
    ],
)
def test_values_are_toml_or_text(text, flat):
    assert parse_overrides(None, [text]) == flat


def test_an_assignment_goes_before_the_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[train]\nepochs = 3\nbatch-size = 7\n")
    assert parse_overrides(file, ["train.epochs=5"]) == {"train.epochs": 5, "train.batch-size": 7}


def test_what_is_no_assignment_and_no_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--set: expected KEY=VALUE, found 'train.epochs'"):
        parse_overrides(None, ["train.epochs"])
    with pytest.raises(ConfigError, match="--config: expected a TOML file"):
        parse_overrides(tmp_path / "none.toml", [])
