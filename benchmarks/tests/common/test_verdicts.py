"""Verdicts on figures: equal methods are told apart in less than one of twenty tables, different ones reliably."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from fedveil.errors import ConfigError
from fedveil_bench.common import resampling, verdicts
from fedveil_bench.common.resampling import ResampledMetric

ROWS, TABLES = 200, 300
DRAWN = resampling.draw_counts(ROWS, 8)


def table(rng: np.random.Generator, seeds: int, training: float, shared: bool, better: float = 0.0) -> dict:
    """Accuracy of five methods on rows of different difficulty, of which the first is `better` by so many logits.

    `training`: how far one training lies from another, in logits. `shared`: whether all seeds score the same rows.
    """
    rows = [rng.normal(0, 1.5, ROWS)] * seeds if shared else list(rng.normal(0, 1.5, (seeds, ROWS)))
    figures = {}
    for name in "abcde":
        of_seeds = []
        for hard in rows:
            logits = rng.normal(0, training) + better * (name == "a") + hard + rng.logistic(0, 0.3, ROWS)
            right = 100.0 * (logits > 0)
            of_seeds.append(ResampledMetric(float(right.mean()), DRAWN @ right / ROWS, ROWS))
        figures[name] = resampling.over_seeds(of_seeds)
    return figures


@pytest.mark.long
@pytest.mark.parametrize(
    ("seeds", "training", "shared"), [(3, 0.1, False), (3, 0.4, True), (5, 0.1, True), (5, 0.4, False)]
)
def test_identical_methods_are_told_apart_in_less_than_one_table_of_twenty(seeds, training, shared):
    """Seeds drawn with replacement and no correction told them apart in 23 to 79 % of such tables."""
    rng = np.random.default_rng([seeds, int(10 * training), shared, 1])
    said = [verdicts.describe_ordering(table(rng, seeds, training, shared), "abcde", "x") for _ in range(TABLES)]
    assert np.mean(["is not decided" not in sentence for sentence in said]) < 0.05


def test_a_difference_beyond_the_training_s_is_told():
    rng = np.random.default_rng(4)
    said = [verdicts.describe_ordering(table(rng, 5, 0.1, True, better=1.0), "abcde", "x") for _ in range(40)]
    assert np.mean(["4 of 10 pairs hold, 0 are reversed" in sentence for sentence in said]) > 0.9


def by_seed(*values: float, rows: float = 0.0) -> ResampledMetric:
    """A figure of such values, with that standard deviation over the rows, which all seeds share."""
    noise = rows * np.random.default_rng(0).normal(size=resampling.REPLICATES)
    return resampling.over_seeds([ResampledMetric(v, v + noise, 10) for v in values])


@pytest.mark.parametrize("seeds", [1, 2])
def test_one_seed_or_two_decide_nothing(seeds):
    figures = {"a": by_seed(*[0.9] * seeds), "b": by_seed(*[0.2] * seeds)}
    assert verdicts.describe_ordering(figures, "ab", "x").endswith("is not decided: no pair of 1 is told apart.")
    assert verdicts.judge_claim(resampling.subtract_metrics(figures["a"], figures["b"]), {"is": "higher"}).p == 1.0


def test_how_words_were_found():
    said = [
        ("this", verdicts.judge_sign(by_seed(1.0, 1.1, 1.2))),
        ("that", verdicts.judge_sign(by_seed(1.0, -1.1, 1.2))),
    ]
    *sentences, last = verdicts.list_verdicts(said, 3)
    assert sentences == ["this: higher.", "that: not told apart."]
    assert last.endswith("verdicts are corrected for 2 comparisons (Holm).")
    assert verdicts.list_verdicts(said, 1)[-1].endswith("(Holm); 1 seed is too few to decide.")
    assert verdicts.list_verdicts(said, 2)[-1].endswith("(Holm); 2 seeds are too few to decide.")
    assert "over rows and seeds;" in last
    assert "over seeds, one test set;" in verdicts.list_verdicts(said, 5, verdicts.ONE_TEST_SET)[-1]
    assert verdicts.list_verdicts([], 3) == []


def test_a_row_stands_above_its_controls_where_it_does_above_each():
    clear, open_, below = by_seed(1.0, 1.0, 1.01), by_seed(1.0, -2.0, 1.5), by_seed(-1.0, -1.0, -1.01)

    def word(*given):
        return verdicts.decide_words([verdicts.all_of(given, "higher", "above", "open")])

    assert word(clear, clear) == ["above"]
    assert word(clear, open_) == word(clear, below) == word(below) == ["open"]
    assert verdicts.all_of([below], "lower", "below", "open").p < 0.04


def test_ordering_says_what_the_figures_say():
    figures = {"a": by_seed(0.90, 0.91, 0.90), "b": by_seed(0.70, 0.71, 0.71), "c": by_seed(0.50, 0.51, 0.52)}
    assert verdicts.describe_ordering(figures, "abc", "x") == "x: the paper's order a > b > c holds in all 3 pairs."
    wrong = verdicts.describe_ordering(figures, "bac", "x")
    assert "does not hold: 2 of 3 pairs hold, 1 are reversed: b over a (-0.197 [-0.211, -0.182]), 0 are not" in wrong
    part = verdicts.describe_ordering(figures | {"d": by_seed(0.51, 0.52, 0.50)}, "adc", "x")
    assert "holds in part: 2 of 3 pairs hold, 0 are reversed, 1 are not told apart." in part


CLAIMS = [
    ("equal", (0.1, -0.2, 0.1), 2.0, verdicts.HOLDS),
    ("equal", (0.9, 1.0, 1.1), 2.0, verdicts.HOLDS),  # different from 0, and within the margin
    ("equal", (1.0, -1.5, 1.0), 2.0, verdicts.OPEN),  # 0 is in the interval, and so is 3
    ("equal", (1.0, 1.9, 1.5), 2.0, verdicts.OPEN),
    ("equal", (4.0, 4.1, 4.2), 2.0, verdicts.FAILS),
    ("equal", (-4.0, -4.1, -4.2), 2.0, verdicts.FAILS),
    ("not lower", (0.1, -0.2, 0.1), 2.0, verdicts.HOLDS),
    ("not lower", (9.0, 9.1, 9.2), 2.0, verdicts.HOLDS),
    ("not lower", (-4.0, -4.1, -4.2), 2.0, verdicts.FAILS),
    ("not lower", (-2.0, 0.0, -1.0), 2.0, verdicts.OPEN),
    ("not higher", (-9.0, -9.1, -9.2), 2.0, verdicts.HOLDS),
    ("not higher", (4.0, 4.1, 4.2), 2.0, verdicts.FAILS),
    ("lower", (-1.0, -1.1, -1.2), 0.0, verdicts.HOLDS),
    ("lower", (1.0, 1.1, 1.2), 0.0, verdicts.FAILS),
    ("lower", (1.0, -2.0, -3.0), 0.0, verdicts.OPEN),
    ("higher", (1.0, 1.1, 1.2), 0.0, verdicts.HOLDS),
    ("higher", (-1.0, -1.1, -1.2), 0.0, verdicts.FAILS),
]


@pytest.mark.parametrize(("asked", "values", "margin", "word"), CLAIMS)
def test_a_claim_holds_within_its_margin_fails_beyond_it_and_is_open_else(asked, values, margin, word):
    claim = {"is": asked} | ({"margin": margin} if margin else {})
    assert verdicts.decide_words([verdicts.judge_claim(by_seed(*values), claim)]) == [word]


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ({"is": "equal"}, 'claims.margin of "equal": expected above 0, found 0'),
        ({"is": "not lower", "margin": -1.0}, "expected above 0, found -1"),
        ({"is": "lower", "margin": 1.0}, 'claims.margin of "lower": expected none, found 1'),
        ({"is": "same"}, "claims.is: expected one of lower, higher, equal"),
    ],
)
def test_a_claim_of_equality_without_a_margin_is_refused(claim, message):
    with pytest.raises(ConfigError, match=message):
        verdicts.judge_claim(by_seed(1.0, 2.0), claim)


def test_the_margin_of_a_preset_is_that_of_its_claims_that_need_one_and_have_none():
    claims = [{"is": "equal"}, {"is": "not lower", "margin": 3.0}, {"is": "lower"}]
    assert verdicts.claims_of({"margin": 2.0, "claims": claims}) == [
        {"is": "equal", "margin": 2.0}, {"is": "not lower", "margin": 3.0}, {"is": "lower"},
    ]  # fmt: skip
    assert verdicts.claims_of({"claims": claims}) == claims
    assert verdicts.claims_of({"margin": 2.0}) == []


def test_words_are_corrected_together():
    """Student's t with two degrees of freedom: p is 1 - t / sqrt(2 + t^2)."""
    alone = verdicts.judge_sign(by_seed(0.9, 1.0, 1.1))
    t = 10 * 3**0.5
    assert alone.p == pytest.approx(1 - t / (2 + t * t) ** 0.5, rel=1e-6)
    most = int(verdicts.ALPHA / alone.p)
    assert most == 12
    assert verdicts.decide_words([alone] * most) == ["higher"] * most
    assert verdicts.decide_words([alone] * (most + 1)) == ["not told apart"] * (most + 1)
    assert verdicts.judge_sign(by_seed(-0.9, -1.0, -1.1)).word == "lower"


