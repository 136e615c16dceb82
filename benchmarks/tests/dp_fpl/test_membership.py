"""Membership in prompts: the split of rows, the judgment of controls, and a small full table."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.tests.dp_fpl.small import around, needs_data
from benchmarks.tests.dp_fpl.small import settings as small
from fedveil.attacks.membership import lira
from fedveil_bench.common import resampling
from fedveil_bench.dp_fpl import membership
from fedveil_bench.dp_fpl.federated_prompts import PromptSites
from fedveil_bench.runner import BenchOptions

ROWS = [SimpleNamespace(label=k // 24, number=k) for k in range(48)]


def test_members_others_and_pool_share_no_row_and_have_the_same_classes():
    rows = {s: [SimpleNamespace(label=k % 2, number=(s, k)) for k in range(23)] for s in "ab"}
    parts = membership.split_members(rows, np.random.default_rng(0))
    numbers = [row.number for part in parts.values() for of_site in part.values() for row in of_site]
    assert len(numbers) == len(set(numbers)) == 40  # of 12 and 11 rows of a class, 12 and 8
    for site in "ab":
        members, others, pool = (sorted(r.label for r in parts[p][site]) for p in ("members", "others", "pool"))
        assert members == others == [0] * 3 + [1] * 2
        assert pool == sorted(members + others)


@pytest.mark.parametrize("count", [16, 17, 18, 19])
def test_a_shadow_is_trained_on_as_many_rows_as_the_target(count):
    """One of 10 rows learns less of each by heart than a target of 18, and the nets learn from it what "in" is."""
    rows = {s: [SimpleNamespace(label=k % 3) for k in range(3 * count)] for s in "ab"}
    parts = membership.split_members(rows, np.random.default_rng(0))
    pool = sum(map(len, parts["pool"].values()))
    taught = lira.train_shadows(lambda rows_, _: {"n": len(rows_)}, pool, 4, np.random.default_rng(0))
    assert {w["n"] for w in taught.weights} == {sum(map(len, parts["members"].values()))} == {2 * 3 * (count // 4)}


def test_members_of_a_class_are_bounded_and_so_is_the_pool_while_others_stay():
    rows = {"a": [SimpleNamespace(label=k % 2, number=k) for k in range(80)]}
    parts, whole = (membership.split_members(rows, np.random.default_rng(0), most) for most in (3, None))
    assert [len(parts[part]["a"]) for part in ("members", "others", "pool")] == [6, 20, 12]
    assert [len(whole[part]["a"]) for part in ("members", "others", "pool")] == [20, 20, 40]
    numbers = [row.number for part in parts.values() for row in part["a"]]
    assert len(set(numbers)) == len(numbers)
    assert parts["members"]["a"][:3] == whole["members"]["a"][:3]


def test_shadows_take_off_how_hard_a_row_is():
    """Members are the harder rows: the loss alone calls them others, beside shadows they are told."""
    draw = np.random.default_rng(0)
    hard = np.repeat([2.0, 1.0], 40) + draw.normal(0, 0.05, 80)

    def says(losses):
        right = np.exp(-losses)
        return np.stack([right, 1 - right], 1)

    def sides(losses):
        return says(losses)[:40], says(losses)[40:]

    shadows = [sides(hard + draw.normal(0, 0.05, 80)) for _ in range(4)]
    zeros = np.zeros(40, dtype=int)
    at = membership.shadow_models.TargetOutputs(*sides(hard - np.repeat([0.3, 0.0], 40)), zeros, zeros)
    found = membership._of_losses(at, shadows)
    assert found[membership.LOSS].value < 0.05
    assert found[membership.LIRA].value > 0.95
    assert list(membership._of_losses(at, [])) == [membership.LOSS]
    untaught = membership.shadow_models.TargetOutputs(*shadows[0], zeros, zeros)
    assert 0.3 < membership._of_losses(untaught, shadows[1:])[membership.LIRA].value < 0.7


def said_of(figure):
    """The first sentence on that figure where a row must win, where it must lose, and where it is neither."""
    figures = dict.fromkeys(("AUROC, per class", "AUROC, global", "AUROC, loss", "AUROC, LiRA"), figure)
    settings = {"rows": {"a": {"control": "win"}, "b": {"control": True}}}
    return [membership.list_verdicts({n: figures}, settings)[0] for n in ("a", "b, noise only", "b")]


@pytest.mark.parametrize(
    ("value", "won", "lost", "side"),
    [
        (0.9, "held", "NOT HELD", "above"), (0.56, "not decided", "not decided", "above"),
        (0.5, "NOT HELD", "held", "not told from"), (0.3, "NOT HELD", "NOT HELD", "below"),
    ],
)  # fmt: skip
def test_controls_of_membership_are_judged(value, won, lost, side):
    """Also where nobody trained on them and rows score lower: they are of another distribution."""
    of_win, of_lose, plain = said_of(around(value, 0.01))
    assert of_win.endswith(f"; a control, expected above 0.55: {won}.")
    assert of_lose.endswith(f"; a control, expected within 0.45 to 0.55: {lost}.")
    assert plain.endswith(f": {side} 0.5.")


def test_a_control_to_win_does_so_over_the_seeds_and_one_to_lose_fails_by_its_rows():
    won, lost, plain = said_of(resampling.over_seeds([around(v, 0.001) for v in (0.51, 0.7, 0.95)]))
    assert won.endswith(": not decided.")
    assert lost.endswith(": NOT HELD.")
    assert plain.endswith(": not told from 0.5.")


def test_a_control_to_lose_is_not_decided_by_so_few_rows():
    """0.5 lies in the interval, and so does 0.6: it was called held."""
    assert said_of(around(0.5, 0.05))[1].endswith(": not decided.")


def test_an_estimate_keeps_its_interval_and_several_are_as_wide():
    one = membership.from_estimate([0.6, 0.55, 0.7], 30)
    assert resampling.compute_interval(one) == pytest.approx({"mean": 0.6, "low": 0.55, "high": 0.7, "n": 30}, abs=2e-3)
    both = resampling.over_seeds([one, one])
    assert both.replicates == pytest.approx(one.replicates)


def test_a_claim_holds_a_row_to_another_or_to_a_number():
    def figures(loss, right):
        of_seeds = ((loss - 0.002, loss + 0.002, loss), (right - 1, right + 1, right))
        rows = [resampling.over_seeds([around(v, 1e-4) for v in each]) for each in of_seeds]
        return dict(zip((membership.LOSS, membership.RIGHT), rows, strict=True))

    found = {"zero-shot": figures(0.5, 50.0), "plain": figures(0.7, 80.0), "private": figures(0.51, 75.0)}
    claims = [
        {"metric": membership.LOSS, "row": "plain", "than": 0.55, "is": "higher"},
        {"metric": membership.LOSS, "row": "private", "than": 0.5, "is": "not higher", "margin": 0.05},
        {"metric": membership.LOSS, "row": "plain", "than": 0.5, "is": "not higher", "margin": 0.05},
        {"metric": membership.RIGHT, "row": "private", "than": "zero-shot", "is": "higher"},
    ]
    said = membership.list_verdicts(found, {"rows": {}, "claims": claims})
    words = [s.rpartition(": ")[2] for s in said if "the claim has" in s]
    assert words == ["holds here.", "holds here.", "does not hold here.", "holds here."]
    assert any(s.startswith("AUROC, loss of plain less 0.55: +0.150 [") for s in said)


def test_rows_together_have_their_control_at_the_same_site(monkeypatch):
    """A control of noise that ran on other sites than its row would be compared with another model."""
    classes = {"a": frozenset({0}), "b": frozenset({1})}
    sites = PromptSites({}, {}, 0, BenchOptions(), {"a": ROWS[:24], "b": ROWS[24:]}, classes, (), None)
    asked = []
    monkeypatch.setattr(membership.federated_prompts, "load_sites", lambda *_: sites)
    monkeypatch.setattr(
        membership, "_attacked", lambda _, at, parts, chosen, dark, __: asked.append((at.names, dark, parts["members"]))
    )
    rows = {"apart": {"control": True}, "joined": {"control": True, "together": True}}
    assert list(membership.of_seed({"rows": rows}, 0, BenchOptions())) == [
        "zero-shot", "apart", "apart, noise only", "joined", "joined, noise only",
    ]  # fmt: skip
    assert [(names, dark) for names, dark, _ in asked[1:]] == [
        (["a", "b"], False), (["a", "b"], True), (["all"], False), (["all"], True),
    ]  # fmt: skip
    assert {len(parts["all"]) for _, _, parts in asked[3:]} == {12}


@needs_data
def test_without_shadows_a_row_has_the_loss_and_what_it_names_rightly():
    found = membership.of_seed(small({"plain": {"name": "promptfl", "shadows": 0}}) | {"shadows": 0}, 0, BenchOptions())
    for row in found.values():
        assert row["nets"] == {}
        assert 0 <= row[membership.RIGHT][0] <= 100
    assert found["plain"][membership.LOSS][0] != found["zero-shot"][membership.LOSS][0]


@pytest.mark.slow
@needs_data
def test_a_whole_small_membership_table():
    rows = {"private": {"name": "dp_fpl", "fields": "clipped = 'texts'", "control": True}}
    settings = small(rows)
    settings["rows_read"] = 180  # every shadow's half of a site's pool fills a batch
    settings["config"]["train.batch-size"] = 2
    found = membership.of_seed(settings, 0, BenchOptions())
    assert list(found) == ["zero-shot", "private", "private, noise only"]
    for row in found.values():
        assert all(0 <= low <= value <= high <= 1 for value, low, high in row["nets"].values())
    assert found["zero-shot"]["costs"] == {}
    assert found["private"]["costs"]["epsilon, replace-one"] < math.inf
