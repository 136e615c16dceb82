"""The run config from a file and from KEY=VALUE."""

from __future__ import annotations

import pytest

from fedveil.console.run_config import overrides
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
    assert overrides(None, [text]) == flat


def test_an_assignment_goes_before_the_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[train]\nepochs = 3\nbatch-size = 7\n")
    assert overrides(file, ["train.epochs=5"]) == {"train.epochs": 5, "train.batch-size": 7}


def test_what_is_no_assignment_and_no_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--set: expected KEY=VALUE, found 'train.epochs'"):
        overrides(None, ["train.epochs"])
    with pytest.raises(ConfigError, match="--config: expected a TOML file"):
        overrides(tmp_path / "none.toml", [])
