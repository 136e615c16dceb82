"""Local training beyond the plain loop: accumulation, non-finite losses, the progress watch, and waits for a GPU."""

from __future__ import annotations

import itertools
import math
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedveil import config as run_config
from fedveil import strategies
from fedveil.data import batches
from fedveil.errors import ConfigError, TaskError
from fedveil.rng import RandomStream
from fedveil.tasks import load_task
from fedveil.tasks.text_generation import TextGeneration
from fedveil.training import loss_log, optimizers, per_example
from tests.fedveil.training.small import KEY, gradients, make


@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
def test_the_defaults_are_a_plain_loop_bit_for_bit(configured, rows, start):
    """The naive twin: batches in the drawn order, one AdamW step each, the loss picked out by a mask of labels."""
    task = configured(train__batch_size=8, train__epochs=2, train__learning_rate=1e-3)
    seen = []
    result = task.trainer(rows, RandomStream(KEY), seen.append).train(start)

    task.base.put(start)
    optimiser = torch.optim.AdamW(list(task.base.trained.values()), lr=1e-3, weight_decay=1e-6, fused=True)
    generator = RandomStream(KEY).torch_generator()
    losses = []
    for _ in range(2):
        shuffled = torch.randperm(29, generator=generator).tolist()
        for i in range(0, 29, 8):
            chosen = [rows[j] for j in shuffled[i : i + 8]]
            width = max(len(row.ids) for row in chosen)
            end = [task.base.tokenizer.eos_token_id]
            ids = torch.tensor([row.ids + (width - len(row.ids)) * end for row in chosen])
            mask = torch.tensor([[int(i < len(row.ids)) for i in range(width)] for row in chosen])
            labels = [row.start * [-1] + row.ids[row.start :] + (width - len(row.ids)) * [-1] for row in chosen]
            labels = torch.tensor(labels)
            logits = task.base.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            counted = labels[:, 1:] != -1
            terms = torch.nn.functional.cross_entropy(logits[:, :-1][counted], labels[:, 1:][counted], reduction="sum")
            loss = terms / int(counted.sum())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
    optimiser.zero_grad()
    assert all(torch.equal(result.weights[name], p) for name, p in task.base.trained.items())
    assert result.report["loss_trained"] == sum(losses) / 8
    assert result.report["tokens"] == 2 * sum(len(row.ids) for row in rows)
    assert (seen[-1].step, seen[-1].loss) == (8, losses[-1])


@pytest.mark.long
def test_accumulated_batches_step_as_one_batch_of_all_their_rows(configured, rows, start):
    """29 rows, 4 x 3 a step: the third step has 5 rows in batches of 3 and 2."""
    joint = (
        configured(train__batch_size=12, train__epochs=2, train__max_steps=4)
        .trainer(rows, RandomStream(KEY))
        .train(start)
    )
    task = configured(train__batch_size=3, train__gradient_accumulation_steps=4, train__epochs=2, train__max_steps=4)
    parts = task.trainer(rows, RandomStream(KEY)).train(start)
    assert (parts.report["steps"], parts.report["tokens"]) == (4, joint.report["tokens"])
    assert parts.report["loss_trained"] == pytest.approx(joint.report["loss_trained"], rel=1e-6)
    # AdamW's first steps follow the sign of a gradient, so where one is rounding noise the weights differ by the rate.
    apart = torch.cat([(parts.weights[n] - joint.weights[n]).flatten().abs() for n in start])
    assert float(apart.quantile(0.999)) < 1e-6


def test_the_accumulated_gradient_is_no_mean_of_means(configured, rows, start, monkeypatch):
    """By what reaches the optimiser: equal to the joint gradient, and far from the mean of the batches' own means."""
    configured().base.put(start)
    given = []
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self: given.append([p.grad.clone() for p in self.param_groups[0]["params"]])
    )
    task = configured(train__batch_size=2, train__gradient_accumulation_steps=3, train__max_steps=1)
    task.trainer(rows[:6], RandomStream(KEY)).train(start)
    chosen = next(task.trainer(rows[:6], RandomStream(KEY))._batches())
    joint = gradients(task, chosen)
    means = [gradients(task, chosen[i : i + 2]) for i in (0, 2, 4)]
    assert len(given) == 1
    for got, (name, expected) in zip(given[0], joint.items(), strict=True):
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-6), name
    naive = sum(m["transformer.h.3.mlp.c_proj.lora_B"] for m in means) / 3
    assert not torch.allclose(naive, joint["transformer.h.3.mlp.c_proj.lora_B"], rtol=1e-2, atol=1e-4)


