"""A few attacks on several runs, with controls that are trained once."""

from __future__ import annotations

import json
import shutil

import pytest

from fedveil.attacks.membership.alignment import Alignment
from fedveil.attacks.samples import Sample, Source
from fedveil.attacks.side_by_side import Common, audit_beside, common
from fedveil.config import parse
from fedveil.errors import ConfigError
from fedveil.sealed import VARIABLE
from tests.console.commands.test_audit import DATA, SITES, made


def test_each_run_is_attacked_beside_controls_that_are_trained_once(tmp_path, monkeypatch):
    first = made(tmp_path / "first", SITES, {"run.rounds": 1})
    second = shutil.copytree(first, tmp_path / "again" / "first")  # a sealed tap knows its folder
    monkeypatch.setenv(VARIABLE, str(tmp_path / "key"))
    config = parse(json.loads((first / "config.json").read_text())["config"])
    told = common(first, config, SITES, Source(DATA, most=20), [Alignment()], 16)
    one, two = audit_beside(told, first, config), audit_beside(told, second, config)
    assert len(told.overfitted.members) == 16
    assert one.findings == two.findings
    assert len({(f.model, f.attack) for f in one.findings}) == len(one.findings)
    assert {f.attack for f in one.findings} == {"alignment", "alignment, wrong site"}
    by = {f.model: f for f in one.findings if f.attack == "alignment"}
    assert by.keys() == {"overfitted FedAvg", "other rows", *SITES}
    assert by["overfitted FedAvg"].verdict == "above"
    assert by["overfitted FedAvg"].members == 8
    assert by["site-2"].members == by["site-2"].non_members == 20


def test_a_run_of_other_rows_is_refused_before_anything_is_read(tmp_path):
    told = Common(parse({}), [Alignment()], {}, Sample([], []), None, None, [], 0)
    other = parse({"task.max-examples": 9, "run.name": "b"})
    with pytest.raises(ConfigError, match="expected equal sections task and train, found others in b; audit it by it"):
        audit_beside(told, tmp_path, other)
