"""Recomputed activations give the same gradients and weights."""

from __future__ import annotations

import pytest
import torch

from fedveil.errors import ConfigError
from fedveil.models import training_modes
from fedveil.rng import RandomStream
from tests.fedveil.training.small import KEY, gradients


def test_recomputed_activations_give_the_same_gradients(configured, rows, start):
    task = configured()
    task.base.put(start)
    block = task.base.model.transformer.h[1]
    passes, saved_sizes = [], []
    hook = block.mlp.c_fc.base_layer.register_forward_hook(lambda *_: passes.append(block.training))

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved_sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        expected = gradients(task, rows[:6])
        plain, passes_plain = sum(saved_sizes), list(passes)
        saved_sizes.clear()
        passes.clear()
        with configured(train__gradient_checkpointing=True).training(RandomStream(KEY)):
            got = gradients(task, rows[:6])
            flags = {name for name, m in task.base.model.named_modules() if m.training}
            how = [h._gradient_checkpointing_func.keywords for h in task.base.model.transformer.h]
    hook.remove()
    assert how == [{"use_reentrant": False, "preserve_rng_state": False}] * 4
    assert (passes_plain, passes) == ([False], [True, True])
    assert flags == {f"transformer.h.{i}" for i in range(4)}  # and without dropout inside the layers
    assert sum(saved_sizes) < plain  # only tensors outside the layers, and each layer's input, pass these hooks
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert not any(m.training for m in task.base.model.modules())


@pytest.mark.long
def test_checkpointing_trains_to_the_same_weights_and_leaves_generation_alone(configured, rows, start):
    plain = configured(train__max_steps=3, train__batch_size=4).trainer(rows, RandomStream(KEY)).train(start)
    task = configured(
        train__max_steps=3, train__batch_size=4, train__gradient_checkpointing=True, evaluate__max_new_tokens=6
    )
    passes = []
    hook = task.base.model.transformer.h[0].mlp.c_fc.register_forward_hook(
        lambda *_: passes.append(torch.is_grad_enabled())
    )
    saved = task.trainer(rows, RandomStream(KEY)).train(start)
    hook.remove()
    assert passes.count(True) == 2 * 3  # twice a step
    assert all(torch.equal(saved.weights[n], plain.weights[n]) for n in start)
    sources = ["name[The Mill]", "name[X], area[riverside]"]
    texts = task.generate(start, sources)
    assert texts == configured(evaluate__max_new_tokens=6).generate(start, sources)
    assert not any(m.training for m in task.base.model.modules())


def test_a_layers_own_dropout_is_off_while_it_is_recomputed(configured, rows, start):
    """OPT's layers drop out by themselves, by their own `training` flag."""
    task = configured()
    task.base.put(start)
    layer = task.base.model.transformer.h[2]
    layer.dropout = 0.25
    with training_modes.recompute_activations(task.base.model, "tiny"):
        assert (layer.dropout, layer.training) == (0.0, True)
    assert (layer.dropout, layer.training) == (0.25, False)
    del layer.dropout


def test_a_model_without_such_layers_is_refused():
    with (
        pytest.raises(
            ConfigError, match=r'train.gradient-checkpointing: the layers of "x" \(Linear\) cannot be recomputed; set'
        ),
        training_modes.recompute_activations(torch.nn.Linear(2, 2), "x"),
    ):
        pass