def test_what_an_error_left_of_a_gradient_is_dropped(configured, rows, start, monkeypatch):
    task = configured(train__batch_size=4, train__gradient_accumulation_steps=2, train__max_steps=1)
    expected = task.trainer(rows, RandomStream(KEY)).train(start)
    honest, seen = task.loss_sum, itertools.count(1)

    def loss_sum(batch):
        if torch.is_grad_enabled() and next(seen) == 2:
            raise MemoryError
        return honest(batch)

    monkeypatch.setattr(task, "loss_sum", loss_sum)
    with pytest.raises(MemoryError):
        task.trainer(rows, RandomStream(KEY)).train(start)
    assert any(p.grad is not None for p in task.trained.values())
    again = task.trainer(rows, RandomStream(KEY)).train(start)
    assert all(torch.equal(again.weights[n], expected.weights[n]) for n in start)


def poisoned(task: TextGeneration, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The loss of the training batch number `at` is not a number."""
    honest, seen = task.loss_sum, itertools.count(1)

    def loss_sum(batch):
        loss = honest(batch)
        return loss * math.nan if torch.is_grad_enabled() and next(seen) == at else loss

    monkeypatch.setattr(task, "loss_sum", loss_sum)


@pytest.mark.parametrize("every", [0.0, 3600.0])
def test_the_first_loss_that_is_not_finite_is_named(configured, rows, start, monkeypatch, every):
    """However late it is read, and although every loss after it is no number either."""
    monkeypatch.setattr(loss_log, "_READ_SECONDS", every)
    task = configured(
        train__batch_size=2, train__gradient_accumulation_steps=2, train__epochs=1, train__learning_rate=0.05
    )
    poisoned(task, monkeypatch, at=5)
    seen = []
    third = torch.randperm(29, generator=RandomStream(KEY).torch_generator()).tolist()[8:12]
    named = ", ".join(str(row + 1) for row in sorted(third))
    expected = (
        "train.learning-rate: step 3 with 0.05 did not give a finite loss, but nan; it used this site's "
        f"examples {named}; lower it, set train.max-grad-norm, or correct an example that differs from the others"
    )
    with pytest.raises(TaskError) as error:
        task.trainer(rows, RandomStream(KEY), seen.append).train(start)
    assert str(error.value) == expected
    assert [step.step for step in seen] == ([1, 2] if every == 0 else [])
    assert all(p.grad is None for p in task.trained.values())


@pytest.mark.long
def test_weights_that_the_last_step_broke_do_not_leave(configured, rows, start, monkeypatch):
    """Its loss is finite, its gradient is not; and of many rows a few are named."""
    task = configured(train__batch_size=1, train__gradient_accumulation_steps=40, train__epochs=2, train__max_steps=2)
    honest, seen = task.loss_sum, itertools.count(1)

    def loss_sum(batch):
        loss = honest(batch)
        if torch.is_grad_enabled() and next(seen) == 60:
            loss.register_hook(lambda gradient: gradient * math.inf)
        return loss

    monkeypatch.setattr(task, "loss_sum", loss_sum)
    monkeypatch.setattr(loss_log, "_NAMED", 3)
    many = [*rows, *rows[:11]]
    with pytest.raises(TaskError, match=r"step 2 .* finite weight, but NaN or infinity; .* 1, 2, 3 and 37 more"):
        task.trainer(many, RandomStream(KEY)).train(start)


@pytest.mark.parametrize(("every", "steps"), [(0.0, [1, 2, 3, 4, 5]), (3600.0, [5])])
def test_the_watch_sees_the_last_step_once(configured, rows, start, monkeypatch, every, steps):
    monkeypatch.setattr(loss_log, "_READ_SECONDS", every)
    seen = []
    task = configured(train__batch_size=3, train__gradient_accumulation_steps=2)
    result = task.trainer(rows, RandomStream(KEY), seen.append).train(start)
    assert [step.step for step in seen] == steps
    assert {step.steps for step in seen} == {5}
    assert all(a.tokens < b.tokens and a.seconds < b.seconds for a, b in itertools.pairwise(seen))
    assert seen[-1].tokens == result.report["tokens"] == sum(len(row.ids) for row in rows)
    nothing = []
    configured(train__epochs=0).trainer(rows, RandomStream(KEY), nothing.append).train(start)
    assert nothing == []


def test_what_the_watch_raises_ends_the_training(configured, rows, start, monkeypatch):
    monkeypatch.setattr(loss_log, "_READ_SECONDS", 0.0)
    task = configured(train__batch_size=2, train__gradient_checkpointing=True)
    seen = []

    def stop(step):
        seen.append(step.step)
        if step.step == 2:
            raise InterruptedError("enough")

    with pytest.raises(InterruptedError, match="enough"):
        task.trainer(rows, RandomStream(KEY), stop).train(start)
    assert seen == [1, 2]
    assert not any(m.training for m in task.base.model.modules())
    assert all(p.grad is None for p in task.trained.values())


class Waits(TorchDispatchMode):
    """Counts what a GPU would have to be waited for: values read back, and shapes that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        by_mask = name.startswith("aten.index.Tensor") and any(i is not None and i.dtype == torch.bool for i in args[1])
        self.count += name.startswith(("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select")) or by_mask
        return func(*args, **(kwargs or {}))


def test_a_step_waits_for_nothing_that_the_device_computes(configured, rows):
    """Beyond the library's own look at the attention mask."""
    task = configured()
    batch = task.collate(rows[:6])
    with Waits() as library:
        task.base.model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False)
    with Waits() as ours:
        (task.loss_sum(batch) / batch.terms).backward()
    with Waits() as by_mask:
        _ = batch.ids[batch.mask == 1]
    assert ours.count == library.count
    assert by_mask.count > 0
    for p in task.trained.values():
        p.grad = None


