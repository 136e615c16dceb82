"""The picture of an attacker's success, quality and bytes, and its sentences: never more than was measured."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest

from fedveil.config import parse
from fedveil.console import demo_settings
from fedveil.console.demo_settings import EarlierRange
from fedveil.console.runs import run_reader
from fedveil.console.web.report import run_page, tradeoff, tradeoff_plot
from tests.fedveil.console.conftest import write_run
from tests.fedveil.console.web.report.made import audited, found, over_sites

SECURE, NOISE = {"secure.enabled": True}, {"dp.noise-multiplier": 0.94, "dp.epsilon": 8.0}


def with_config(folder, settings):
    """Changes the run's config."""
    content = json.loads((folder / "config.json").read_text())
    content["config"] |= settings
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def made_arms(tmp_path):
    """The plain run, a secure sum and noise, of three sites each: (less of the sum, of the noise, ...) -> the arms."""

    count = itertools.count()

    def made(secure=0.07, noise=0.37, between=0.3, error=0.01, plain=(0.98, 0.97, 0.99), **controls):
        out = tmp_path / f"demo-{next(count)}"
        write = lambda name: write_run(out / f"{name}-", "fedavg").rename(out / name)  # noqa: E731
        base = audited(write("fedavg"), across=[over_sites(*plain, error=error)], **controls)
        of_sum = over_sites(*(p - secure for p in plain), wrong=None, error=error, less=[(base, secure)])
        sums = audited(with_config(write("fedavg-secure"), SECURE), across=[of_sum])
        of_noise = over_sites(*(p - noise for p in plain), error=error, less=[(base, noise), (sums, between)])
        noisy = audited(with_config(write("fedavg-dp"), NOISE), across=[of_noise])
        return [read(folder) for folder in (base, sums, noisy)]

    return made


def read(folder):
    return tradeoff.read_tradeoff_run(run_reader.load_run(folder))


def answer(arms) -> str:
    return tradeoff.tradeoff_verdict(arms)[0]


def test_each_arm_has_a_clause_with_its_worst_site(made_arms):
    arms = made_arms()
    assert [arm.worst.site for arm in arms] == ["site-3"] * 3
    text = answer(arms)
    assert text.startswith(
        "An attacker who reads what fedavg sends picks the training example from a pair at the worst site 99 times in "
        "100 (a coin toss: 50). The secure sum of 3 sites (fedavg-secure) hides whose update it is, not what is in it: "
        "92. "
        "Noise with epsilon 8 (fedavg-dp) brings it to 62, where chance alone gives the worst of 3 sites up to 61 in "
        "19 demos of 20"
    )


def test_a_line_per_run_has_all_sites_their_mean_and_their_base_line(made_arms):
    arms = made_arms()
    line = tradeoff.tradeoff_verdict(arms)[1]
    low, high = (99 + s * 100 * 0.02 * NormalDist().inv_cdf(1 - 0.01 / 9 / 2) for s in (-1, 1))
    assert line == (
        f"fedavg: worst site site-3 99.0 [{low:.1f}, {min(high, 100):.1f}]; sites 98.0, 97.0, 99.0; mean 98.0 [95.4, "
        "100.0]; own upload minus another site's +48.0, +47.0, +49.0."
    )
    assert "own upload" not in tradeoff.tradeoff_verdict(arms)[2]  # a sum has no wrong upload


