"""A few attacks on several runs, with controls that are trained only once."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from fedveil.attacks.audit import compare_runs
from fedveil.attacks.audit.compare_runs import (
    SharedAuditInputs,
    audit_run_pair,
    place_sites,
    prepare_shared_inputs,
)
from fedveil.attacks.audit.delong import placement_values
from fedveil.attacks.audit.findings import AuditReport, make_finding
from fedveil.attacks.audit.scoring import SecondSample
from fedveil.attacks.membership.alignment import AlignmentAttack
from fedveil.attacks.samples import AuditDataSource, AuditSample
from fedveil.config import parse
from fedveil.encrypted_files import VARIABLE
from fedveil.errors import ConfigError
from tests.fedveil.console.commands.test_audit import DATA, SITES, made


@pytest.mark.long
def test_each_run_is_attacked_beside_controls_that_are_trained_once(tmp_path, monkeypatch):
    first = made(tmp_path / "first", SITES, {"run.rounds": 1})
    second = shutil.copytree(first, tmp_path / "again" / "first")  # an encrypted tap knows its folder
    monkeypatch.setenv(VARIABLE, str(tmp_path / "key"))
    config = parse(json.loads((first / "config.json").read_text())["config"])
    shared_inputs = prepare_shared_inputs(first, config, SITES, AuditDataSource(DATA), [AlignmentAttack()], 16, 20)
    attacked = audit_run_pair(shared_inputs, first, config), audit_run_pair(shared_inputs, second, config)
    one, two = (run.audit for run in attacked)
    assert len(shared_inputs.overfitted.members) == 16
    assert one.findings == two.findings
    assert len({(f.model, f.attack) for f in one.findings}) == len(one.findings)
    assert {f.attack for f in one.findings} == {"alignment", "alignment, wrong site"}
    by = {f.model: f for f in one.findings if f.attack == "alignment"}
    assert by.keys() == {"overfitted FedAvg", "other rows", *SITES}
    assert by["overfitted FedAvg"].verdict == "above"
    assert by["overfitted FedAvg"].members == 8
    assert by["site-2"].members == by["site-2"].non_members == 20
    first_rows, second_rows = (
        {id(row) for row in of.rows} for of in (shared_inputs.non_members, shared_inputs.second.sample)
    )
    assert len(first_rows) == len(second_rows) == 20
    assert not first_rows & second_rows
    (over,) = attacked[1].beside({"d" * 64: attacked[0]}).across
    assert [site.site for site in over.sites] == SITES
    assert [site.auroc.value for site in over.sites] == pytest.approx([by[site].auroc[0] for site in SITES])
    wrong = {f.model: f.auroc[0] for f in one.findings if f.attack == "alignment, wrong site"}
    assert [s.less_wrong.value for s in over.sites] == pytest.approx([by[s].auroc[0] - wrong[s] for s in SITES])
    assert over.mean.value == pytest.approx(sum(by[site].auroc[0] for site in SITES) / 2)
    ((base, less),) = [(d.base, d.less) for d in over.differences]
    assert (base, less.value, less.p) == ("d" * 64, 0.0, 1.0)  # the same run twice
    (alone,) = attacked[0].beside({}).across
    assert (alone.mean, alone.differences) == (over.mean, [])


@pytest.mark.long
@pytest.mark.parametrize(
    "secure,sums,labels,compared",
    [
        (False, None, "", ["a", "b"]),
        (True, "the sums", "", ["a, the sum", "b, the sum"]),
        (True, None, "", []),  # the server has only sums of the sites' uploads
        (False, None, "ward", []),  # each site has its own non-members
    ],
)
def test_a_run_is_compared_by_what_the_server_has_of_each_site(monkeypatch, tmp_path, secure, sums, labels, compared):
    sides = {name: (np.arange(20.0) + shift, np.arange(20.0)) for shift, name in enumerate(["a", "b"])}
    sides |= {f"{name}, the sum": (members - 1, others) for name, (members, others) in sides.items()}

    def attacked(*_, scored, **__):
        scored.update({(name, "alignment"): of_site for name, of_site in sides.items()})
        return AuditReport([make_finding(name, "alignment", *of_site, 0) for name, of_site in sides.items()], [])

    monkeypatch.setattr(compare_runs.runner, "run_audit", attacked)
    monkeypatch.setattr(compare_runs, "_read", lambda folder, config: (None, None, sums, []))
    config = parse({"secure.enabled": secure})
    rows = AuditSample([], [labels] * 20)
    second = SecondSample(rows)
    told = SharedAuditInputs(config, [AlignmentAttack()], {"a": rows, "b": rows}, rows, second, None, None, [], 0)
    audit = audit_run_pair(told, tmp_path, config)
    expected = {"alignment": placement_values([sides[name] for name in compared]).value} if compared else {}
    assert {attack: parts.mean.value for attack, parts in audit.over_sites.items()} == expected


def test_only_attacks_that_read_every_site_are_compared():
    rows = np.array([0.1, 0.4]), np.array([0.2, 0.3])
    scored = {("a", "loss"): rows, ("b", "loss"): rows, ("a", "cosine"): rows}
    assert list(place_sites(scored, ["loss", "cosine"], {"a": "a", "b": "b"})) == ["loss"]


def test_a_run_of_other_rows_is_refused_before_anything_is_read(tmp_path):
    no_rows = AuditSample([], [])
    told = SharedAuditInputs(parse({}), [AlignmentAttack()], {}, no_rows, SecondSample(no_rows), None, None, [], 0)
    other = parse({"task.examples-per-site": 9, "run.name": "b"})
    with pytest.raises(ConfigError, match="the sections task and train of b differ from those of the first run; audit"):
        audit_run_pair(told, tmp_path, other)