def test_batches_are_made_one_ahead_in_a_thread():
    """The first is asked for when the second is under way; order and errors stay."""
    begun = [threading.Event() for _ in range(5)]

    def work(i: int) -> int:
        begun[i].set()
        if i == 3:
            raise ValueError("row 3")
        assert threading.current_thread() is not threading.main_thread()
        return 10 * i

    got = []
    made = batches.prefetch(range(5), work)
    for _ in range(3):
        got.append(next(made))
        assert begun[len(got)].wait(5)
    with pytest.raises(ValueError, match="row 3"):
        next(made)
    assert got == [0, 10, 20]
    assert list(batches.prefetch([], work)) == []


@pytest.mark.long
def test_loss_on_all_learns_the_sources_too_and_scores_the_targets(configured, rows, start):
    """By hand: every token of a row but its first, from the logits before it."""
    plain = configured(train__batch_size=4).trainer(rows, RandomStream(KEY)).gradient(start)
    task = configured(train__batch_size=4, train__loss_mask="all")
    result = task.trainer(rows, RandomStream(KEY)).gradient(start)
    chosen = [rows[i] for i in torch.randperm(29, generator=RandomStream(KEY).torch_generator()).tolist()[:4]]
    task.base.put(start)
    terms = []
    for row in chosen:
        logits = task.base.model(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0]
        terms.append(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(row.ids[1:]), reduction="none"))
    loss = torch.cat(terms).mean()
    loss.backward()
    for name, p in task.trained.items():
        torch.testing.assert_close(result.weights[name], p.grad, rtol=1e-3, atol=1e-6)
        p.grad = None
    assert result.report["loss_received"] == pytest.approx(loss.item(), rel=1e-5)
    assert result.report["loss_received"] != pytest.approx(plain.report["loss_received"], rel=1e-2)
    other = make(train__loss_mask="all")  # rows have no gradients once a base was recomputed
    samples = per_example.per_example_gradients(other, other.spec, chosen, start)
    assert samples.losses.tolist() == pytest.approx([of.mean().item() for of in terms], rel=1e-4)
    trained = task.trainer(rows, RandomStream(KEY)).train(start)
    on_targets = configured().trainer(rows, RandomStream(KEY)).train(start).report["loss_received"]
    assert trained.report["loss_received"] == pytest.approx(on_targets, rel=1e-6)  # to rounding, which CPUs differ in


