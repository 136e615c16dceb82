"""A few attacks on several runs, with controls that are trained once."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from fedveil.attacks.membership.alignment import Alignment
from fedveil.attacks.samples import Sample, Source
from fedveil.attacks.side_by_side import Common, audit_beside, common, over_sites
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
    attacked = audit_beside(told, first, config), audit_beside(told, second, config)
    one, two = (run.audit for run in attacked)
    assert len(told.overfitted.members) == 16
    assert one.findings == two.findings
    assert len({(f.model, f.attack) for f in one.findings}) == len(one.findings)
    assert {f.attack for f in one.findings} == {"alignment", "alignment, wrong site"}
    by = {f.model: f for f in one.findings if f.attack == "alignment"}
    assert by.keys() == {"overfitted FedAvg", "other rows", *SITES}
    assert by["overfitted FedAvg"].verdict == "above"
    assert by["overfitted FedAvg"].members == 8
    assert by["site-2"].members == by["site-2"].non_members == 20
    (over,) = attacked[1].beside(attacked[0], "d" * 64).across
    assert (over.attack, over.sites, over.base) == ("alignment", 2, "d" * 64)
    assert over.auroc[0] == pytest.approx(sum(by[site].auroc[0] for site in SITES) / 2)
    assert (over.less[0], over.p) == (0.0, 1.0)  # the same run twice
    (alone,) = attacked[0].beside(None).across
    assert (alone.auroc, alone.base, alone.p) == (over.auroc, "", 1.0)


def test_a_secure_run_is_compared_by_its_sums(tmp_path, monkeypatch, same_masks):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "key"))
    plain = {"method.name": "fedavg", "run.rounds": 1, "cohort.min-sites": 3}
    sites = [*SITES, "site-3"]
    clear = made(tmp_path / "clear", sites, plain)
    summed = made(tmp_path / "summed", sites, plain | {"secure.enabled": True})
    config, unseen = (parse(json.loads((run / "config.json").read_text())["config"]) for run in (clear, summed))
    told = common(clear, config, sites, Source(DATA, most=20), [Alignment()], 16)
    base, mine = audit_beside(told, clear, config), audit_beside(told, summed, unseen)
    (over,) = mine.beside(base, "d" * 64).across
    of_sums = [f.auroc[0] for f in mine.audit.findings if f.model.endswith(", the sum") and f.attack == "alignment"]
    assert len(of_sums) == over.sites == 3
    assert over.auroc[0] == pytest.approx(sum(of_sums) / 3)
    assert over.less[0] == pytest.approx(base.over_sites["alignment"].value - over.auroc[0])
    assert over.less[0] > 0.02  # the sum hides a site behind two others


def test_only_attacks_that_read_every_site_are_compared():
    rows = np.array([0.1, 0.4]), np.array([0.2, 0.3])
    scored = {("a", "loss"): rows, ("b", "loss"): rows, ("a", "cosine"): rows}
    assert list(over_sites(scored, ["loss", "cosine"], ["a", "b"])) == ["loss"]


def test_a_run_of_other_rows_is_refused_before_anything_is_read(tmp_path):
    told = Common(parse({}), [Alignment()], {}, Sample([], []), None, None, [], 0)
    other = parse({"task.max-examples": 9, "run.name": "b"})
    with pytest.raises(ConfigError, match="expected equal sections task and train, found others in b; audit it by it"):
        audit_beside(told, tmp_path, other)
