"""Token recovery in an audit: it applies to runs with single steps of SGD; other runs get the reason."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fedveil import paths, rng, strategies, tasks
from fedveil.attacks.audit import token_recovery_audit
from fedveil.attacks.base import AdversaryKnowledge, AdversaryView
from fedveil.attacks.reconstruction import token_recovery
from fedveil.attacks.samples import AuditSample
from fedveil.config import parse
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.wire.capture import MessageCapture

FIELDS = 'adapter = {kind = "lora", rank = 64, targets = ["c_attn"]}'
ONE_STEP = {
    "method.name": "fedavg", "method.params": FIELDS, "task.max-tokens": 48, "train.batch-size": 1,
    "train.max-steps": 1, "dp.clip-norm": 1.0, "dp.learning-rate": 1.0, "run.rounds": 2, "cohort.min-sites": 2,
    "run.deterministic": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    """A run of two rounds of two sites, each step one of plain SGD on one row, about."""
    config = parse(ONE_STEP)
    method = strategies.create_method("fedavg", FIELDS)
    task = tasks.load_task(config, method.adapter, "cpu")
    examples = task.examples(paths.find_folder("data") / "e2e", "train")[:200]
    rows = [row for row in task.encode(list(examples)) if 16 < len(row.ids) < 48]
    parts = {"a": rows[:6], "b": rows[6:12]}
    tap, exchange = MessageCapture(tmp_path_factory.mktemp("tap")), MessageExchange(method, "fedavg", task.spec)
    drawn, initial = torch.Generator().manual_seed(3), task.initial(rng.initial_stream(0, "weights"))
    initial = {n: w + 0.02 * torch.randn(w.shape, generator=drawn) for n, w in initial.items()}  # as after some rounds
    start = method.init(task.spec, initial, rng.initial_stream(0, "method init"))

    def trainer_for(site, ctx):
        return task.trainer(parts[site], ctx.rng("batches"), round_=ctx.round)

    run = InProcessFederation(exchange, config, trainer_for, list(parts), start, tap=tap)
    run.run()
    knowledge = AdversaryKnowledge(task, initial, run.models()["server"])
    view = AdversaryView.server(tap, exchange)
    members = {site: AuditSample(list(of), [""] * len(of)) for site, of in parts.items()}
    return view, knowledge, config, members, AuditSample(rows[40:46], [""] * 6)


@pytest.mark.long
def test_a_run_of_single_steps_spells_out_its_rows_and_no_others(audited):
    view, knowledge, config, members, non_members = audited
    assert token_recovery_audit.explain_misfit(view, knowledge.task, config) == ""
    (note,) = token_recovery_audit.audit_notes(view, knowledge, config, members, non_members)
    whole, uploads = map(int, note.partition("of an example: ")[2].partition(" uploads")[0].split(" of "))
    assert 0 < whole <= uploads == 4, note
    assert "and 0 one that no site trained on" in note
    assert "One step on one example gives 1.00 (the control to win)." in note


@pytest.mark.long
def test_a_rank_below_a_row_s_tokens_keeps_it_off(audited, monkeypatch):
    view, knowledge, config, members, non_members = audited
    monkeypatch.setattr(
        token_recovery, "gradient_span", lambda moved: torch.zeros(0, moved.shape[1])
    )  # as of a full one
    (note,) = token_recovery_audit.audit_notes(view, knowledge, config, members, non_members)
    assert "0 of " in note
    assert "NOT usable here: it does not win on one example" in note


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dp.clip-norm": 0.0}, "train with AdamW"),
        ({"dp.noise-multiplier": 1.0}, "add noise to every step"),
        ({"train.max-steps": 3}, "take 3 per participation"),
        ({"train.max-steps": 0}, "take as many as their epochs have"),
        ({"train.precision": "bf16"}, "train in bf16"),
    ],
)
def test_a_run_without_single_plain_steps_is_left_out_with_its_reason(audited, changes, reason):
    view, knowledge, _, members, non_members = audited
    (note,) = token_recovery_audit.audit_notes(view, knowledge, parse({**ONE_STEP, **changes}), members, non_members)
    assert note.startswith("Left out: tokens from the span of one step: ")
    assert reason in note


def test_other_uploads_and_rows_are_left_out_with_their_reason(audited):
    view, knowledge, config, members, non_members = audited
    assert "are not text" in token_recovery_audit.explain_misfit(view, SimpleNamespace(), config)
    proxy = replace(view, exchange=SimpleNamespace(method=SimpleNamespace(upload_kind="changes")))
    assert "changes to a proxy" in token_recovery_audit.explain_misfit(proxy, knowledge.task, config)
    whole = replace(view, exchange=SimpleNamespace(method=SimpleNamespace(upload_kind="gradients", exchange="epoch")))
    assert "many steps" in token_recovery_audit.explain_misfit(whole, knowledge.task, config)
    one = replace(view, exchange=SimpleNamespace(method=SimpleNamespace(upload_kind="gradients", exchange="batch")))
    assert token_recovery_audit.explain_misfit(one, knowledge.task, parse({**ONE_STEP, "dp.clip-norm": 0.0})) == ""
    (over,) = token_recovery_audit.audit_notes(view, knowledge, config, members, non_members, lambda: True)
    assert over.endswith("there was not enough time.")
    none_moved = replace(knowledge, initial={"m.weight": torch.zeros(1)})
    assert token_recovery_audit.describe_recovery(view, none_moved, members, non_members) == [
        "Left out: tokens from the span of one step: no layer with a LoRA pair reads only the embeddings."
    ]
    unseen = type("Unseen", (AdversaryView,), {"is_unseen": True})(view.tap, view.exchange)
    assert "saw only sums" in token_recovery_audit.explain_misfit(unseen, knowledge.task, config)


def test_the_first_attention_reads_the_embeddings_alone_and_later_ones_do_not(audited):
    _, knowledge, *_ = audited
    layer = token_recovery.first_layer(knowledge.task, knowledge.initial)
    assert layer == "transformer.h.0.attn.c_attn"
    assert not token_recovery.reads_embeddings(knowledge.task, knowledge.initial, layer.replace(".h.0.", ".h.1."))
