"""The end of the demo: what is measured of each run, and what is written of all."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fedveil.attacks.audit.compare_runs import RunAudit
from fedveil.attacks.audit.delong import SitePlacements
from fedveil.attacks.audit.findings import AuditReport
from fedveil.console.runs import run_reader, sample_texts
from fedveil.console.web.report import demo_report, tradeoff
from fedveil.encrypted_files import VARIABLE
from tests.fedveil.console.commands.test_audit import DATA, SITES, made
from tests.fedveil.console.conftest import write_run
from tests.fedveil.console.web.report.made import audited, found
from tests.fedveil.console.web.report.test_tradeoff import NOISE, SECURE, with_config


@pytest.mark.long
def test_a_run_with_a_tap_is_attacked_and_one_without_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "key"))
    tapped = made(tmp_path / "tapped", SITES, {"run.capture-messages": True, "run.rounds": 1, "method.name": "fedavg"})
    first = demo_report.measure_runs(tapped, DATA, None)
    audit = AuditReport.read(tapped)
    shared_inputs = first.told
    assert shared_inputs is not None
    assert first.attacked is not None
    assert first.attacked.audit == audit
    assert {f.attack for f in audit.findings} == {"alignment", "alignment, wrong site"}
    (tapped / "audit.json").unlink()
    content = json.loads((tapped / "config.json").read_text())
    content["config"]["run.capture-messages"] = False
    (tapped / "config.json").write_text(json.dumps(content))
    assert demo_report.measure_runs(tapped, DATA, shared_inputs) == demo_report.DemoMeasurements(shared_inputs)
    assert demo_report.measure_runs(tapped, DATA, None) == demo_report.DemoMeasurements(None)
    assert AuditReport.read(tapped) is None
    assert sample_texts.read_samples(tapped) == []  # the server has no test rows


def test_runs_are_compared_with_the_fedavg_run_wherever_it_stands(tmp_path):
    """Noise with the plain run and the secure sum, the sum with the plain run, another method with none."""
    rng = np.random.default_rng(2)
    others, signal = rng.normal(0.0, 1.0, 60), rng.normal(0.0, 1.0, 60)
    attacked = {}
    settings = {"dp": NOISE, "fedrand": {}, "secure": SECURE, "plain": {}}
    for name, shift in (("dp", 0.2), ("fedrand", 0.2), ("secure", 1.0), ("plain", 1.6)):
        method = "fedrand" if name == "fedrand" else "fedavg"
        run = audited(with_config(write_run(tmp_path / name, method).rename(tmp_path / f"r-{name}"), settings[name]))
        placed = SitePlacements.from_scores({"site-1": (signal + shift, others)}, {})
        attacked[run] = RunAudit(AuditReport.read(run), {"alignment": placed})
    demo_report.write_comparisons(attacked)
    arms = {run.name: tradeoff.read_tradeoff_run(run_reader.load_run(run)) for run in attacked}
    bases = {name: [d.base for d in arm.differences] for name, arm in arms.items()}
    plain, sums = arms["r-plain"], arms["r-secure"]
    assert bases == {"r-dp": [plain.digest, sums.digest], "r-fedrand": [], "r-secure": [plain.digest], "r-plain": []}
    (difference,) = sums.differences
    assert difference.less.value == pytest.approx(plain.mean.value - sums.mean.value)
    assert all(tradeoff.decide_differences([*arms.values()]).values())


def test_without_a_fedavg_run_nothing_is_compared(tmp_path):
    run = audited(write_run(tmp_path, "fedrand"), found("site-1", 0.8, "above"))
    placed = {"alignment": SitePlacements.from_scores({"site-1": (np.arange(9.0), np.arange(9.0))}, {})}
    demo_report.write_comparisons({run: RunAudit(AuditReport.read(run), placed)})
    assert [(a.mean.value, a.differences) for a in AuditReport.read(run).across] == [(0.5, [])]


@pytest.mark.long
def test_the_picture_and_its_figures_stand_beside_the_report(tmp_path):
    values = {"fedavg": 0.8, "fedrand": 0.6}
    folders = [audited(write_run(tmp_path, name), found("site-1", v, "above")) for name, v in values.items()]
    runs = [run_reader.load_run(run) for run in folders]
    demo_report.write_demo_report(tmp_path / "out", runs)
    arms = json.loads((tmp_path / "out" / "picture.json").read_text())
    assert [(arm["name"], arm["sites"][0]["auroc"]) for arm in arms] == [("fedavg", 0.8), ("fedrand", 0.6)]
    assert ">80<" in (tmp_path / "out" / demo_report.PICTURE).read_text()
    assert "What an attacker learns." in (tmp_path / "out" / "report.html").read_text()
    (sentence,) = demo_report.summary_sentences(runs)
    assert sentence.startswith(
        "An attacker who reads what fedavg sends picks the training example from a pair at the worst site 80"
    )


def test_one_run_has_a_report_and_no_picture_and_none_of_an_earlier_demo(tmp_path):
    run = write_run(tmp_path, "fedrand")
    (tmp_path / demo_report.PICTURE).write_text("<svg/>")
    demo_report.write_demo_report(tmp_path, [run_reader.load_run(run)])
    assert (tmp_path / "report.html").is_file()
    alone = audited(run, found("site-1", 0.5, "contains"))
    line, *_ = demo_report.summary_sentences([run_reader.load_run(alone)])
    assert line.startswith(f"{alone.name}: Membership shows in none of 1 findings of 1 attack whose controls hold.")
    assert not (tmp_path / demo_report.PICTURE).exists()
