"""The run config from a file and from KEY=VALUE."""

from __future__ import annotations

import pytest

from fedveil.config import parse
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


def test_class_names_may_be_a_list_and_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[task]\nclass-names = ["Mass, nodule", "Fracture", "{x}"]\n', "utf-8-sig")
    names = ("Mass, nodule", "Fracture", "{x}")
    given = [
        parse_overrides(file, []),
        parse_overrides(None, ['task.class-names=["Mass, nodule", "Fracture", "{x}"]']),
        {"task.class-names": '["Mass, nodule", "Fracture", "{x}"]'},
        {"task.class-names": '"Mass, nodule", Fracture, {x}'},
    ]
    for flat in given:
        config = parse(flat)
        assert config.task.class_list == names
        assert parse(config.flat()) == config
    assert parse({"task.class-names": "[a, b], c"}).task.class_list == ("[a", "b]", "c")
    for wrong in (["a", "a"], ["a", ""], ["a", "b\nc"], ["a", 1]):
        with pytest.raises(ConfigError, match=r"task\.class-names: "):
            parse({"task.class-names": wrong})
