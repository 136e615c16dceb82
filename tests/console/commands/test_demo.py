"""A bad setting is one clear line and exit code 2, before anything is started."""

from __future__ import annotations

import pytest

from fedveil.console.commands.trying import demo
from fedveil.console.main import main


@pytest.mark.parametrize(
    "setting,line",
    [
        ("method.fields='rho = 1.5'", "error: rho: expected a probability from 0 to 1, found 1.5\n"),
        ("method.fields='roh = 0.5'", "error: method.fields: roh: unknown field of fedrand; expected one of"),
        ("trian.epochs=3", "error: trian: unknown key; expected a section of"),
        ("train.epoch=3", "error: train.epoch: unknown key; expected one of"),
        ("task.model=/no/such", 'error: task.model: expected a folder with a model, found none at "/no/such"'),
        ("task.data=/no/such", 'expected a folder or file of rows, found none at "/no/such"'),
        ("task.evaluation=/no/such", 'expected a folder or file of rows, found none at "/no/such"'),
        ("task.source-column=question", 'error: task.data: expected column "question" in'),
    ],
)
def test_a_bad_setting_is_refused_before_anything_is_started(setting, line, capsys, monkeypatch, tmp_path):
    def start(*args, **kwargs):
        raise AssertionError("started")

    monkeypatch.setattr(demo, "LocalFederation", start)
    assert main(["demo", "--methods", "fedrand", "--out", str(tmp_path), "--set", setting]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