@pytest.mark.parametrize("name", ["vision-language", "image-classification", "clip-prompt"])
def test_tasks_without_sources_refuse_a_loss_on_them(name):
    method = strategies.create_method("promptfl" if name == "clip-prompt" else "fedavg")
    config = run_config.parse({"task.name": name, "train.loss-mask": "all"})
    with pytest.raises(ConfigError, match=f"train.loss-mask: the task \"{name}\" supports only 'targets', found 'all'"):
        load_task(config, method.adapter, "cpu")


@pytest.mark.long
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_gradient_is_clipped_once_a_step_with_the_penalty_and_without_what_is_held(
    configured, rows, start, monkeypatch, accumulate
):
    """By what reaches the optimiser: the plain training's first gradient, scaled to a fifth of its own norm."""
    given = []
    monkeypatch.setattr(
        torch.optim.AdamW,
        "step",
        lambda self: given.append(
            [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.param_groups[0]["params"]]
        ),
    )
    frozen_masks = {name: torch.ones_like(w, dtype=torch.bool) for name, w in start.items() if ".h.1." in name}
    penalty = lambda weights: 0.3 * sum(w.square().sum() for w in weights.values())  # noqa: E731
    keys = {"train__batch_size": 4, "train__gradient_accumulation_steps": accumulate, "train__max_steps": 2}

    def gradients_of(limit: float) -> list[torch.Tensor]:
        given.clear()
        configured(**keys, train__max_grad_norm=limit).trainer(rows, RandomStream(KEY)).train(
            start, frozen_masks, penalty
        )
        assert len(given) == 2
        return given[0]

    free = [
        torch.zeros_like(g) if name in frozen_masks else g for name, g in zip(start, gradients_of(0.0), strict=True)
    ]
    norm = float(torch.cat([g.flatten() for g in free]).norm())
    for got, expected in zip(gradients_of(norm / 5), free, strict=True):
        torch.testing.assert_close(got, expected / 5, rtol=1e-4, atol=1e-8)
    for got, expected in zip(gradients_of(2 * norm), free, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"train__quantized_base": "4bit"}, 'torch cannot compile train.quantized-base = "4bit"; set'),
        (
            {"train__gradient_checkpointing": True},
            "torch cannot compile layers that are recomputed",
        ),
        ({"run__deterministic": True}, "a compiled model is not bit-for-bit reproducible"),
    ],
)
def test_compiling_is_refused_where_it_cannot_be_had(keys, message):
    with pytest.raises(ConfigError, match=f"train.compile: {message}"):
        make(train__compile=True, **keys)


def test_a_machine_that_cannot_compile_says_so_before_the_first_step(rows, start, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no C++ compiler\nat length")

    monkeypatch.setattr(torch, "compile", broken)
    task = make(train__compile=True)
    with pytest.raises(
        ConfigError, match=r"train.compile: torch.compile does not work here .* \(no C\+\+ compiler\); inst"
    ):
        task.trainer(rows, RandomStream(KEY)).train(start)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_model_trains_as_the_plain_one(configured, rows, start):
    plain = configured(train__batch_size=4).trainer(rows, RandomStream(KEY)).train(start)
    compiled = make(train__batch_size=4, train__compile=True).trainer(rows, RandomStream(KEY)).train(start)
    assert compiled.report["loss_trained"] == pytest.approx(plain.report["loss_trained"], rel=1e-4)
    assert compiled.report["loss_received"] == plain.report["loss_received"]  # scoring stays as it is


def test_adamw_is_fused_on_a_cpu_too(task):
    group = optimizers.create(list(task.trained.values()), task.config.train).param_groups[0]
    assert group["fused"]
    assert (group["lr"], group["weight_decay"]) == (3e-4, 1e-6)
    with pytest.raises(ConfigError, match="train.gradient-accumulation-steps: .*found 0"):
        run_config.parse({"train.gradient-accumulation-steps": 0})