@pytest.mark.parametrize(
    ("changes", "clause"),
    [
        ({"secure": 0.02}, "fedavg-secure: 97 at the worst site against 99 with fedavg: no difference shown here."),
        # ten standard errors, but below the margin
        ({"secure": 0.02, "error": 0.002},
         "fedavg-secure: 97 at the worst site against 99 with fedavg: no difference shown here."),
        ({"secure": 0.05, "error": 0.02},
         "fedavg-secure: 94 at the worst site against 99 with fedavg: no difference shown here."),
        ({"noise": 0.02}, "fedavg-dp: 97 at the worst site against 99 with fedavg: no difference shown here."),
        ({"between": 0.02}, "in 19 demos of 20 (not shown to differ from fedavg-secure)"),
        ({"plain": (0.6, 0.55, 0.5), "secure": 0.01, "noise": 0.02, "error": 0.03},
         "fedavg: at the worst site, an attacker is right 60 times in 100 (mean over the sites 55), which cannot "
         "be told apart from a coin toss here."),
    ],
)  # fmt: skip
def test_a_claim_that_does_not_hold_is_not_printed(made_arms, changes, clause):
    text = answer(made_arms(**changes))
    assert clause in text
    assert ("hides whose update" in text) is (changes.get("secure", 0.07) == 0.07)
    assert ("brings it to" in text) is ("noise" not in changes)


def test_comparisons_are_corrected_for_each_other(made_arms):
    """z of 2.7: p is 0.007, below 1 % for one comparison, but not for the second of three."""
    assert NormalDist().cdf(-2.7) * 2 < 0.01
    sums, noise = made_arms(secure=0.054, between=0.04, error=0.02, noise=0.37)[1:]
    plain = made_arms(secure=0.054, between=0.04, error=0.02, noise=0.37)[0]
    assert tradeoff.decide_differences([plain, sums]) == {("fedavg-secure", "fedavg"): True}
    assert tradeoff.decide_differences([plain, sums, noise])["fedavg-secure", "fedavg"] is False


def test_the_cost_of_noise_is_named_only_if_it_cost_something(made_arms):
    arms = made_arms()
    plain, noise = replace(arms[0], before=2.21, after=1.92), replace(arms[2], before=2.21, after=2.03)
    assert answer([plain, noise]).endswith(", and costs 0.11 of the 0.29 nats that fedavg learned.")
    assert answer([plain, replace(noise, after=1.9)]).endswith(", at a test loss of 1.90 against 1.92.")


