"""Privacy of text classification: per-text gradients, and attacks that find members."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transformers import DistilBertConfig, GPT2Config, ModernBertConfig, RobertaConfig

from fedveil import rng
from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.adapters.lora import LoraAdapter
from fedveil.attacks.base import AdversaryKnowledge, AdversaryView
from fedveil.attacks.membership import lira
from fedveil.attacks.membership.alignment import AlignmentAttack
from fedveil.attacks.membership.loss import CalibratedLossAttack, LossAttack
from fedveil.attacks.membership.model_scores import PublicBaseScores
from fedveil.attacks.statistics import area_under_roc
from fedveil.contract.task import Example
from fedveil.contract.trainer import BatchIndices
from fedveil.errors import TaskError
from fedveil.local import LocalFederation
from fedveil.models import library_logging
from fedveil.wire.capture import MessageCapture
from tests.fedveil.tasks.small_classifiers import (
    CONTEXT,
    NAMES,
    WORDS,
    draw_rows,
    filled,
    make_task,
    save_base,
    save_rows,
    save_tokenizer,
)  # fmt: skip

_SMALL = {"vocab_size": len(WORDS), "initializer_range": 0.3}
OTHERS = {
    "roberta": RobertaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, pad_token_id=0,
        max_position_embeddings=CONTEXT + 2, **_SMALL,
    ),
    "distilbert": DistilBertConfig(
        dim=16, n_layers=1, n_heads=2, hidden_dim=16, max_position_embeddings=CONTEXT, **_SMALL
    ),
    "gpt2": GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=CONTEXT, **_SMALL),
    "modernbert": ModernBertConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16, local_attention=4,
        max_position_embeddings=CONTEXT, pad_token_id=0, **_SMALL,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    from transformers import AutoModel

    root = tmp_path_factory.mktemp("bases")
    for kind in ("bert", "llama"):
        save_base(root / kind, kind)
    for name, config in OTHERS.items():
        with library_logging.quiet_libraries(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(2718)
            AutoModel.from_config(config).save_pretrained(root / name)
        save_tokenizer(root / name, encoder=name != "gpt2", model_max_length=CONTEXT)
    return root


def by_backward(task, weights, row) -> dict[str, torch.Tensor]:
    """The gradient of one text alone, without padding, by backpropagation."""
    task.put(weights)
    grads = torch.autograd.grad(task.loss_sum(task.collate([row])), list(task.trained.values()), allow_unused=True)
    pairs = zip(task.trained.items(), grads, strict=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs}


def check_gradients(task, several: bool = False) -> None:
    """Gradients and losses of texts of different lengths in one batch equal those of each alone, to 1e-5."""
    weights, rows = filled(task, 0.1), task.encode(Example.from_columns(draw_rows(5, seed=3, several=several)))
    assert len({row.length for row in rows}) > 2
    found = task.trainer(rows, rng.initial_stream(0, "b")).rows.per_sample(weights, BatchIndices(tuple(range(5))))
    for i, row in enumerate(rows):
        wanted = by_backward(task, weights, row)
        scale = max(float(g.abs().max()) for g in wanted.values())
        assert scale > 1e-3
        for name, g in wanted.items():
            torch.testing.assert_close(found.gradients[name][i], g, rtol=0, atol=1e-5 * max(1.0, scale))
        task.put(weights)
        with torch.no_grad():
            assert float(found.losses[i]) == pytest.approx(float(task.loss_sum(task.collate([row]))), rel=1e-5)


@pytest.mark.parametrize("several", [False, True], ids=["one class", "several"])
@pytest.mark.parametrize("adapter", [LoraAdapter(rank=2), AllWeightsAdapter()], ids=["lora", "all"])
@pytest.mark.parametrize("base", ["bert", "llama"])
def test_each_text_has_a_gradient_of_its_own(bases, base, adapter, several):
    check_gradients(make_task(adapter, task__model=str(bases / base), task__multi_label=several), several)


@pytest.mark.parametrize("base", ["roberta", "distilbert", "gpt2"])
def test_other_families_have_too(bases, base):
    task = make_task(LoraAdapter(rank=2), task__model=str(bases / base))
    assert task.base.is_causal == (base == "gpt2")
    check_gradients(task)


def test_an_encoder_that_adds_its_masks_has_too(bases):
    task = make_task(LoraAdapter(rank=2), task__model=str(bases / "bert"))
    task.base.model.set_attn_implementation("eager")
    check_gradients(task)


def test_an_encoder_with_windows_trains_but_has_no_gradients_of_single_texts(bases):
    task = make_task(LoraAdapter(rank=2), task__model=str(bases / "modernbert"))
    rows = task.encode(Example.from_columns(draw_rows(6)))
    start = task.initial(rng.initial_stream(0, "w"))
    trainer = task.trainer(rows, rng.initial_stream(0, "b"))
    assert any(not torch.equal(start[n], w) for n, w in trainer.train(start).weights.items())
    with pytest.raises(TaskError, match="task.model: per-example gradients require an encoder"):
        trainer.rows.per_sample(start, BatchIndices((0, 1)))


def memorized(count: int, seed: int) -> list[dict[str, str]]:
    """Texts whose class is drawn: nothing but the row itself tells it."""
    draw = random.Random(seed)
    words = [word for word in WORDS if word.isalpha() or word.isdecimal()]
    return [{"note": " ".join(draw.choices(words, k=8)), "ward": draw.choice(NAMES)} for _ in range(count)]


def losses_of(task, weights, rows) -> np.ndarray:
    predictions = task.predict(weights, rows)
    return np.array([float(torch.nn.functional.cross_entropy(p.logits["target"], p.wanted)) for p in predictions])


@pytest.fixture(scope="module")
def attacked(bases, tmp_path_factory):
    """A run of FedAvg that learned 16 random texts by heart: its view, what its server knows, members and others."""
    at = tmp_path_factory.mktemp("attacked")
    for site, seed in (("a", 1), ("b", 2)):
        save_rows(at / site, memorized(16, seed))
    flat = {
        "task.name": "text-classification", "task.model": str(bases / "bert"), "task.class-names": ",".join(NAMES),
        "task.source-column": "note", "task.target-column": "ward", "task.label-column": "ward",
        "task.max-tokens": CONTEXT, "method.name": "fedavg", "run.rounds": 2, "train.batch-size": 8,
        "train.epochs": 12, "train.learning-rate": 1e-2, "run.deterministic": True,
    }  # fmt: skip
    capture = MessageCapture(at / "messages")
    federation = LocalFederation.from_config(flat, {"a": at / "a", "b": at / "b"}, tap=capture)
    task = federation.task
    initial = task.initial(rng.initial_stream(0, "weights"))
    federation.run()
    view = AdversaryView.server(MessageCapture(at / "messages"), federation.federation.exchange)
    knowledge = AdversaryKnowledge(task, initial, dict(federation.federation.models()["server"]))
    members, others = (task.encode(Example.from_columns(memorized(16, seed))) for seed in (1, 99))
    return view, knowledge, members, others


def attack_scores(attack, view, knowledge, rows) -> np.ndarray:
    if isinstance(attack, AlignmentAttack):
        (scores,) = attack.scores(view, "a", knowledge, rows).values()
    else:
        base = PublicBaseScores(knowledge.task, knowledge.initial)
        (scores,) = base.scores([attack], knowledge.task, knowledge.server, rows).values()
    return scores


@pytest.mark.parametrize("attack", [LossAttack(), CalibratedLossAttack(), AlignmentAttack()], ids=lambda a: a.name)
def test_attacks_find_members_and_none_among_others(attacked, attack):
    view, knowledge, members, others = attacked
    scores = attack_scores(attack, view, knowledge, [*members, *others])
    assert area_under_roc(scores[:16], scores[16:]) > 0.75
    assert 0.1 < area_under_roc(scores[16:24], scores[24:]) < 0.9


def test_lira_finds_members_by_shadows(attacked, bases):
    _, knowledge, members, others = attacked
    task, pool = knowledge.task, [*members, *others]
    start = knowledge.initial

    def train(rows: list[int], number: int):
        return task.trainer([pool[i] for i in rows], rng.initial_stream(number, "shadow")).train(start).weights

    shadows = lira.train_shadows(train, len(pool), 4, np.random.default_rng(3))
    target = train(list(range(16)), 100)
    phi = [lira.target_confidence(losses_of(task, weights, pool)) for weights in (target, *shadows.weights)]
    scores = lira.lira_scores(phi[0], np.stack(phi[1:]), shadows.members)
    assert area_under_roc(scores[:16], scores[16:]) > 0.8
