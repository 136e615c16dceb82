"""Forms of a prompt, unbalanced transport compared with a linear program, and the contrastive term."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from fedveil import rng
from fedveil.adapters import prompt_tensors, shared_prompt
from fedveil.adapters.prompt import PromptAdapter
from fedveil.contract.method import FederatedState
from fedveil.contract.param_spec import ParamSpec
from fedveil.errors import ConfigError


def drawn(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def unit(shape, seed=0):
    return torch.nn.functional.normalize(drawn(shape, seed), dim=-1)


WEIGHTS = {
    "prompt": drawn((5, 7), 1), "prompt.local": drawn((5, 7), 2),
    "prompt.u": drawn((5, 2), 3), "prompt.v": drawn((2, 7), 4),
}  # fmt: skip


def weights(adapter: PromptAdapter):
    return {name: WEIGHTS[name] for name in adapter.shapes(7)}


def test_shapes_and_names():
    assert PromptAdapter().shapes(512) == {"prompt": (16, 512)}
    assert PromptAdapter(3, form="sum").shapes(8) == {"prompt": (3, 8), "prompt.local": (3, 8)}
    assert PromptAdapter(3, form="transport").shapes(8) == {"prompt": (3, 8), "prompt.local": (3, 8)}
    assert PromptAdapter(5, form="factored", rank=2).shapes(7) == {
        "prompt": (5, 7),
        "prompt.u": (5, 2),
        "prompt.v": (2, 7),
    }


def test_contexts_by_hand():
    p, l, u, v = WEIGHTS.values()  # noqa: E741
    expected = {
        PromptAdapter(5): [p],
        PromptAdapter(5, form="sum"): [p + l],
        PromptAdapter(5, form="transport"): [p, l],
        PromptAdapter(5, form="factored", rank=2): [p + u @ v],
        PromptAdapter(5, form="factored", rank=2, contrast=0.5): [p + u @ v, p],
    }
    for adapter, wanted in expected.items():
        assert torch.equal(prompt_tensors.context_vectors(adapter, weights(adapter)), torch.stack(wanted)), adapter


@pytest.mark.parametrize("form", ["one", "sum", "transport", "factored"])
def test_the_shared_model_alone_has_the_shared_prompt_s_text_only(form):
    adapter = PromptAdapter(5, form=form, rank=2)
    alone = shared_prompt.private_state(adapter, weights(adapter))
    assert {n: tuple(t.shape) for n, t in alone.items()} == adapter.shapes(7)
    assert all(torch.equal(context, WEIGHTS["prompt"]) for context in prompt_tensors.context_vectors(adapter, alone))


def test_initial_tensors_are_normal_and_repeat():
    adapter = PromptAdapter(40, form="sum", std=0.02)
    first, again, other = (adapter.draw(adapter.shapes(300), rng.initial_stream(s, "w"), {}) for s in (0, 0, 1))
    for name, tensor in first.items():
        assert float(tensor.std()) == pytest.approx(0.02, rel=0.03)
        assert abs(float(tensor.mean())) < 0.001
        assert torch.equal(tensor, again[name])
        assert not torch.equal(tensor, other[name])
    assert not torch.equal(first["prompt"], first["prompt.local"])


def test_a_site_starts_from_what_it_kept_or_draws_it():
    adapter = PromptAdapter(5, form="sum")
    spec = {name: ParamSpec(shape) for name, shape in adapter.shapes(7).items()}
    received = {"prompt": torch.ones(5, 7, dtype=torch.float16)}
    start_state = shared_prompt.start_state(
        adapter, FederatedState({"prompt.local": WEIGHTS["prompt.local"]}), received, spec, rng.initial_stream(0, "a")
    )
    assert torch.equal(start_state["prompt.local"], WEIGHTS["prompt.local"])
    assert torch.equal(start_state["prompt"], torch.ones(5, 7))
    assert start_state["prompt"].dtype == torch.float32
    new, other = (
        shared_prompt.start_state(adapter, None, received, spec, rng.initial_stream(0, purpose)) for purpose in "ab"
    )
    assert torch.equal(new["prompt"], torch.ones(5, 7))
    assert 0.01 < float(new["prompt.local"].std()) < 0.03
    assert not torch.equal(new["prompt.local"], other["prompt.local"])


# --- transport


def cost_of(similarity, mass):
    """The least cost of Eq. 2 without entropy, by a linear program."""
    m, p = similarity.shape
    rows, columns = np.kron(np.eye(m), np.ones(p)), np.kron(np.ones(m), np.eye(p))
    cost = (1 - similarity.numpy()).ravel()
    solution = linprog(cost, rows, np.full(m, 1 / m), columns, np.full(p, mass / p), bounds=(0, None))
    assert solution.success
    return solution.fun


@pytest.mark.parametrize("mass", [0.5, 0.8, 1.0])
def test_the_plan_is_that_of_the_linear_program(mass):
    for seed in range(5):
        similarity = unit((9, 6), seed) @ unit((2, 6), seed + 50).T
        plan = prompt_tensors.transport_plan(similarity, mass, epsilon=0.01, iterations=3000, tolerance=1e-6)
        cost = float((plan * (1 - similarity)).sum())
        assert cost == pytest.approx(cost_of(similarity, mass), abs=0.01 * math.log(18))  # entropy of 18 entries
        assert float(plan.sum(1).max()) <= 1 / 9 + 1e-4


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 20), st.integers(2, 3), st.floats(0.1, 1.0), st.integers(0, 10**6), st.sampled_from([1.0, 0.3, 0.01])
)
def test_marginals(points, count, mass, seed, epsilon):
    similarity = drawn((3, points, count), seed).tanh()
    plan = prompt_tensors.transport_plan(similarity, mass, epsilon, 4000, 1e-5)
    assert torch.isfinite(plan).all()
    assert (plan >= 0).all()
    torch.testing.assert_close(plan.sum(-2), torch.full((3, count), mass / count), rtol=1e-4, atol=1e-6)
    if mass < 0.95:  # at 1 the rows bind, and the scaling converges as slowly as it likes
        slack = 1.1 if epsilon == 0.01 else 1.02  # where few rows bind, 4,000 steps still leave 3 % in one of 800 draws
        assert float(plan.sum(-1).max()) <= (1 / points) * slack


def test_a_plan_against_its_naive_twin():
    similarity, mass, epsilon = drawn((6, 2), 9).tanh().double(), 0.7, 0.2
    k, u, v = ((similarity - 1) / epsilon).exp(), torch.ones(6).double(), torch.full((2,), 0.35).double()
    for _ in range(400):
        u = torch.minimum(torch.ones(6).double(), (1 / 6) / (k @ v))
        v = 0.35 / (k.T @ u)
    torch.testing.assert_close(prompt_tensors.transport_plan(similarity, mass, epsilon, 400, 0.0), u[:, None] * k * v)


def test_a_plan_leaves_the_worst_patches_out_and_carries_no_gradient():
    similarity = torch.tensor([[0.9, 0.9]] * 8 + [[-0.9, -0.9]] * 2).requires_grad_()
    plan = prompt_tensors.transport_plan(similarity, 0.8)
    torch.testing.assert_close(plan[:8], torch.full((8, 2), 0.05), rtol=1e-3, atol=1e-5)
    assert float(plan[8:].sum()) < 1e-6
    assert not plan.requires_grad


def test_similarities_by_hand():
    images, texts = unit((3, 5, 4), 1), unit((2, 6, 4), 2)
    plain = prompt_tensors.class_similarities(PromptAdapter(), images, texts[:1])
    torch.testing.assert_close(plain, images[:, 0] @ texts[0].T)
    similarities = prompt_tensors.class_similarities(PromptAdapter(form="transport", mass=0.8), images, texts)
    for row in range(3):
        for c in range(6):
            similarity = images[row, 1:] @ texts[:, c].T
            expected = (prompt_tensors.transport_plan(similarity, 0.8) * similarity).sum()
            assert float(similarities[row, c]) == pytest.approx(float(expected), abs=1e-3)


# --- the contrastive term


def test_contrast_by_hand_and_as_a_cross_entropy_of_two():
    e = torch.eye(3)
    none = prompt_tensors.contrastive_loss(e[:1], e[1:2], e[2:3], 0.5)
    assert float(none) == pytest.approx(math.log(2))
    best = prompt_tensors.contrastive_loss(e[:1], e[:1], -e[:1], 0.5)
    assert float(best) == pytest.approx(math.log(1 + math.exp(-4)))
    a, b, c = unit((6, 9), 1), unit((6, 9), 2), unit((6, 9), 3)
    pair = torch.stack([(b * a).sum(1), (b * c).sum(1)], dim=1) / 0.3
    expected = torch.nn.functional.cross_entropy(pair, torch.zeros(6, dtype=torch.long))
    torch.testing.assert_close(prompt_tensors.contrastive_loss(a, b, c, 0.3), expected)


# --- configuration


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"length": 0}, "adapter.length"),
        ({"form": "factored", "rank": 17}, "adapter.rank: expected 1 to 16, the prompt's length, found 17"),
        ({"form": "factored", "rank": 0}, "adapter.rank"),
        ({"mass": 0.0}, "adapter.mass"),
        ({"mass": 1.1}, "adapter.mass"),
        ({"std": -1.0}, "adapter.std"),
        ({"std": math.nan}, "adapter.std"),
        ({"temperature": 0.0}, "adapter.temperature"),
        ({"form": "factored", "contrast": -1.0}, "adapter.contrast"),
        ({"form": "sum", "contrast": 1.0}, "adapter.contrast: form"),
    ],
)
def test_fields_that_cannot_be_are_refused_by_name(fields, named):
    with pytest.raises(ConfigError, match=named):
        PromptAdapter(**fields)
