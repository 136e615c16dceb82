"""Curves from the sites' own losses, capped charts, texts before and after, and audits that nobody's audit wrote."""

from __future__ import annotations

import json

import pytest

from fedveil.attacks.audit.findings import AuditReport
from fedveil.console.runs import per_site, run_reader, sample_texts
from fedveil.console.web.report import audit_section, line_chart, run_page
from fedveil.console.web.report.line_chart import ChartCurve
from fedveil.errors import StateError
from tests.fedveil.console.web.report.made import audited, controlled, found


def rewritten(run, change):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(change(line)) + "\n" for line in lines))
    return run_reader.load_run(run)


def reports(*of_rounds):
    """Each attempt with the reports given for its round, and without scores."""

    def change(line):
        line = {k: v for k, v in line.items() if k != "scores"}
        return line if line["round"] < 0 else line | {"reports": dict(enumerate(of_rounds[line["round"]]))}

    return change


def told(loss, num_examples=1.0):
    return {"loss_received": loss, "num_examples": num_examples}


def test_the_sites_losses_are_means_weighted_with_their_examples(make_run):
    run = rewritten(make_run(), reports([told(4.0, 30), told(2.0, 10)], [told(2.0), told(1.0)], [{"num_examples": 3}]))
    assert per_site.site_losses(run) == [(0, 3.5), (1, 1.5)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, 1e300, "4", None, True])
def test_a_loss_that_is_none_counts_for_nothing(make_run, bad):
    run = rewritten(make_run(), reports([told(bad), told(3.0)], [told(2.0, bad), told(1.0)], [told(bad)]))
    assert per_site.site_losses(run) == [(0, 3.0), (1, 1.0)]


def test_a_run_that_is_not_scored_shows_them_for_what_they_are(make_run):
    run = rewritten(make_run(), reports([told(4.0)], [told(3.0)], [told(2.0)]))
    page = run_page.run_page_html([run])
    assert "Training loss at the sites" in page
    assert "This is not a held-out loss." in page


def test_a_run_that_is_scored_does_not(make_run):
    page = run_page.run_page_html([run_reader.load_run(make_run())])
    assert "Training loss at the sites" not in page
    assert "not a held-out loss" not in page


def test_a_chart_has_as_many_curves_as_colours_and_says_so():
    curves = [ChartCurve(f"run {i}", [(0, i), (1, 2)], i) for i in range(9)]
    svg = line_chart.curves_svg("Test loss", "rounds", "loss", curves)
    assert ">Test loss (first 6 of 9)</text>" in svg
    assert ">run 5</text>" in svg
    assert ">run 6</text>" not in svg
    assert 'aria-label="Test loss. loss over rounds: run 0 from 0 at 0 to 2 at 1;' in svg


def test_a_label_of_others_is_neither_mathematics_nor_markup():
    svg = line_chart.curves_svg("T", "x", "y", [ChartCurve("$\\frac$<i>", [(0, 1)], 0), ChartCurve("b", [(0, 1)], 1)])
    assert "$\\frac$&lt;i&gt;" in svg


def test_texts_before_and_after_are_shown_as_text(make_run):
    run = make_run()
    rows = [{"prompt": "name[X]", "before": "<b>the", "after": "X \x1b[1mis", "wanted": "X is"}]
    (run / sample_texts.FILE).write_text(json.dumps(rows))
    page = run_page.run_page_html([run_reader.load_run(run)])
    assert "&lt;b&gt;the" in page
    assert "X \\x1b[1mis" in page
    assert "after the last" in page


@pytest.mark.parametrize("text", ["{", "[1]", '[{"prompt": "a"}]', "[" * 100_000, '"' + "a" * (1 << 20) + '"'])
def test_texts_that_the_demo_has_not_written_are_one_error(make_run, text):
    run = make_run()
    (run / sample_texts.FILE).write_text(text)
    with pytest.raises(StateError, match=r"samples\.json: expected sample texts written by fedveil demo"):
        sample_texts.read_samples(run)


def test_long_texts_are_cut_and_few(make_run):
    run = make_run()
    row = dict.fromkeys(("prompt", "before", "after", "wanted"), "a" * 5000)
    (run / sample_texts.FILE).write_text(json.dumps([row] * 40))
    read = sample_texts.read_samples(run)
    assert len(read) == 12
    assert len(read[0].prompt) == 600


def test_the_page_folds_the_table_away_and_draws_the_plot(make_run):
    run = audited(make_run(), found("site-1", 0.9, "above"))
    html = str(audit_section.findings_html(run))
    assert html.index("Membership shows in 1 of 1 findings") < html.index("<svg") < html.index("<details>")
    assert "All 4 findings, including controls" in html
    assert html.index("<details>") < html.index("overfitted FedAvg")


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "<b>"},
        {"auroc": [0.5, 0.4, float("nan")]},
        {"auroc": [0.5, 0.4]},
        {"auroc": [7, 0.4, 0.5]},
        {"epsilon_bound": float("inf")},
        {"p": -1},
        {"members": float("inf")},
        {"members": None},
    ],
)
def test_an_audit_that_fedveil_audit_has_not_written_is_one_error(make_run, change):
    run = make_run()
    rows = [row | change for row in AuditReport(controlled(), []).to_json()["findings"][:1]]
    (run / "audit.json").write_text(json.dumps({"findings": rows, "rebuilt": [], "notes": []}))
    with pytest.raises(StateError, match=r"audit\.json: not a valid output of fedveil audit .* audit the run again"):
        AuditReport.read(run)


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, '{"findings": 3, "rebuilt": [], "notes": []}'])
def test_an_audit_of_another_form_is_one_error(make_run, text):
    run = make_run()
    (run / "audit.json").write_text(text)
    with pytest.raises(StateError, match="audit the run again"):
        AuditReport.read(run)


def test_an_audit_is_read_as_it_was_written(make_run):
    run = audited(make_run(), found("site-1", 0.9, "above"))
    assert AuditReport.read(run) == AuditReport(controlled(found("site-1", 0.9, "above")), [], ["a note"])
    whole = AuditReport(controlled(), [], ["a note"], ["server: not told"], epsilon_shown=1.25)
    (run / "audit.json").write_text(json.dumps(whole.to_json()))
    assert AuditReport.read(run) == whole


@pytest.mark.parametrize("shown", [-1, float("nan"), float("inf"), "much", [1]])
def test_an_epsilon_that_canaries_cannot_show_is_one_error(make_run, shown):
    run = make_run()
    (run / "audit.json").write_text(json.dumps(AuditReport([], []).to_json() | {"epsilon_shown": shown}))
    with pytest.raises(StateError, match="audit the run again"):
        AuditReport.read(run)
