"""The picture of quality, attacker and bytes, and its sentences: never more than was measured."""

from __future__ import annotations

import json

import pytest

from fedveil.console.runs import run_reader
from fedveil.console.web.report import run_page, tradeoff, tradeoff_plot
from tests.fedveil.console.conftest import write_run
from tests.fedveil.console.web.report.made import audited, found, over_sites


@pytest.fixture
def pair(tmp_path):
    """FedAvg told 0.86, FedRand `value`: (value, verdict, controls) -> the arms."""

    def made(value=0.6, verdict="contains", base=0.86, of_base="above", **controls):
        fedavg = audited(write_run(tmp_path, "fedavg"), found("site-1", base, of_base), **controls)
        fedrand = audited(write_run(tmp_path, "fedrand"), found("site-2", value, verdict))
        return [run_reader.load_run(fedavg), run_reader.load_run(fedrand)]

    return made


def said(runs) -> str:
    return "\n".join(tradeoff.tradeoff_verdict([tradeoff.read_tradeoff_run(run) for run in runs]))


def test_an_arm_has_the_strongest_usable_finding_with_its_controls(tmp_path):
    run = write_run(tmp_path, "fedavg")
    audited(run, found("site-1", 0.7, "above"), found("site-2", 0.8, "above"), found("site-3", 0.99, "above", "loss"))
    arm = tradeoff.read_tradeoff_run(run_reader.load_run(run))
    assert (arm.told.model, arm.told.attack) == ("site-2", "alignment")  # loss has no controls
    assert arm.lost == pytest.approx((0.42, 0.57))
    assert arm.won == pytest.approx((0.9, 0.96))
    assert (arm.before, arm.after) == (4.21, run_reader.load_run(run).final["loss"])


def test_less_is_said_only_where_the_intervals_are_apart(pair):
    text = said(pair())
    assert text.startswith(
        "With fedrand an attacker is right 60 times in 100 (a coin: 50) instead of 86 times in 100 with fedavg, "
        "at a test loss of 3.12 against 3.13, with 47 % fewer bytes sent."
    )
    assert (
        "fedrand: 60.0 times in 100 [55.0, 65.0]: less, and not distinguishable from guessing; at a test loss" in text
    )


def test_an_interval_that_leaves_a_guess_out_beside_a_verdict_that_does_not_is_explained(tmp_path):
    base = audited(write_run(tmp_path, "fedavg"), found("site-1", 0.86, "above"))
    run = audited(write_run(tmp_path, "fedrand"), found("site-2", 0.6, "contains"), found("site-3", 0.5, "contains"))
    text = said([run_reader.load_run(base), run_reader.load_run(run)])
    assert "[55.0, 65.0]: less, and not distinguishable from guessing at any site, corrected for 2 findings; " in text


def test_an_overlap_is_not_told_apart(pair):
    text = said(pair(0.82, "above"))
    assert text.startswith(
        "Undecided here: no run differs measurably from fedavg, on which an attacker is right 86 times"
    )
    assert (
        "82.0 times in 100 [77.0, 87.0]: no measurable difference from fedavg; at a test loss of 3.12 against 3.13, "
        "with 47 %" in text
    )


def test_intervals_apart_are_less_but_not_nothing(pair):
    assert "fedrand: 70.0 times in 100 [65.0, 75.0]: less, but not nothing; " in said(pair(0.7, "above"))


def test_intervals_apart_on_the_other_side_are_more(pair):
    text = said(pair(0.97, "above"))
    assert text.startswith("No benefit here: fedrand revealed more to an attacker than fedavg (86 times in 100).")
    assert "fedrand: 97.0 times in 100 [92.0, 100.0]: more; " in text


@pytest.fixture
def same_rows(tmp_path):
    """FedAvg at 0.80 over the sites, and arms by name: (mean, what fedavg has more, p) -> the sentences."""

    def made(**arms):
        base = audited(write_run(tmp_path, "fedavg"), found("site-1", 0.86, "above"), across=[over_sites(0.80)])
        runs = [base]
        for name, (value, less, p) in arms.items():
            across = [over_sites(value, base, less, p)]
            runs.append(audited(write_run(tmp_path, name), found("site-1", value, "above"), across=across))
        return [run_reader.load_run(run) for run in runs]

    return made


def test_the_same_rows_tell_runs_apart_whose_intervals_overlap(same_rows):
    runs = same_rows(fedrand=(0.79, 0.01, 0.5), secure=(0.74, 0.06, 0.003))
    text = said(runs)
    assert text.startswith(
        "With secure an attacker is right 74 times in 100 (a coin: 50) instead of 80 times in 100 with fedavg, at the "
        "worst site 74 instead of 86, "
    )
    assert (
        "example of a pair 80.0 times in 100 [76.0, 84.0] over the sites, at the worst site (site-1) 86.0 [81.0, 91.0]."
        in text
    )
    assert "79.0 [74.0, 84.0]: no measurable difference from fedavg, -1.0 [-5.0, +3.0] on the same examples; " in text
    assert "74.0 [69.0, 79.0]: less, but not nothing, -6.0 [-10.0, -2.0] on the same examples; " in text
    svg = tradeoff_plot.tradeoff_svg([tradeoff.read_tradeoff_run(run) for run in runs])
    assert ">80 %<" in svg  # the mean over the sites, not the strongest site's 86
    assert text.endswith("\nOne run of each: the intervals are over examples, and the draws of another run may differ.")
    assert "the mean over the sites" in tradeoff_plot.tradeoff_caption(
        [tradeoff.read_tradeoff_run(run) for run in runs]
    )


