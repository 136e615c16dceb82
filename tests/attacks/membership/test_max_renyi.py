"""Entropies compared with values by hand and with a reference that uses probabilities; the k rule."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.attacks.base import ModelOutput
from fedveil.attacks.membership.max_renyi import MaxRenyiAttack, max_k, renyi_entropy
from fedveil.contract.task import ExamplePrediction

ALPHAS = [0.25, 0.5, 0.999, 1.0, 1.001, 2.0, 3.7, math.inf]


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("classes", [1, 2, 1000])
def test_uniform_is_ln_v_for_every_alpha(alpha, classes):
    assert renyi_entropy(torch.full((3, classes), 7.25), alpha).tolist() == pytest.approx([math.log(classes)] * 3)


@pytest.mark.parametrize(
    "alpha,expected",
    [
        (0.5, 2 * math.log(0.5 + math.sqrt(0.75))),
        (1.0, -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))),
        (2.0, -math.log(0.0625 + 0.5625)),
        (3.0, -math.log(0.015625 + 0.421875) / 2),
        (math.inf, -math.log(0.75)),
    ],
)
def test_two_classes_by_hand(alpha, expected):
    """p = (1/4, 3/4)."""
    assert renyi_entropy(logits_of(0.25, 0.75), alpha).item() == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.floats(-12, 12), min_size=2, max_size=9), st.sampled_from(ALPHAS))
@settings(deadline=None)
def test_equals_a_twin_from_probabilities(values, alpha):
    weights = [math.exp(v - max(values)) for v in values]
    p = [w / math.fsum(weights) for w in weights]
    if math.isinf(alpha):
        expected = -math.log(max(p))
    elif alpha == 1:
        expected = -math.fsum(q * math.log(q) for q in p)
    else:
        expected = math.log(math.fsum(q**alpha for q in p)) / (1 - alpha)
    entropy = renyi_entropy(torch.tensor([values], dtype=torch.float64), alpha).item()
    assert entropy == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.floats(-12, 12), min_size=2, max_size=9))
@settings(deadline=None)
def test_falls_with_alpha_and_is_continuous_at_1(values):
    logits = torch.tensor([values], dtype=torch.float64)
    falling = [renyi_entropy(logits, alpha).item() for alpha in ALPHAS]
    assert all(a >= b - 1e-9 for a, b in itertools.pairwise(falling))
    for near in (1 - 1e-6, 1 + 1e-6):
        assert renyi_entropy(logits, near).item() == pytest.approx(renyi_entropy(logits, 1.0).item(), abs=1e-3)


def test_nearly_one_hot_is_clamped_by_the_public_code_only():
    """At V = 32,000 and alpha = 0.5 the clamp at 1e-10 makes 0.555 nats of 0.011."""
    logits = torch.zeros(1, 32000)
    logits[0, 5] = 31.15
    assert round(renyi_entropy(logits, 0.5).item(), 3) == 0.011
    clamped = renyi_entropy(logits, 0.5, clamp=1e-10).item()
    assert clamped == pytest.approx(2 * math.log(1 + 31999e-5), abs=1e-4)  # 0.32 added to a sum of 1
    assert round(clamped, 3) == 0.555
    assert renyi_entropy(logits, math.inf, clamp=1e-10).item() == pytest.approx(0, abs=1e-8)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_exact_zeros_and_large_logits_are_no_nan(alpha):
    entropies = renyi_entropy(torch.tensor([[0.0, -math.inf, 0.0], [1e4, 0.0, -1e4]]), alpha).tolist()
    assert entropies == pytest.approx([math.log(2), 0.0], abs=1e-9)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_broken_model_s_nan_stays_nan(alpha):
    """Else it would look like a model that is sure of itself, and its row like a member."""
    assert renyi_entropy(torch.tensor([[0.0, math.nan]]), alpha).isnan().all()


def test_half_precision_logits_are_summed_in_double():
    logits = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    entropies = renyi_entropy(logits, 0.5)
    assert entropies.dtype == torch.float64
    torch.testing.assert_close(entropies, renyi_entropy(logits.double(), 0.5), rtol=1e-14, atol=0)


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.nan])
def test_no_alpha(alpha):
    with pytest.raises(ValueError, match="alpha: expected a number above 0"):
        renyi_entropy(torch.zeros(1, 2), alpha)


@pytest.mark.parametrize(
    "count,percent,k",
    [(1, 10, 1), (9, 10, 1), (19, 10, 1), (20, 10, 2), (29, 10, 2), (30, 10, 3), (7, 0, 1), (7, 100, 7), (100, 29, 29)],
)
def test_k_rule(count, percent, k):
    """Below 20 positions 10 % is one position: the same as 0 %. 29 % of 100 is 29, not the 28 of 0.29 * 100."""
    values = np.random.default_rng(count).permutation(np.arange(float(count)))
    assert max_k(values, percent) == pytest.approx(np.mean(range(count - k, count)))
    assert values.tolist() != sorted(values.tolist()) or count == 1  # the input stays as it was


@pytest.mark.parametrize("values,percent", [([], 10), ([1.0], -1), ([1.0], 101)])
def test_no_positions_and_no_percentage(values, percent):
    with pytest.raises(ValueError, match="the percentage must be from 0 to 100, of at least one entropy"):
        max_k(np.array(values), percent)


def scored(alpha: float = 0.5, **slices: torch.Tensor) -> dict[str, float]:
    return MaxRenyiAttack(alpha).score(ModelOutput(ExamplePrediction(slices, torch.tensor([0])), 0.0, 0.0))


@pytest.mark.parametrize("alpha", [0.5, math.inf])
def test_scores_keep_slices_and_percentages_apart(alpha):
    """Two target positions, ln 2 and 0; one image position, ln 3. All are uniform, so alpha plays no part."""
    target = torch.tensor([[0.0, 0.0, -math.inf, -math.inf], [0.0, -math.inf, -math.inf, -math.inf]])
    scores = scored(alpha, target=target, image=torch.zeros(1, 3))
    expected = {"caption 0%": -math.log(2), "caption 10%": -math.log(2), "caption 100%": -math.log(2) / 2}
    assert scores == pytest.approx(expected | {f"image {k}%": -math.log(3) for k in (0, 10, 100)})
    assert scored(alpha, target=torch.zeros(1, 4)) == pytest.approx(
        {f"target {k}%": -math.log(4) for k in (0, 10, 100)}
    )


def test_a_sure_model_scores_higher():
    """Low entropy = member."""
    sure, unsure = (scored(target=torch.tensor([[logit, 0.0]])) for logit in (9.0, 1.0))
    assert sure["target 10%"] > unsure["target 10%"]
