"""Tokens in an audit: read where a run makes single steps of SGD; elsewhere the reason is named."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fedveil import places, rng, strategies, tasks
from fedveil.attacks import spelled
from fedveil.attacks.base import Knowledge, View
from fedveil.attacks.reconstruction import tokens
from fedveil.attacks.samples import Sample
from fedveil.benchmarks.common.federations import federation
from fedveil.config import parse
from fedveil.federation.exchange import Exchange
from fedveil.wire.tap import Tap

FIELDS = 'adapter = {kind = "lora", rank = 64, targets = ["c_attn"]}'
ONE_STEP = {
    "method.name": "fedavg", "method.fields": FIELDS, "task.max-tokens": 48, "train.batch-size": 1,
    "train.max-steps": 1, "dp.clip": 1.0, "dp.learning-rate": 1.0, "run.rounds": 2, "cohort.min-sites": 2,
    "run.deterministic": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    """A run of two rounds of two sites, each step one of plain SGD on one row, about."""
    config = parse(ONE_STEP)
    method = strategies.create("fedavg", FIELDS)
    task = tasks.load(config, method.adapter, "cpu")
    examples = task.examples(places.folder("data") / "e2e", "train")[:200]
    rows = [row for row in task.encode(list(examples)) if 16 < len(row.ids) < 48]
    parts = {"a": rows[:6], "b": rows[6:12]}
    tap, exchange = Tap(tmp_path_factory.mktemp("tap")), Exchange(method, "fedavg", task.spec)
    drawn, initial = torch.Generator().manual_seed(3), task.initial(rng.initial(0, "weights"))
    initial = {n: w + 0.02 * torch.randn(w.shape, generator=drawn) for n, w in initial.items()}  # as after some rounds
    run = federation(exchange, config, task, parts, initial, tap)
    run.run()
    knowledge = Knowledge(task, initial, run.deployed()["server"])
    view = View.server(tap, exchange)
    members = {site: Sample(list(of), [""] * len(of)) for site, of in parts.items()}
    return view, knowledge, config, members, Sample(rows[40:46], [""] * 6)


@pytest.mark.long
def test_a_run_of_single_steps_spells_out_its_rows_and_no_others(audited):
    view, knowledge, config, members, non_members = audited
    assert spelled.misfit(view, knowledge.task, config) == ""
    (said,) = spelled.notes(view, knowledge, config, members, non_members)
    whole, uploads = map(int, said.partition("of a row: ")[2].partition(" uploads")[0].split(" of "))
    assert 0 < whole <= uploads == 4, said
    assert "and 0 one that no site trained on" in said
    assert "One step on one row gives 1.00 (the control to win)." in said


@pytest.mark.long
def test_a_rank_below_a_row_s_tokens_keeps_it_off(audited, monkeypatch):
    view, knowledge, config, members, non_members = audited
    monkeypatch.setattr(tokens, "span", lambda moved: torch.zeros(0, moved.shape[1]))  # as of a full one
    (said,) = spelled.notes(view, knowledge, config, members, non_members)
    assert "0 of " in said
    assert "NOT usable here: it does not win on one row" in said


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dp.clip": 0.0}, "train by AdamW"),
        ({"dp.noise": 1.0}, "add noise to every step"),
        ({"train.max-steps": 3}, "make 3 in a participation"),
        ({"train.max-steps": 0}, "make as many as their epochs have"),
        ({"train.precision": "bf16"}, "train in bf16"),
    ],
)
def test_a_run_without_single_plain_steps_is_left_out_with_its_reason(audited, changes, reason):
    view, knowledge, _, members, non_members = audited
    (said,) = spelled.notes(view, knowledge, parse({**ONE_STEP, **changes}), members, non_members)
    assert said.startswith("Left out: tokens off the span of one step: ")
    assert reason in said


def test_other_uploads_and_rows_are_left_out_with_their_reason(audited):
    view, knowledge, config, members, non_members = audited
    assert "no texts" in spelled.misfit(view, SimpleNamespace(), config)
    proxy = replace(view, exchange=SimpleNamespace(method=SimpleNamespace(sends="changes")))
    assert "changes of a proxy" in spelled.misfit(proxy, knowledge.task, config)
    whole = replace(view, exchange=SimpleNamespace(method=SimpleNamespace(sends="gradients", exchange="epoch")))
    assert "many steps" in spelled.misfit(whole, knowledge.task, config)
    one = replace(view, exchange=SimpleNamespace(method=SimpleNamespace(sends="gradients", exchange="batch")))
    assert spelled.misfit(one, knowledge.task, parse({**ONE_STEP, "dp.clip": 0.0})) == ""
    (over,) = spelled.notes(view, knowledge, config, members, non_members, lambda: True)
    assert over.endswith("the time did not suffice.")
    none_moved = replace(knowledge, initial={"m.weight": torch.zeros(1)})
    assert spelled.told(view, none_moved, members, non_members) == [
        "Left out: tokens off the span of one step: no layer with a pair reads the embeddings alone."
    ]
    unseen = type("Unseen", (View,), {"is_unseen": True})(view.tap, view.exchange)
    assert "summed unseen" in spelled.misfit(unseen, knowledge.task, config)


def test_the_first_attention_reads_the_embeddings_alone_and_later_ones_do_not(audited):
    _, knowledge, *_ = audited
    layer = tokens.first_layer(knowledge.task, knowledge.initial)
    assert layer == "transformer.h.0.attn.c_attn"
    assert not tokens.reads_embeddings(knowledge.task, knowledge.initial, layer.replace(".h.0.", ".h.1."))