@pytest.mark.parametrize(
    "more,answer",
    [
        ({}, "With a an attacker is right 74"),
        ({"b": (0.79, 0.01, 0.5)}, "Undecided here: no run differs measurably from"),
    ],
)
def test_comparisons_are_corrected_for_each_other(same_rows, more, answer):
    assert said(same_rows(a=(0.74, 0.06, 0.03), **more)).startswith(answer)


def test_on_the_same_rows_more_is_said_too(same_rows):
    text = said(same_rows(fedrand=(0.86, -0.06, 0.001)))
    assert text.startswith("No benefit here: fedrand revealed more to an attacker than fedavg (80 times in 100).")
    assert "86.0 [81.0, 91.0]: more, +6.0 [+2.0, +10.0] on the same examples; " in text


def test_a_comparison_with_another_audit_than_that_of_the_base_does_not_count(same_rows):
    runs = same_rows(secure=(0.78, 0.06, 0.001))
    audited(runs[0].folder, found("site-1", 0.86, "above", half=0.06), across=[over_sites(0.80)])  # audited again
    text = said(runs)
    assert text.startswith("Undecided here")
    assert "on the same examples" not in text


def test_an_attack_without_controls_is_not_compared(tmp_path):
    base = audited(write_run(tmp_path, "fedavg"), found("site-1", 0.86, "above"), across=[over_sites(0.80)])
    across = [over_sites(0.74, base, 0.06, 0.001)]
    arm = audited(write_run(tmp_path, "lame"), found("site-1", 0.74, "above"), across=across, won="contains")
    text = said([run_reader.load_run(base), run_reader.load_run(arm)])
    assert text.startswith("Undecided here")
    assert "lame: undecided; " in text


@pytest.mark.parametrize("given", [{"of_base": "contains", "base": 0.55}, {"won": "contains"}, {"lost": "above"}])
def test_where_the_attack_does_not_count_on_fedavg_nothing_is_concluded(pair, given):
    runs = pair(**given)
    assert said(runs) == "The benefit of withholding is undecided here: no valid attack wins on fedavg."
    assert (
        "docs/results.md (fedveil bench fedrand/table4 --small); alignment there: FedAvg client 0.9"
        in tradeoff.is_larger([tradeoff.read_tradeoff_run(run) for run in runs])
    )


def test_an_attack_that_does_not_count_is_not_drawn(pair):
    svg = tradeoff_plot.tradeoff_svg([tradeoff.read_tradeoff_run(run) for run in pair(won="contains")])
    assert ">undecided</text>" in svg
    assert ">86 %</text>" not in svg
    assert ">60 %</text>" in svg


def test_the_picture_has_every_figure_and_its_words(pair):
    svg = tradeoff_plot.tradeoff_svg([tradeoff.read_tradeoff_run(run) for run in pair()])
    for text in (
        ">fedavg<",
        ">fedrand<",
        ">86 %<",
        ">60 %<",
        ">0.55 MB<",
        ">0.29 MB<",
        ">loss 3.13<",
        ">untrained<",
        ">memorized examples<",
    ):
        assert text in svg
    assert (
        "fedavg: test loss 3.131, an attacker picks the trained example of a pair: 86 % (a coin: 50 %), 0.55 MB" in svg
    )


@pytest.mark.long
def test_the_page_opens_with_it(pair):
    runs = pair()
    page = run_page.run_page_html(runs)
    assert (
        f'benefit and cost of withholding</h1>\n<p class="lead">{runs[0].name} / {runs[1].name}. A model trained '
        in page
    )
    assert page.index("picks the trained example of a pair 86.0 times") < page.index(">Summary<")
    assert 'aria-label="Benefit and cost of withholding.' in page


def test_without_an_audit_the_page_has_no_picture(run_folders):
    page = run_page.run_page_html([run_reader.load_run(f) for f in run_folders])
    assert "Benefit and cost of withholding." not in page
    assert "<h1>FedVeil: " in page


def test_a_run_without_scores_says_so(pair):
    runs = pair()
    for run in runs:
        lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        text = "".join(json.dumps(line | {"scores": None}) + "\n" for line in lines)
        (run.folder / "metrics.jsonl").write_text(text)
    arms = [tradeoff.read_tradeoff_run(run_reader.load_run(run.folder)) for run in runs]
    assert tradeoff_plot.tradeoff_svg(arms).count(">not scored</text>") == 2


def test_arms_are_capped(pair):
    arms = [tradeoff.read_tradeoff_run(pair()[0])] * 20
    assert tradeoff_plot.tradeoff_svg(arms).count(">86 %</text>") == tradeoff_plot.MOST_ARMS
    assert tradeoff_plot.tradeoff_svg(arms[:1]) == ""
