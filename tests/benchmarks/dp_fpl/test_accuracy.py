"""The runners of the DP-FPL presets: figures, sentences, the control that sees no row, and small whole accuracy."""

from __future__ import annotations

import math
import os
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedveil import benchmarks, strategies
from fedveil.benchmarks.common import forwarding, resampling
from fedveil.benchmarks.common.resampling import Figure
from fedveil.benchmarks.dp_fpl import accuracy, federated_prompts, membership
from fedveil.benchmarks.run import Options
from fedveil.config import parse
from fedveil.contract.budget import Neighbours, Plan
from fedveil.contract.layout import Payload
from fedveil.contract.method import RoundContext
from fedveil.errors import ConfigError
from fedveil.privacy import accounting
from fedveil.strategies.dp_fpl import DpFpl
from fedveil.strategies.promptfl import PromptFL
from tests.prompt_toy import LENGTH, WIDTH, TextTask, local_of

PRESETS = sorted((Path(benchmarks.__file__).parent / "presets" / "dp_fpl").glob("*.toml"))
needs_data = pytest.mark.skipif("FEDVEIL_DATA" not in os.environ, reason="needs the real data")


def around(value: float, width: float = 0.1) -> Figure:
    rng = np.random.default_rng(int(abs(value) * 1000))
    return Figure(value, value + width * rng.normal(size=resampling.REPLICATES), 10)


def test_accuracy_is_the_mean_over_sites_of_own_or_other_classes():
    right = [np.array([1.0, 0.0, 1.0, 1.0]), np.array([0.0, 0.0, 1.0, 0.0])]
    labels, classes = [0, 0, 1, 2], [{0}, {1, 2}]
    local = accuracy.accuracy(right, labels, classes, True, 0)
    other = accuracy.accuracy(right, labels, classes, False, 0)
    assert local.value == 100 * (1 / 2 + 1 / 2) / 2
    assert other.value == 100 * (2 / 2 + 0 / 2) / 2
    assert (local.count, other.count) == (4, 4)
    drawn = np.repeat(np.arange(4), resampling.counts(4, accuracy._TEST, 0)[7].astype(int))
    by_hand = [np.mean([right[s][i] for i in drawn if labels[i] in classes[s]] or [0.0]) for s in range(2)]
    assert local.replicates[7] == pytest.approx(100 * np.mean(by_hand))


def test_a_site_with_every_class_has_no_neighbours():
    found = accuracy.accuracy([np.ones(2), np.zeros(2)], [0, 1], [{0, 1}, {0}], False, 0)
    assert (found.value, found.count) == (0.0, 1)


@pytest.mark.parametrize(
    ("mine", "asked", "said"),
    [(9.0, "higher", "higher; the paper has it higher: holds here."), (1.0, "higher", "lower; the paper has it higher: does not"),
     (5.0, "not lower", "not told apart; the paper has it not lower: holds"), (1.0, "not lower", "does not hold here.")],
)  # fmt: skip
def test_claims_are_judged_by_paired_intervals(mine, asked, said):
    figures = {"a": {"local": around(mine)}, "b": {"local": around(5.001)}}
    settings = {"rows": {}, "claims": [{"row": "a", "than": "b", "side": "local", "is": asked}]}
    (sentence,) = accuracy.verdicts(figures, settings)
    assert said in sentence


def test_a_row_stands_beside_both_controls():
    figures = {n: {"local": around(v)} for n, v in (("x", 9.0), ("zero-shot", 5.0), ("x, noise only", 9.001))}
    first, second = accuracy.verdicts(figures, {"rows": {"x": {}}})
    assert "of x less that of zero-shot" in first
    assert first.endswith("higher.")
    assert "of x less that of x, noise only" in second
    assert second.endswith("not told apart.")
    assert accuracy.verdicts(figures, {"rows": {"x": {"learns": False}}}) == []


@pytest.mark.parametrize("clipped", ["prompt", "texts"])
def test_noise_only_sees_no_row(clipped):
    """Two sites with other rows send the same bytes, where with their rows they do not."""
    from fedveil.adapters.prompt import Prompt

    method = DpFpl(rank=2, adapter=Prompt(LENGTH), clipped=clipped)
    ctx = RoundContext(0, "x", True, bytes(32), seeded=True)
    down = Payload({"prompt": torch.randn(LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))})

    def sent(seed: int, dark: bool) -> torch.Tensor:
        local = local_of(12, seed, kind=TextTask)
        return method.client(None, down, forwarding.Dark(local) if dark else local, ctx)[1].fields["prompt"]

    assert torch.equal(sent(1, True), sent(2, True))
    assert not torch.equal(sent(1, False), sent(2, False))
    assert float(sent(1, True).abs().max()) > 0
    with pytest.raises(NotImplementedError):
        forwarding.Dark(local_of(12)).train({})


def test_noise_is_what_the_wished_epsilon_takes_at_the_worst_site():
    plans = [Plan(5, 2, 8, rows, Neighbours.REPLACE_ONE) for rows in (20, 60)]
    method = federated_prompts._with_noise(DpFpl(), 3.0, plans)
    costs, words = federated_prompts._costs(method, plans)
    assert 0.97 * 3 < costs["epsilon, replace-one"] <= 3.0
    assert costs["nominal epsilon"] == 3.0
    assert words.startswith("nominal epsilon 3; epsilon ")
    assert words.endswith("at delta 1e-05 (replace-one)")
    assert accounting.epsilon(method.privacy_spent(plans[1]), 1e-5, Neighbours.REPLACE_ONE) < 2.0
    assert federated_prompts._with_noise(DpFpl(), None, plans) == DpFpl()


