"""`fedveil audit` on a small run made in process: files, figures, the report, and what bad arguments get."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedveil import rng, strategies, tasks
from fedveil.attacks.audit import runner as attacks
from fedveil.attacks.audit import threshold_gate
from fedveil.attacks.audit.findings import PICTURES, AuditReport
from fedveil.attacks.samples import AuditDataSource, draw_non_members, draw_samples, site_members
from fedveil.config import parse
from fedveil.console.main import main
from fedveil.console.runs import run_reader as runs
from fedveil.console.web.report import audit_section
from fedveil.console.web.report import run_page as report
from fedveil.contract.method import FederatedState
from fedveil.contract.task import DatasetShard
from fedveil.encrypted_files import VARIABLE, make_key
from fedveil.errors import ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.records.disclosure_ledger import DisclosureLedger
from fedveil.records.tensor_state import save_state
from fedveil.wire.capture import MessageCapture
from tests.fedveil.console.web.report.made import controlled, found

pytestmark = pytest.mark.timeout(900)  # the first test waits for an audit with every attack and its controls
DATA = Path(__file__).parents[4] / "data" / "e2e"
SITES = ["site-2", "site-10"]  # by their numbers the first and the second


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    """Two sites, two rounds of FedRand, known nearly by heart: 20 rows each, the rest of the data left out."""
    return made(tmp_path_factory.mktemp("runs") / "small", SITES, {})


def made(folder: Path, sites: list[str], more: dict[str, object]) -> Path:
    settings = {
        "method.name": "fedrand",
        "method.params": "adapter = {rank = 4}",
        "task.examples-per-site": 20,
        "train.batch-size": 8,
        "train.epochs": 4,
        "train.learning-rate": 5e-3,
        "run.rounds": 2,
        "run.deterministic": True,
    }
    config = parse(settings | more)
    name = config.method.name
    method = strategies.create_method(name, config.method.params)
    task = tasks.load_task(config, method.adapter, "cpu")
    rows = {
        site: task.encode(task.examples(DATA, "train", DatasetShard(i, len(sites)))) for i, site in enumerate(sites)
    }
    exchange = MessageExchange(method, name, task.spec)
    state = method.init(task.spec, task.initial(rng.initial_stream(0, "weights")), rng.initial_stream(0, "method init"))
    federation = InProcessFederation(
        exchange,
        config,
        lambda s, ctx: task.trainer(rows[s], ctx.rng("batches")),
        sites,
        state,
        tap=MessageCapture(folder / "tap", make_key(folder.parent / "key")),
    )
    federation.run()
    save_state(FederatedState(federation.models()["server"]), folder / "final" / "server.safetensors")
    (folder / "config.json").write_text(json.dumps({"config": config.flat(), "method": {"name": name, "fields": {}}}))
    (folder / "status.json").write_text(json.dumps({"state": "completed", "round": 1, "rounds": 2, "reason": ""}))
    ledger, empty = (
        DisclosureLedger(folder / "disclosure.jsonl"),
        {"bytes": 1, "variant": "", "fields": [], "scalars": {}},
    )
    for r in range(2):
        for s in sites:
            for d in ("down", "up"):
                ledger.append({"round": r, "attempt": 0, "site": s}, d, empty)
    return folder


@pytest.fixture(scope="module")
def audited(run_folder) -> dict:
    """Of a tap that the server has encrypted: the auditor names its key file as the server did."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(run_folder.parent / "key"))
        planted = run_folder.parent / "planted"
        assert main(["canaries", str(DATA), str(planted), "--pairs", "20"]) == 0
        asked = ["--data", str(DATA), "--max-rows", "40", "--canaries", f"site-2={planted}"]
        assert main(["audit", str(run_folder), *asked]) == 0
    return json.loads((run_folder / "audit.json").read_text())


