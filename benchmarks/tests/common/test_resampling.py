"""Figures and their replicates compared with simple references, and the sentences derived from them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil_bench.common import quality, resampling
from fedveil_bench.common.resampling import ResampledMetric

SCORES = st.lists(st.integers(-3, 3).map(float), min_size=2, max_size=12)


def naive_auroc(members, others):
    return np.mean([1.0 if m > o else 0.5 if m == o else 0.0 for m in members for o in others])


@settings(deadline=None, max_examples=20)
@given(SCORES, SCORES)
def test_auroc_and_its_replicates_equal_a_naive_twin(members, others):
    mine, theirs = np.array(members), np.array(others)
    figure = resampling.resample_auroc(mine, theirs, (1, 0), (2, 0))
    assert figure.value == pytest.approx(naive_auroc(members, others))
    drawn = (
        resampling.draw_counts(len(mine), 1, 0)[7].astype(int),
        resampling.draw_counts(len(theirs), 2, 0)[7].astype(int),
    )
    assert figure.replicates[7] == pytest.approx(naive_auroc(np.repeat(mine, drawn[0]), np.repeat(theirs, drawn[1])))


def test_a_resample_keeps_the_number_of_rows_and_its_name():
    drawn = resampling.draw_counts(31, 4, 1)
    assert drawn.shape == (resampling.REPLICATES, 31)
    assert (drawn.sum(1) == 31).all()
    assert (drawn == resampling.draw_counts(31, 4, 1)).all()
    assert (drawn != resampling.draw_counts(31, 4, 2)).any()


def test_the_interval_of_a_mean_has_the_textbook_width():
    values = np.random.default_rng(5).normal(3.0, 2.0, 400)
    shown = resampling.compute_interval(resampling.resample_mean(list(values), 1))
    assert shown["mean"] == pytest.approx(values.mean())
    assert (shown["high"] - shown["low"]) / 2 == pytest.approx(1.96 * values.std() / 20, rel=0.15)


def test_paired_differences_are_narrower_than_unpaired_ones():
    values = np.random.default_rng(6).normal(0.0, 1.0, 300)
    one, better = resampling.resample_mean(list(values), 1), resampling.resample_mean(list(values + 0.05), 1)
    paired = resampling.compute_difference(better, one)
    assert paired["low"] == pytest.approx(0.05)
    unpaired = resampling.compute_difference(resampling.resample_mean(list(values + 0.05), 2), one)
    assert unpaired["low"] < 0 < unpaired["high"]


def test_an_interval_over_seeds_is_student_s_t_where_rows_have_no_part():
    """Of 1, 2 and 6: mean 3, standard error sqrt(7 / 3), t = 4.303; of two seeds t = 12.706; of one no width."""
    still = [resampling.from_constant(v) for v in (1.0, 2.0, 6.0)]
    three = resampling.compute_interval(resampling.over_seeds(still))
    assert (three["mean"], three["seeds"]) == (3.0, [1.0, 2.0, 6.0])
    assert three["high"] - 3.0 == pytest.approx(3.0 - three["low"]) == pytest.approx(4.3027 * (7 / 3) ** 0.5, rel=1e-4)
    two = resampling.compute_interval(resampling.over_seeds(still[:2]))
    assert two["high"] - 1.5 == pytest.approx(12.706 * 0.5, rel=1e-4)
    one = resampling.compute_interval(resampling.over_seeds(still[:1]))
    assert (one["mean"], one["low"], one["high"]) == (1.0, 1.0, 1.0)
    assert "seeds" not in one


def test_rows_and_seeds_add_as_legs_of_a_triangle_on_either_side():
    lopsided = np.linspace(-2.0, 4.0, resampling.REPLICATES)
    figure = resampling.over_seeds([ResampledMetric(v, v + lopsided, 10) for v in (1.0, 2.0, 6.0)])
    rows, apart = resampling.compute_interval(resampling.of_rows(figure)), 4.3027 * (7 / 3) ** 0.5
    shown = resampling.compute_interval(figure)
    assert 3.0 - shown["low"] == pytest.approx(np.hypot(3.0 - rows["low"], apart), rel=1e-4)
    assert shown["high"] - 3.0 == pytest.approx(np.hypot(rows["high"] - 3.0, apart), rel=1e-4)


def test_rows_that_all_seeds_score_count_once():
    values = list(np.random.default_rng(7).normal(0.0, 1.0, 200))
    one = resampling.resample_mean(values, 1)
    both = resampling.over_seeds(
        [resampling.resample_mean(values, 1), resampling.resample_mean([v + 0.1 for v in values], 1)]
    )
    assert both.replicates.std() == pytest.approx(one.replicates.std())


def test_differences_are_paired_by_seed():
    mine, other = (
        resampling.over_seeds([resampling.from_constant(v) for v in vs]) for vs in ((1.0, 5.0, 9.0), (0.9, 5.0, 8.8))
    )
    d = resampling.subtract_metrics(mine, other)
    assert d.value == pytest.approx(0.1)
    assert d.seeds == pytest.approx((0.1, 0.0, 0.2))
    assert resampling.subtract_metrics(mine, resampling.from_constant(4.0)).seeds == (-3.0, 1.0, 5.0)
    assert resampling.negate_metric(mine).seeds == (-1.0, -5.0, -9.0)
    assert resampling.average_metrics([mine, other]).seeds == pytest.approx((0.95, 5.0, 8.9))
    with pytest.raises(ValueError, match="expected figures for the same seeds, found 3 and 1"):
        resampling.subtract_metrics(mine, resampling.over_seeds([resampling.from_constant(1.0)]))


def test_bleu_of_summed_statistics_is_that_of_the_corpus():
    from sacrebleu.metrics import BLEU

    written = ["a red boat on the sea", "two dogs run on grass today", "a cat"]
    targets = [["a red boat on the water", "the boat"], ["two dogs run on the grass"], ["a cat sits", "one cat"]]
    columns = [[refs[i] if i < len(refs) else None for refs in targets] for i in range(2)]
    mine = quality.compute_bleu(quality.bleu_statistics(written, targets).sum(0))
    assert mine == pytest.approx(BLEU(force=True).corpus_score(written, columns).score)