def test_only_sites_that_may_cost_most_are_accounted_for():
    """Of sites of 20, 40, 41 and 60 rows, with one epoch: more rows matter where they make more steps."""
    rows = {str(n): [None] * n for n in (60, 20, 41, 40)}
    every, two = (
        federated_prompts._plans(parse({"train.batch-size": 8, "train.max-steps": m, "run.rounds": 2}), rows, method)
        for m, method in ((0, DpFpl(exchange="epoch")), (2, DpFpl(exchange="epoch")))
    )
    assert [(p.steps, p.examples) for p in every] == [(7, 60), (5, 40), (2, 20)]
    assert [(p.steps, p.examples) for p in two] == [(2, 20)]
    (one,) = federated_prompts._plans(parse({"train.batch-size": 8}), rows, DpFpl())
    assert (one.rounds, one.steps, one.examples) == (5, 1, 20)
    assert federated_prompts._plans(parse({}), rows, PromptFL()) == []


def test_the_published_noise_says_both_epsilons_and_a_baseline_none():
    plans = [Plan(100, 1, 32, 64, Neighbours.REPLACE_ONE)]
    costs, words = federated_prompts._costs(DpFpl(mode="code", epsilon=0.4, sampling="disjoint"), plans)
    assert costs["nominal epsilon"] == 0.4
    assert costs["epsilon, replace-one"] > 50
    assert words.endswith("against the server infinite")
    assert federated_prompts._costs(PromptFL(), []) == ({}, "epsilon infinite: no claim")
    quiet = DpFpl(noise_local=0.0)
    assert federated_prompts._costs(quiet, plans)[0]["epsilon, replace-one"] == math.inf
    with pytest.raises(ConfigError, match="privacy budget"):
        federated_prompts._with_noise(PromptFL(), 1.0, [])


def test_members_others_and_pool_share_no_row_and_have_the_same_classes():
    rows = {s: [SimpleNamespace(label=k % 2, number=(s, k)) for k in range(23)] for s in "ab"}
    parts = membership.parted(rows, np.random.default_rng(0))
    numbers = [row.number for part in parts.values() for of_site in part.values() for row in of_site]
    assert len(numbers) == len(set(numbers)) == 46
    for site in "ab":
        members, others, pool = (sorted(r.label for r in parts[p][site]) for p in ("members", "others", "pool"))
        assert members == others == [0] * 4 + [1] * 3
        assert len(pool) == 9


@pytest.mark.parametrize(("value", "held"), [(0.9, "held"), (0.5, "NOT HELD")])
def test_controls_of_membership_are_judged(value, held):
    shown = {m: resampling.interval(around(value, 0.01)) for m in ("AUROC, per class", "AUROC, global", "AUROC, loss")}
    settings = {"rows": {"a": {"control": "win"}, "b": {"control": True}}}
    won, lost, plain = (
        membership.verdicts([{"name": n, "metrics": shown}], settings)[0] for n in ("a", "b, noise only", "b")
    )
    assert won.endswith(f"the control to win: {held}.")
    assert lost.endswith(f"a control to lose: {'NOT HELD' if held == 'held' else 'held'}.")
    assert "control" not in plain


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_presets_name_methods_and_claims_that_exist(path):
    preset = tomllib.loads(path.read_text())
    rows = preset["settings"].get("rows", {})
    for changes in ({}, preset["quick"].get("rows", {})):
        assert set(changes) <= set(rows)
        for name, row in rows.items():
            strategies.create(row["name"], {**row, **changes.get(name, {})}.get("fields", ""))
    for claim in preset["settings"].get("claims", []):
        assert {claim["row"], claim["than"]} <= set(rows)
    assert set(preset.get("paper", {})) <= set(rows)


def _small(rows) -> dict:
    config = {"task.model": "tiny", "train.batch-size": 4, "train.max-steps": 2, "train.epochs": 2, "run.rounds": 1}
    return {
        "data": "caltech101",
        "clients": 3,
        "classes": 6,
        "rows_read": 60,
        "shadows": 4,
        "rows": rows,
        "config": config,
    }


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
    }
    found = accuracy.of_seed(_small(rows), 0, Options())
    assert list(found) == ["zero-shot", "PromptFL", "private", "private, noise only"]
    assert all(0 <= found[n][side][0] <= 100 for n in found for side in accuracy.SIDES)
    assert found["private"]["costs"]["nominal epsilon"] == 50.0
    assert found["private"]["upload_bytes"] > 3 * 16 * 96 * 4
    assert found["PromptFL"]["privacy"] == "epsilon infinite: no claim"


@pytest.mark.slow
@needs_data
def test_a_whole_small_membership_table():
    rows = {"private": {"name": "dp_fpl", "fields": "clipped = 'texts'", "control": True}}
    settings = _small(rows)
    settings["config"]["train.batch-size"] = 2
    found = membership.of_seed(settings, 0, Options())
    assert list(found) == ["zero-shot", "private", "private, noise only"]
    for row in found.values():
        assert all(0 <= low <= value <= high <= 1 for value, low, high in row["nets"].values())
    assert found["zero-shot"]["costs"] == {}
    assert found["private"]["costs"]["epsilon, replace-one"] < math.inf