def test_the_rows_count_beside_the_seeds():
    """The p at which both halves, as legs of a triangle, reach 0."""
    rows, seeds, both = by_seed(1.0, 1.0, 1.0, rows=0.5), by_seed(0.5, 1.0, 1.5), by_seed(0.5, 1.0, 1.5, rows=0.5)
    assert resampling.p_value(rows) == pytest.approx(0.05, abs=0.02)  # two standard errors of a normal
    assert resampling.p_value(seeds) == pytest.approx(0.0742, abs=1e-3)  # t = 2 sqrt 3, two degrees of freedom
    assert resampling.p_value(both) > 1.3 * resampling.p_value(seeds)


CONTROLS = [
    ("won", (0.70, 0.71, 0.72), "held"), ("won", (0.40, 0.41, 0.42), "NOT HELD"),
    ("won", (0.51, 0.52, 0.515), "NOT HELD"),  # it separates rows, but barely
    ("won", (0.51, 0.95, 0.70), "not decided"),
    ("lost", (0.49, 0.50, 0.51), "held"), ("lost", (0.60, 0.61, 0.62), "NOT HELD"),
    ("lost", (0.40, 0.41, 0.42), "NOT HELD"), ("lost", (0.53, 0.54, 0.55), "not decided"),
    ("not won", (0.20, 0.21, 0.22), "held"), ("not won", (0.60, 0.61, 0.62), "NOT HELD"),
    ("not won", (0.53, 0.54, 0.55), "not decided"),
]  # fmt: skip


