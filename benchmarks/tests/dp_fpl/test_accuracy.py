"""The runners of the DP-FPL presets: figures, sentences, the control without data, and small full accuracy runs."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.tests.dp_fpl.small import around, needs_data
from benchmarks.tests.dp_fpl.small import settings as small
from fedveil_bench.common import resampling
from fedveil_bench.dp_fpl import accuracy
from fedveil_bench.runner import BenchOptions


def test_accuracy_is_the_mean_over_sites_of_own_or_other_classes():
    right = [np.array([1.0, 0.0, 1.0, 1.0]), np.array([0.0, 0.0, 1.0, 0.0])]
    labels, classes = [0, 0, 1, 2], [{0}, {1, 2}]
    local = accuracy.compute_accuracy(right, labels, classes, True)
    other = accuracy.compute_accuracy(right, labels, classes, False)
    assert local.value == 100 * (1 / 2 + 1 / 2) / 2
    assert other.value == 100 * (2 / 2 + 0 / 2) / 2
    assert (local.count, other.count) == (4, 4)
    drawn = np.repeat(np.arange(4), resampling.draw_counts(4, accuracy._TEST)[7].astype(int))
    by_hand = [np.mean([right[s][i] for i in drawn if labels[i] in classes[s]] or [0.0]) for s in range(2)]
    assert local.replicates[7] == pytest.approx(100 * np.mean(by_hand))


def test_a_site_with_every_class_has_no_neighbours():
    found = accuracy.compute_accuracy([np.ones(2), np.zeros(2)], [0, 1], [{0, 1}, {0}], False)
    assert (found.value, found.count) == (0.0, 1)


@pytest.mark.parametrize(
    ("mine", "asked", "said"),
    [
        (9.0, {"is": "higher"}, "the paper has it higher: holds here."),
        (1.0, {"is": "higher"}, "the paper has it higher: does not hold here."),
        (5.0, {"is": "higher"}, "the paper has it higher: not decided."),
        (5.0, {"is": "not lower", "margin": 1.0}, "the paper has it not lower (within 1): holds here."),
        (5.0, {"is": "not lower", "margin": 0.01}, "the paper has it not lower (within 0.01): not decided."),
        (1.0, {"is": "not lower", "margin": 1.0}, "does not hold here."),
    ],
)
def test_claims_are_judged_by_paired_differences(mine, asked, said):
    figures = {"a": {"local": around(mine)}, "b": {"local": around(5.001)}}
    settings = {"rows": {}, "claims": [{"row": "a", "than": "b", "side": "local", **asked}]}
    sentence, _ = accuracy.list_verdicts(figures, settings)
    assert sentence.endswith(said)


def test_a_row_stands_beside_both_controls():
    figures = {n: {"local": around(v)} for n, v in (("x", 9.0), ("zero-shot", 5.0), ("x, noise only", 9.001))}
    first, second, how = accuracy.list_verdicts(figures, {"rows": {"x": {}}})
    assert "of x less that of zero-shot" in first
    assert first.endswith("higher.")
    assert "of x less that of x, noise only" in second
    assert second.endswith("not told apart.")
    assert "corrected for 2 comparisons" in how
    assert accuracy.list_verdicts(figures, {"rows": {"x": {"learns": False}}}) == []


@pytest.mark.slow
@needs_data
def test_a_whole_small_table():
    rows = {
        "PromptFL": {"name": "promptfl"},
        "private": {
            "name": "dp_fpl",
            "fields": "clipped = 'texts'\nexchange = 'epoch'",
            "epsilon": 50.0,
            "control": True,
        },
        "PromptFL, private": {"name": "promptfl", "config": {"dp.clip-norm": 1.0}, "epsilon": 50.0, "control": True},
    }
    found = accuracy.of_seed(small(rows), 0, BenchOptions())
    private = ("private", "PromptFL, private")
    assert list(found) == ["zero-shot", "PromptFL", *(n + said for n in private for said in ("", ", noise only"))]
    assert all(0 <= found[n][side][0] <= 100 for n in found for side in accuracy.SIDES)
    for name in private:
        assert found[name]["costs"]["nominal epsilon"] == 50.0 >= found[name]["costs"]["epsilon, replace-one"] > 48
    assert found["private"]["upload_bytes"] > 3 * 16 * 96 * 4
    assert found["PromptFL"]["privacy"] == "epsilon infinite: no claim"