def test_the_terminal_has_the_verdicts_and_the_five_strongest(make_run, monkeypatch, capsys):
    findings = controlled(*(found(f"site-{i}, merged", 0.6 + i / 50, "above") for i in range(9)))
    monkeypatch.setattr(
        attacks, "audit_run", lambda *_, **__: (AuditReport(findings, [], ["what a control says"]), None)
    )
    folder = make_run()
    assert main(["audit", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Membership shows in 9 of 9 findings of 1 attack whose controls hold. Strongest: align")
    assert lines[1] == "- what a control says"
    rows = [line for line in lines if line.startswith("\u2502")]
    assert [row.split()[1] for row in rows] == [f"site-{i}," for i in (8, 7, 6, 5, 4)]
    assert "0.760 [0.710, 0.810]" in rows[0]
    assert f"The other 7 findings are in {folder / 'audit.json'}" in lines[-1]
    assert AuditReport.read(folder) == AuditReport(findings, [], ["what a control says"])


@pytest.mark.parametrize(
    ("audit", "limit", "code", "said"),
    [
        (AuditReport(controlled(found("server", 0.7, "above")), [], []), "0.6", 1, "Gate: FAILS. auroc above 0.6"),
        (AuditReport(controlled(found("server", 0.5, "contains")), [], []), "0.6", 0, "Gate: passes."),
        (AuditReport(controlled(found("server", 0.7, "above"), won="contains"), [], []), "0.6", 3, "Gate: CANNOT TELL"),
        (AuditReport([], [], []), "0.6", 3, "Gate: CANNOT TELL"),
    ],
)
def test_as_a_gate_it_ends_with_a_code_of_its_own(make_run, monkeypatch, capsys, audit, limit, code, said):
    monkeypatch.setattr(attacks, "audit_run", lambda *_, **__: (audit, None))
    folder = make_run()
    assert main(["audit", str(folder), "--fail-above", limit]) == code
    out = capsys.readouterr().out
    assert said in out
    assert ("next: " in out) == (code == 3)
    assert ("which control failed" in out) == (code == 3 and audit.findings != [])
    assert AuditReport.read(folder) == audit
    assert main(["audit", str(folder)]) == 0, "without the option it is no gate"


def test_an_audit_that_tried_nothing_leaves_what_an_earlier_one_found(make_run, monkeypatch, capsys):
    first, empty = AuditReport(controlled(found("server", 0.7, "above")), [], []), AuditReport([], [], ["no time"])
    folder = make_run()
    for audit in (first, empty):
        monkeypatch.setattr(attacks, "audit_run", lambda *_, audit=audit, **__: (audit, None))
        assert main(["audit", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "audit.json is kept from an earlier audit, because this audit tried no attack" in out.replace("\n", "")
    assert "The other 0 findings" not in out
    assert AuditReport.read(folder) == first
    bound = AuditReport([], [], [], epsilon_shown=2.0)  # by canaries alone
    monkeypatch.setattr(attacks, "audit_run", lambda *_, **__: (bound, None))
    assert main(["audit", str(folder)]) == 0
    assert AuditReport.read(folder) == bound


def test_the_time_reaches_the_audit(make_run, monkeypatch):
    asked = []
    monkeypatch.setattr(attacks, "audit_run", lambda *given: asked.append(given[-2]) or (AuditReport([], [], []), None))
    folder = make_run()
    assert main(["audit", str(folder), "--minutes", "3"]) == 0
    assert main(["audit", str(folder)]) == 0
    assert 170 < asked[0].left <= 180
    assert asked[1].left == float("inf")


@pytest.mark.long
def test_controls_and_models_stand_beside_each_other(audited):
    by = {(f["model"], f["attack"]): f for f in audited["findings"]}
    assert by["overfitted FedAvg", "loss"]["verdict"] == "above"
    assert by["overfitted FedAvg", "alignment"]["verdict"] == "above"
    assert ("round 0", "calibrated") not in by
    assert {f["model"] for f in audited["findings"]} >= {"round 0", "overfitted FedAvg", "server", *SITES}
    assert by["other rows", "calibrated"]["members"] == by["other rows", "alignment"]["members"] == 20
    assert any(
        note.startswith("The control of other rows was trained on 20 of the members to ") for note in audited["notes"]
    )
    assert ("site-2", "alignment, wrong site") in by
    assert by["server", "loss"]["members"] == 40
    assert by["server", "loss"]["non_members"] == 40
    assert {r["site"]: r["coverage"] for r in audited["rebuilt"]}.keys() == set(SITES)
    assert any(note.startswith("loss: ") for note in audited["notes"])
    assert any(note.startswith("Left out: pictures reconstructed from gradients") for note in audited["notes"])
    assert any(
        note.startswith("Left out: tokens from the span of one step: ") and "train with AdamW" in note
        for note in audited["notes"]
    )
    assert any(note.startswith("Left out of every audit: LiRA") for note in audited["notes"])


@pytest.mark.long
def test_the_bound_of_canaries_stands_beside_the_claim(audited):
    """The run has not trained on them, and claims nothing. 19 coins of 20 are guessed right once in 50,000 audits."""
    note = audited["notes"][0]
    bound = f"epsilon at least {audited['epsilon_shown']:.2f} at delta 1e-05, replace-one"
    assert note.startswith(f"site-2, one run with 20 pairs of canaries: {bound}")
    assert note.endswith("claimed: nothing.")
    assert 0 <= audited["epsilon_shown"] < 1.0


@pytest.mark.long
def test_members_are_the_rows_of_the_site(run_folder):
    """site-2 is the first share and site-10 the second, though "site-10" sorts first."""
    config = parse(json.loads((run_folder / "config.json").read_text())["config"])
    task = tasks.load_task(config, strategies.create_method("fedrand").adapter, "cpu")
    source, asked = AuditDataSource(data=DATA), runs.load_run(run_folder).sites
    members = site_members(source, config, task, asked, SITES)
    for i, site in enumerate(SITES):
        assert list(members[site]) == list(task.examples(DATA, "train", DatasetShard(i, 2)))
    assert list(members) == list(SITES)
    others = draw_non_members(source, config, members, len(asked))
    used = {row.origin for rows in members.values() for row in rows}
    assert len(used) == 40
    assert not used & {row.origin for row in others}
    assert {row.origin.file for row in others} == {str(DATA / "train.jsonl")}


@pytest.mark.long
def test_rows_of_no_site_without_a_test_split_are_named_by_the_option(run_folder, tmp_path):
    config = parse(json.loads((run_folder / "config.json").read_text())["config"])
    (tmp_path / "train.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r'^--non-members: expected a file of the split "test" in .* found train'):
        draw_non_members(AuditDataSource(DATA, non_members=tmp_path), config, {}, 1)


@pytest.mark.long
def test_rows_of_all_sites_are_prepared_at_once_so_what_is_cut_is_said_once(run_folder, caplog):
    config = parse(runs.load_run(run_folder).config["config"] | {"task.max-tokens": 24})
    task = tasks.load_task(config, strategies.create_method("fedrand", config.method.params).adapter, "cpu")
    members, rest = draw_samples(AuditDataSource(DATA, most=20), config, task, SITES, SITES)
    assert [len(sample.rows) for sample in (*members.values(), rest)] == [20, 20, 20]
    (cut,) = (record.getMessage() for record in caplog.records)
    assert " of 60 (" in cut
    assert members["site-10"].rows == list(task.encode(task.examples(DATA, "train", DatasetShard(1, 2))))


@pytest.mark.long
def test_the_report_has_a_section_of_it(run_folder, audited):
    page = report.run_page_html([runs.load_run(run_folder)])
    assert "What attacks found" in page
    assert "overfitted FedAvg" in page
    assert "tensors the server could reconstruct" in page


@pytest.mark.parametrize("model", ["round 0", "other rows"])
@pytest.mark.parametrize(
    ("verdict", "kind", "words"),
    [
        ("above", "failed", "above 0.5, but must not be"), ("below", "failed", "below 0.5, but must not be"),
        ("contains", "completed", "not distinguishable from 0.5, as it must be"),
    ],
)  # fmt: skip
def test_the_report_marks_a_control_to_lose_by_whether_it_was_lost(tmp_path, model, verdict, kind, words):
    interval = [0.6, 0.5, 0.7]
    finding = {
        "model": model,
        "attack": "loss",
        "verdict": verdict,
        "epsilon_bound": 0.0,
        "members": 9,
        "non_members": 9,
    }
    finding |= {"p": 0.01}
    finding |= dict.fromkeys(("auroc", "tpr_at_1", "tpr_at_01"), interval)
    (tmp_path / "audit.json").write_text(json.dumps({"findings": [finding], "rebuilt": [], "notes": []}))
    assert f'class="tag {kind}">{words}<' in str(audit_section.findings_html(tmp_path))


@pytest.mark.slow
@pytest.mark.usefixtures("same_masks")
def test_a_secure_run_is_read_as_its_server_could(tmp_path, monkeypatch):
    """Attacks find nothing in the masked vectors, and a site's rows in the sum."""
    secure = {"secure.enabled": True, "method.name": "fedavg", "task.examples-per-site": 8, "run.rounds": 1}
    folder = made(tmp_path / "small", ["site-0", "site-1", "site-2"], {**secure, "train.epochs": 8})
    monkeypatch.setenv(VARIABLE, str(tmp_path / "key"))
    assert main(["audit", str(folder), "--data", str(DATA), "--max-rows", "40"]) == 0
    audit_report = json.loads((folder / "audit.json").read_text())
    by = {(f["model"], f["attack"]): f["verdict"] for f in audit_report["findings"]}
    for site in ("site-0", "site-1", "site-2"):
        assert by[site, "alignment"] != "above"
        assert by[site, "calibrated"] != "above"
        assert by[f"{site}, the sum", "alignment"] == "above"
    assert by["overfitted FedAvg", "alignment"] == "above"
    assert "could NOT see any single upload" in audit_report["notes"][0]
    assert "could NOT see any single upload" in report.run_page_html([runs.load_run(folder)])


@pytest.mark.long
def test_a_report_without_an_audit_says_so(make_run):
    page_html = report.run_page_html([runs.load_run(make_run())])
    assert page_html.count("Not attacked, so what an attacker could learn is unknown") == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], r"--data: the run config does not name the sites' examples, .* give --data, or --site"),
        (["--data", "nowhere"], "there is no folder or file of rows at"),
        (["--site", "x=y"], "--site: x did not take part in the run; its sites are site-10, site-2"),
        (["--site", "site-2"], "--site: expected NAME=FOLDER"),
        (["--data", str(DATA), "--max-rows", "3"], "--max-rows: expected at least 20, found 3"),
        (["--canaries", "site-2"], '--canaries: expected NAME=FOLDER, found "site-2"'),
        (["--minutes", "0"], "--minutes: expected more than 0"),
        (["--fail-above", "1.5"], "--fail-above: for auroc, expected at least 0 and less than 1, found 1.5"),
        (["--fail-above", "0.5", "--figure", "x"], "--figure: expected one of auroc"),
        (["--data", str(DATA), "--device", "cuda:99"], "device: expected"),
    ],
)
def test_bad_arguments_get_one_line(run_folder, capsys, arguments, said):
    assert main(["audit", str(run_folder), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    import re

    assert re.search(said, error)


def test_a_run_without_a_tap_says_how_to_get_one(make_run, capsys):
    assert main(["audit", str(make_run()), "--data", str(DATA)]) == 2
    assert (
        "there are no captured messages (index.jsonl); run with run.capture-messages = true" in capsys.readouterr().err
    )


def pictures_of(tmp_path, fields: str):
    """What an audit reads off the gradients of two sites with a picture of noise each."""
    import numpy as np
    import torch

    from fedveil import rng, tasks
    from fedveil.attacks.audit import image_reconstruction
    from fedveil.attacks.base import AdversaryView
    from fedveil.attacks.samples import AuditSample
    from fedveil.config import parse
    from fedveil.federation.exchange import MessageExchange
    from fedveil.federation.in_process import InProcessFederation
    from fedveil.strategies import create_method
    from fedveil.tasks.image_classification import ImageExample
    from fedveil.wire.capture import MessageCapture

    noise = torch.from_numpy(np.random.default_rng(7).uniform(-1, 1, (2, 3, 32, 32))).float()
    members = {site: AuditSample([ImageExample(lambda i=i: noise[i], i)], [""]) for i, site in enumerate("ab")}
    config = parse(
        {"task.name": "image-classification", "train.batch-size": 1, "run.rounds": 1, "run.deterministic": True}
    )
    method = create_method("random_binary", fields)
    task = tasks.load_task(config, method.adapter, "cpu")
    exchange = MessageExchange(method, "random_binary", task.spec)
    state = method.init(task.spec, task.initial(rng.initial_stream(0, "weights")), rng.initial_stream(0, "method init"))
    tap = MessageCapture(tmp_path / "tap")
    trainer_for = lambda site, ctx: task.trainer(members[site].rows, ctx.rng("batches"))  # noqa: E731
    InProcessFederation(exchange, config, trainer_for, list("ab"), state, tap=tap).run()
    reconstruction = image_reconstruction.reconstruct_images(AdversaryView.server(tap, exchange), task, config, members)
    assert reconstruction is not None
    (tmp_path / PICTURES).write_bytes(reconstruction.png)
    return reconstruction.notes, audit_section.reconstruction_images(tmp_path)


def test_pictures_are_read_off_whole_gradients_and_shown(tmp_path):
    notes, images_html = pictures_of(tmp_path, "rate = 0.0")
    assert "2 of 2 recovered" in notes[0]
    assert len(notes) == 1
    assert images_html is not None
    assert 'src="data:image/png;base64,' in images_html


@pytest.mark.long
def test_a_closed_form_that_fails_is_no_safety(tmp_path):
    notes, _ = pictures_of(tmp_path, "rate = 0.5")
    assert "0 of 2 recovered" in notes[0]
    assert "NOT shown to be safe" in notes[1]


def test_the_help_names_every_figure_of_a_gate(capsys):
    """As text, since gates need torch."""
    with pytest.raises(SystemExit):
        main(["audit", "--help"])
    assert ", ".join(threshold_gate.FIGURES) in " ".join(capsys.readouterr().out.split())