@pytest.mark.parametrize(("must", "values", "word"), CONTROLS)
def test_a_control_is_held_or_not_or_not_decided(must, values, word):
    assert verdicts.decide_words([verdicts.judge_control(by_seed(*values, rows=0.008), must)]) == [word]


def test_a_control_s_margin_and_chance_may_be_others():
    psnr, mean = by_seed(14.0, 14.1, 14.2), by_seed(12.0, 12.1, 12.2)
    controls = [verdicts.judge_control(psnr, "won", margin, mean) for margin in (1.0, 3.0)]
    assert verdicts.decide_words(controls) == ["held", "NOT HELD"]
    assert verdicts.describe_control_range("lost", 0.1) == "within 0.4 to 0.6"


@pytest.fixture
def _draws_once(monkeypatch):
    """The same draws of rows are not drawn again for each figure."""
    monkeypatch.setattr(resampling, "draw_counts", functools.cache(resampling.draw_counts))


def drawn_controls(rng: np.random.Generator, seeds: int, shift: float) -> list[verdicts.ClaimSentence]:
    """Six controls to lose, AUROC of 60 members and 60 others; of each seed all attacks score the same rows."""
    figures: list[list[ResampledMetric]] = [[] for _ in range(6)]
    for _ in range(seeds):
        mine, others = rng.normal(shift, 1, 60), rng.normal(0, 1, 60)
        for of_attack in figures:
            scores = [side + rng.normal(0, 0.7, 60) for side in (mine, others)]
            of_attack.append(resampling.resample_auroc(*scores, (1,), (2,)))
    return [verdicts.judge_control(resampling.over_seeds(of), "lost") for of in figures]


@pytest.mark.usefixtures("_draws_once")
@pytest.mark.parametrize("seeds", [1, 3])
def test_of_tables_whose_controls_are_at_chance_fewer_than_one_in_twenty_has_one_that_is_not_held(seeds):
    rng = np.random.default_rng([seeds, 3])
    said = [verdicts.decide_words(drawn_controls(rng, seeds, 0.0)) for _ in range(100)]
    assert np.mean([verdicts.NOT_HELD in words for words in said]) < 0.05


@pytest.mark.usefixtures("_draws_once")
def test_of_tables_whose_controls_lie_at_the_margin_fewer_than_one_in_twenty_has_one_that_is_held():
    """Members 0.217 deviations higher: P(higher) = Phi(0.217 / sqrt(2 + 2 * 0.49)) = 0.55."""
    rng = np.random.default_rng(5)
    said = [verdicts.decide_words(drawn_controls(rng, 5, 0.217)) for _ in range(100)]
    assert np.mean([verdicts.HELD in words for words in said]) < 0.05


@pytest.mark.usefixtures("_draws_once")
def test_controls_that_tell_rows_apart_are_found():
    rng = np.random.default_rng(7)
    said = [verdicts.decide_words(drawn_controls(rng, 5, 1.0)) for _ in range(20)]
    assert all(words == [verdicts.NOT_HELD] * 6 for words in said)
