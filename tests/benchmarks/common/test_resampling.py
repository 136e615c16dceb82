"""Figures and their replicates: against naive twins, and the sentences derived from them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.benchmarks.common import quality, resampling
from fedveil.benchmarks.common.resampling import Figure

SCORES = st.lists(st.integers(-3, 3).map(float), min_size=2, max_size=12)


def naive_auroc(members, others):
    return np.mean([1.0 if m > o else 0.5 if m == o else 0.0 for m in members for o in others])


@settings(deadline=None, max_examples=20)
@given(SCORES, SCORES)
def test_auroc_and_its_replicates_equal_a_naive_twin(members, others):
    mine, theirs = np.array(members), np.array(others)
    figure = resampling.auroc(mine, theirs, (1, 0), (2, 0))
    assert figure.value == pytest.approx(naive_auroc(members, others))
    drawn = resampling.counts(len(mine), 1, 0)[7].astype(int), resampling.counts(len(theirs), 2, 0)[7].astype(int)
    assert figure.replicates[7] == pytest.approx(naive_auroc(np.repeat(mine, drawn[0]), np.repeat(theirs, drawn[1])))


def test_a_resample_keeps_the_number_of_rows_and_its_name():
    drawn = resampling.counts(31, 4, 1)
    assert drawn.shape == (resampling.REPLICATES, 31)
    assert (drawn.sum(1) == 31).all()
    assert (drawn == resampling.counts(31, 4, 1)).all()
    assert (drawn != resampling.counts(31, 4, 2)).any()


def test_the_interval_of_a_mean_has_the_textbook_width():
    values = np.random.default_rng(5).normal(3.0, 2.0, 400)
    shown = resampling.interval(resampling.mean(list(values), 1))
    assert shown["mean"] == pytest.approx(values.mean())
    assert (shown["high"] - shown["low"]) / 2 == pytest.approx(1.96 * values.std() / 20, rel=0.15)


def test_paired_differences_are_narrower_than_unpaired_ones():
    values = np.random.default_rng(6).normal(0.0, 1.0, 300)
    one, better = resampling.mean(list(values), 1), resampling.mean(list(values + 0.05), 1)
    paired = resampling.difference(better, one)
    assert paired["low"] == pytest.approx(0.05)
    unpaired = resampling.difference(resampling.mean(list(values + 0.05), 2), one)
    assert unpaired["low"] < 0 < unpaired["high"]


def test_seeds_are_averaged_and_from_three_on_drawn():
    still = [resampling.fixed(v) for v in (1.0, 2.0, 6.0)]
    two = resampling.interval(resampling.over_seeds(still[:2]))
    assert (two["mean"], two["low"], two["high"]) == (1.5, 1.5, 1.5)
    three = resampling.interval(resampling.over_seeds(still))
    assert three["mean"] == 3.0
    assert three["low"] < 2.0
    assert three["high"] > 4.0


def around(value: float) -> Figure:
    return Figure(value, value + 0.01 * np.random.default_rng(int(value * 1000)).normal(size=resampling.REPLICATES), 10)


def test_ordering_says_what_the_intervals_say():
    figures = {"a": around(0.9), "b": around(0.7), "c": around(0.5)}
    assert resampling.ordering(figures, ["a", "b", "c"], "x").endswith("holds in all 3 pairs.")
    wrong = resampling.ordering(figures, ["b", "a", "c"], "x")
    assert "does not hold: 2 of 3 pairs hold, 1 are reversed: b over a (-0.2 [" in wrong
    same = {"a": around(0.9), "b": around(0.901)}
    assert "can neither be confirmed nor refused: no pair of 1" in resampling.ordering(same, ["a", "b"], "x")
    part = resampling.ordering(figures | {"d": around(0.501)}, ["a", "d", "c"], "x")
    assert "holds in part: 2 of 3 pairs hold, 0 are reversed, 1 cannot be told apart." in part


def test_bleu_of_summed_statistics_is_that_of_the_corpus():
    from sacrebleu.metrics import BLEU

    written = ["a red boat on the sea", "two dogs run on grass today", "a cat"]
    targets = [["a red boat on the water", "the boat"], ["two dogs run on the grass"], ["a cat sits", "one cat"]]
    columns = [[refs[i] if i < len(refs) else None for refs in targets] for i in range(2)]
    mine = quality.bleu(quality.bleu_statistics(written, targets).sum(0))
    assert mine == pytest.approx(BLEU(force=True).corpus_score(written, columns).score)
