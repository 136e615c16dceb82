"""The accuracy table: its order, its parts, its claims and its counts."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from benchmarks.tests.random_binary.small import settings
from fedveil_bench.common import resumable_rows
from fedveil_bench.random_binary import accuracy
from fedveil_bench.runner import BenchOptions

LOWER = {"bases": ["scratch"], "row": "fixed", "than": "plain", "is": "lower"}
ALIKE = {"bases": ["scratch"], "row": "random", "than": "plain", "is": "equal", "margin": 8.0}
ROWS = 400


def piece(method, seed, right, counts=(0.0, 0.0, 1.0)):
    """Of a method that names the class of the first `right` test pictures."""
    bits = base64.b64encode(np.packbits(np.arange(ROWS) < right).tobytes()).decode()
    return {
        "name": f"{method} {seed}", "commit": "c", "base": "scratch", "method": method, "seed": seed,
        "curve": [10.0, 20.0, right / ROWS * 100], "right": bits, "counts": list(counts), "upload_bytes": 8,
        "seconds": 1.0,
    }  # fmt: skip


def said(found, claims):
    return accuracy.build_outcome(found, settings(claims=claims, test_rows=ROWS), 9).verdicts


def test_all_methods_of_a_seed_come_before_the_next_seed_and_a_base_may_have_fewer():
    bases = {"a": {"seeds": 2, "methods": ["x", "y"]}, "b": {"seeds": 1, "methods": ["x"]}}
    asked = [("a", "x", 0), ("a", "y", 0), ("a", "x", 1), ("a", "y", 1), ("b", "x", 0)]
    assert list(accuracy._asked({"bases": bases}, BenchOptions())) == asked
    assert list(accuracy._asked({"bases": bases}, BenchOptions(seeds=1))) == [*asked[:2], asked[4]]


def test_a_piece_is_of_every_setting_that_its_figures_hang_on():
    name = accuracy._name(settings(), "scratch", "random", 0)
    base = settings()["bases"]["scratch"]
    same = [{"claims": [LOWER]}, {"bases": {"scratch": {**base, "seeds": 7, "methods": []}}}]
    other = [{"epochs": 3}, {"fields": ""}, {"config": {}}, {"bases": {"scratch": {**base, "members": 7}}}]
    other += [{"exchanges": 9}, {"model": {}}, {"test_rows": 1}, {"methods": {"random": {"name": "fixed_position"}}}]
    assert all(accuracy._name(settings(**more), "scratch", "random", 0) == name for more in same)
    assert all(accuracy._name(settings(**more), "scratch", "random", 0) != name for more in other)


@pytest.mark.long
def test_a_table_in_pieces_is_the_one_at_once(tmp_path, monkeypatch):
    """The second time nothing is trained."""
    file, of = tmp_path / "x.pieces.jsonl", settings()
    whole = accuracy.run_benchmark(of, BenchOptions(device="cpu"))
    first = accuracy.run_benchmark(of, BenchOptions(device="cpu", pieces=file))
    monkeypatch.setattr(accuracy.federation, "run_row", None)
    again = accuracy.run_benchmark(of, BenchOptions(device="cpu", pieces=file))
    assert first.rows == again.rows
    assert [row["name"] for row in again.rows] == ["scratch, random", "scratch, locked", "scratch, fixed"]
    assert [{k: row[k] for k in ("metrics", "curve")} for row in whole.rows] == [
        {k: row[k] for k in ("metrics", "curve")} for row in again.rows
    ]
    assert again.files["png"].startswith(b"\x89PNG")
    assert again.verdicts[-1].startswith("Trainings: 3 of 3; by commit: 3 of ")
    assert {line["base"] for line in resumable_rows.read_pieces(file)} == {"scratch"}
    json.dumps(again.rows)


@pytest.mark.long
def test_claims_are_judged_by_the_seeds_that_both_rows_have():
    """Of four seeds of one row three have a partner."""
    found = [piece("plain", seed, 200 + seed) for seed in (0, 1, 2)]
    found += [piece("fixed", seed, 100 + seed) for seed in (0, 1, 2, 3)]
    (lower, how, *_) = said(found, [LOWER])
    assert lower.startswith("Accuracy of scratch, fixed less that of plain: -25.0")
    assert "seeds: 3; the paper has it lower: holds here." in lower
    assert "1 comparisons" in how
    assert "not decided" in said(found[1:], [LOWER])[0]
    assert "a control, which must have it lower: holds here." in said(found, [LOWER | {"control": True}])[0]


@pytest.mark.long
def test_a_claim_that_is_wrong_does_not_hold():
    found = [piece(m, seed, right + seed) for m, right in {"plain": 100, "fixed": 200}.items() for seed in range(3)]
    assert said(found, [LOWER])[0].endswith("does not hold here.")
    control = said(found, [LOWER | {"control": True}])[0]
    assert control.endswith("a control, which must have it lower: does not hold here.")
    found = [piece(m, seed, right + seed) for m, right in {"plain": 200, "random": 202}.items() for seed in range(3)]
    assert said(found, [ALIKE])[0].endswith("holds here.")


def test_a_row_has_values_by_seed_a_curve_and_counts_beside_their_law():
    counts = (0.1, 0.2, 0.7)
    of = settings(test_rows=ROWS)
    (row,) = accuracy.build_outcome([piece("random", seed, 200 + 4 * seed, counts) for seed in range(2)], of, 2).rows
    assert row["metrics"]["accuracy"]["seeds"] == [50.0, 51.0]
    assert [point["mean"] for point in row["curve"]] == [10.0, 20.0, 50.5]
    assert row["metrics"]["entries moved"]["mean"] == pytest.approx((0.2 + 2 * 0.7) / 2)
    missed = 0.8**2
    law = [missed**2, 2 * missed * (1 - missed), (1 - missed) ** 2]
    assert accuracy._law(of, "random") == pytest.approx(law)
    assert accuracy._law(of, "locked") == pytest.approx([missed, 0, 1 - missed])
    assert row["metrics"]["count distance"]["mean"] == pytest.approx(np.abs(np.subtract(counts, law)).sum() / 2)


def test_counts_that_another_method_s_law_fits_better_are_said():
    locked = (0.64, 0.0, 0.36)
    right, wrong = ([piece(m, 0, 200, locked)] for m in ("locked", "random"))
    assert "in 1 of 1 trainings" in said(right, [])[0]
    assert "in 0 of 1 trainings" in said(wrong, [])[0]


def test_a_table_without_a_piece_says_so():
    found = accuracy.build_outcome([], settings(), 3)
    assert (found.rows, found.files) == ([], {})
    assert found.verdicts == ["Trainings: 0 of 3; by commit: none."]