def test_another_method_is_compared_with_none(made_arms, tmp_path, monkeypatch):
    plain = made_arms()[0]
    folder = write_run(tmp_path, "ffa_lora")
    strong, weak = (
        replace(read(audited(folder, across=[over_sites(*values)])), sent=plain.sent // 4 * 3)
        for values in ((0.95, 0.96, 0.97), (0.8, 0.81, 0.82))
    )
    assert answer([plain, strong]).endswith(" ffa_lora saves 25 % of the bytes and hides little: 97.")
    assert answer([plain, weak]).endswith(" ffa_lora saves 25 % of the bytes: 82.")
    ffa = strong
    assert tradeoff.decide_differences([plain, ffa]) == {}
    monkeypatch.setattr(demo_settings, "EARLIER_RANGES", {"ffa_lora": EarlierRange(64.6, 90.2, 16)})
    monkeypatch.setattr(demo_settings, "DRAWN", {"ffa_lora"})
    assert "this depends on its draws" not in answer([plain, ffa])  # the settings are others
    text = answer([plain, replace(ffa, is_demo=True)])
    assert (
        ": 97; this depends on its draws (mean over the sites 65 to 90 in 16 runs), so a single run is not compared."
        in text
    )


def test_a_site_whose_base_line_failed_twice_is_named_and_not_judged(tmp_path):
    base = write_run(tmp_path, "fedavg")
    audited(base, found("site-3", 0.91, "above", "alignment, wrong site"), across=[over_sites(0.98, 0.97, 0.99)])
    arm = read(base)
    assert [site.is_void for site in arm.sites] == [False, False, True]
    assert arm.worst.site == "site-1"
    other = read(audited(write_run(tmp_path, "fedrand"), across=[over_sites(0.7)]))
    lines = tradeoff.tradeoff_verdict([arm, other])
    assert (
        "not judged, because the same examples score above chance where they were not trained on: site-3: 50"
        in lines[1]
    )
    assert "sites 98.0, 97.0;" in lines[1]
    svg = tradeoff_plot.tradeoff_svg([arm, other])
    assert ">site not judged<" in svg
    assert ">site not judged<" not in tradeoff_plot.tradeoff_svg([other, other])


def test_a_run_with_a_void_site_is_not_compared_by_its_mean(made_arms):
    plain, sums, _ = made_arms()
    void = replace(sums, sites=[replace(sums.sites[0], is_void=True), *sums.sites[1:]])
    assert tradeoff.decide_differences([plain, sums]) == {("fedavg-secure", "fedavg"): True}
    assert tradeoff.decide_differences([plain, void]) == {}


@pytest.mark.parametrize(
    ("controls", "why"),
    [
        ({"won": "contains"}, "alignment: it does not succeed on memorized examples (93 times in 100)"),
        ({"lost": "above"}, "alignment: it distinguishes examples that no model was trained on (other rows: 52)"),
    ],
)
def test_a_broken_attack_is_named_and_decides_nothing(made_arms, controls, why):
    arms = made_arms(**controls)
    assert answer(arms) == f"Undecided here: nothing can be judged on fedavg: {why}."
    svg = tradeoff_plot.tradeoff_svg(arms)
    assert svg.count(">undecided</text>") == 1
    assert ">99<" not in svg


def test_a_comparison_with_another_audit_than_that_of_the_base_does_not_count(made_arms, tmp_path):
    arms = made_arms()
    again = read(audited(tmp_path / "demo-0" / "fedavg", across=[over_sites(0.98, 0.98, 0.98)]))
    assert tradeoff.decide_differences([again, *arms[1:]]) == {("fedavg-dp", "fedavg-secure"): True}
    assert "no difference shown here" in answer([again, *arms[1:]])


def test_audits_of_other_commands_have_sites_but_no_mean_and_no_comparison(tmp_path):
    plain = read(audited(write_run(tmp_path, "fedavg"), found("site-1", 0.7, "above"), found("site-2", 0.8, "above")))
    assert [(site.site, site.auroc) for site in plain.sites] == [("site-1", 0.7), ("site-2", 0.8)]
    assert plain.mean is None
    other = read(audited(write_run(tmp_path, "fedrand"), found("site-2", 0.6, "contains")))
    text = "\n".join(tradeoff.tradeoff_verdict([plain, other]))
    assert text.startswith(
        "An attacker who reads what fedavg sends picks the training example from a pair at the worst"
    )
    assert "fedavg: worst site site-2 80.0; sites 70.0, 80.0." in text
    weak = read(audited(tmp_path / "fedavg", found("site-1", 0.6, "contains")))
    assert answer([weak, other]).startswith(
        "fedavg: at the worst site, an attacker is right 60 times in 100, which cannot"
    )


def test_of_a_secure_run_without_a_mean_only_the_sums_count(tmp_path):
    summed = with_config(write_run(tmp_path, "fedavg"), SECURE)
    audited(summed, found("site-1", 0.5, "contains"), found("site-1, the sum", 0.9, "above"))
    assert [(site.site, site.auroc) for site in read(summed).sites] == [("site-1, the sum", 0.9)]


def test_without_a_plain_run_or_an_attack_nothing_is_said(made_arms, tmp_path):
    arms = made_arms()
    assert tradeoff.tradeoff_verdict(arms[1:]) == tradeoff.tradeoff_verdict(arms[:1]) == []
    plain, other = (read(write_run(tmp_path / "new", name)) for name in ("fedavg", "fedrand"))
    assert tradeoff.tradeoff_verdict([plain, other]) == []
    assert answer([plain, arms[1]]) == "Undecided here: nothing can be judged on fedavg: it was not attacked."


@pytest.mark.parametrize(("sites", "members", "others"), [(1, 64, 64), (3, 64, 64), (5, 64, 30)])
def test_the_worst_site_by_chance_is_that_of_simulated_scores(sites, members, others):
    rng, drawn = np.random.default_rng(6), []
    for _ in range(4000):
        ordered = np.sort(rng.random(others))
        drawn.append(max(np.searchsorted(ordered, rng.random(members)).mean() / others for _ in range(sites)))
    bound = tradeoff.worst_by_chance(sites, members, others)
    assert np.mean(np.array(drawn) < bound) == pytest.approx(0.95, abs=0.014)  # 4 standard deviations


def test_only_the_settings_of_the_demo_are_the_demos(made_arms):
    assert not any(arm.is_demo for arm in made_arms())
    for defense in demo_settings.DEFENSES.values():
        own = {**demo_settings.SETTINGS, **defense, "method.name": "fedrand", "run.rounds": 2, "cohort.sites": 3}
        assert demo_settings.has_demo_settings(parse(own).flat())
        for change in ({"run.rounds": 3}, {"train.epochs": 1}, {"task.data": "mine"}, {"method.params": "rho = 0.3"}):
            assert not demo_settings.has_demo_settings(parse(own | change).flat())


def test_limits_of_a_demo_name_what_is_not_seeded_and_earlier_figures(made_arms, monkeypatch):
    monkeypatch.setattr(demo_settings, "EARLIER_RANGES", {"fedavg": EarlierRange(97.6, 99.4, 16)})
    arms = [replace(arm, is_demo=True) for arm in made_arms()]
    text = "\n".join(tradeoff.tradeoff_verdict(arms))
    assert "So your figures will differ, mean over the sites: fedavg 98 to 99 in 16 runs." in text
    assert "Each site trains four times on 64 examples, so that attacks succeed" in text
    assert "Each site trains" not in "\n".join(tradeoff.tradeoff_verdict(made_arms()))


def test_the_picture_has_every_site_and_the_worst_figure(made_arms):
    arms = made_arms()
    svg = tradeoff_plot.tradeoff_svg(arms)
    for text in (
        ">fedavg<",
        ">fedavg-secure<",
        ">fedavg-dp<",
        ">99<",
        ">92<",
        ">62<",
        ">0.55<",
        ">3.13<",
        ">worst site<",
    ):
        assert text in svg
    assert "a coin toss: 50): fedavg 99 (mean over the sites 98), test loss 3.13, 0.55 MB sent; fedavg-secure 92" in svg
    assert "Each dot is a site, the filled dot is the worst site" in tradeoff_plot.tradeoff_caption(arms)


def test_the_page_opens_with_it(tmp_path, made_arms):
    made_arms()
    runs = [run_reader.load_run(tmp_path / "demo-0" / name) for name in ("fedavg", "fedavg-secure")]
    page = run_page.run_page_html(runs)
    assert 'what an attacker learns, and what protection costs</h1>\n<p class="lead">fedavg / fedavg-secure. A' in page
    assert page.index("at the worst site 99 times in 100") < page.index("<h2")
    assert 'aria-label="What an attacker learns.' in page


def test_without_an_audit_the_page_has_no_picture(run_folders):
    page = run_page.run_page_html([run_reader.load_run(f) for f in run_folders])
    assert "What an attacker learns." not in page
    assert "<h1>FedVeil: " in page


def test_a_run_without_scores_says_so(made_arms, tmp_path):
    made_arms()
    arms = []
    for folder in (tmp_path / "demo-0" / "fedavg", tmp_path / "demo-0" / "fedavg-secure"):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        text = "".join(json.dumps(line | {"scores": None}) + "\n" for line in lines)
        (folder / "metrics.jsonl").write_text(text)
        arms.append(read(folder))
    assert tradeoff_plot.tradeoff_svg(arms).count(">not scored</text>") == 2


def test_arms_are_capped(made_arms):
    arms = [made_arms()[0]] * 20
    assert tradeoff_plot.tradeoff_svg(arms).count(">99</text>") == tradeoff_plot.MOST_ARMS
    assert tradeoff_plot.tradeoff_svg(arms[:1]) == ""
