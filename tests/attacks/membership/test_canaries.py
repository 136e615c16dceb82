"""A canary lower bound on epsilon: below the stated epsilon, and above it if the noise is too small."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

import numpy as np
import pytest
import torch

from fedveil import rng as streams
from fedveil.adapters.prompt import PromptAdapter
from fedveil.attacks.statistics import Scores, clopper_pearson
from fedveil.contract.layout import Payload
from fedveil.contract.method import FederatedState, RoundContext
from fedveil.contract.param_spec import ParamSpec
from fedveil.contract.privacy import Adjacency, SamplingPlan
from fedveil.contract.trainer import BatchIndices, PerExampleGradients
from fedveil.privacy import accounting, gaussian_noise
from fedveil.strategies.dp_fpl import DPFPL

LENGTH, WIDTH, CANARIES, RELEASES, RUNS = 16, 64, 512, 4, 20
DELTA = 1e-5
METHOD = DPFPL(
    rank=4,
    adapter=PromptAdapter(LENGTH),
    sampling="disjoint",
    clip_global=2.0,
    noise_global=1.0,
    noise_local=300.0,
    delta=DELTA,
)


@dataclass
class Canaries:
    """Rows whose gradients are orthogonal and far longer than the bound; those that are left out have none."""

    present: np.ndarray
    num_examples: int = CANARIES
    batch_size: int = CANARIES
    steps: int = 1
    spec: ClassVar = {"prompt": ParamSpec((LENGTH, WIDTH))}

    @property
    def rows(self):
        return self

    def batches(self, sampling, steps, rng, skip=0):
        return [BatchIndices(tuple(range(CANARIES)))]

    def per_sample(self, weights, batch) -> PerExampleGradients:
        gradients = torch.zeros(CANARIES, LENGTH * WIDTH)
        gradients[torch.arange(CANARIES), torch.arange(CANARIES)] = 1e3 * torch.from_numpy(self.present).float()
        return PerExampleGradients({"prompt": gradients.reshape(-1, LENGTH, WIDTH)}, torch.zeros(CANARIES))


def canary_epsilon(
    inserted: Scores, left_out: Scores, delta: float, rng: np.random.Generator, confidence: float = 0.999
) -> float:
    """Return a lower bound on the epsilon, at `delta`, of a composition of Gaussian releases, from scores of canaries.

    Nasr et al. 2023, Tight Auditing of Differentially Private Machine Learning.

    Formal guarantees: the bound fails with probability 1 - confidence at most, where (1) each canary was in or out
    independently of the others, with noise that is independent between them (orthogonal gradients, or runs of their
    own), and (2) the audited mechanism is a Gaussian one, of full batches or disjoint ones: its trade-off curve is
    that of N(0, 1) against N(mu, 1). The bound is for the canary's relation: in against out is zero-out. The
    threshold is chosen on one random half.

        mu >= Phi^-1(TPR_low) - Phi^-1(FPR_high),  epsilon from mu and delta by dp-accounting
    """
    from dp_accounting import gaussian_mechanism

    m, n = rng.permutation(inserted), rng.permutation(left_out)
    (choose_m, test_m), (choose_n, test_n) = (m[::2], m[1::2]), (n[::2], n[1::2])
    thresholds = np.quantile(np.concatenate((choose_m, choose_n)), np.linspace(0.02, 0.98, 49))
    normal = NormalDist()

    def separation(tpr: float, fpr: float) -> float:
        return normal.inv_cdf(tpr) - normal.inv_cdf(fpr) if 0 < tpr < 1 and 0 < fpr < 1 else -math.inf

    def bounded(threshold: float, members: Scores, others: Scores) -> float:
        low = clopper_pearson(int((members > threshold).sum()), len(members), confidence)[0]
        return separation(low, clopper_pearson(int((others > threshold).sum()), len(others), confidence)[1])

    best = max(thresholds, key=lambda t: bounded(t, choose_m, choose_n))
    mu = bounded(best, test_m, test_n)
    return float(gaussian_mechanism.get_epsilon_gaussian(1 / mu, delta)) if mu > 0 else 0.0


def bound(seed: int) -> float:
    """Of one run: each release of each canary is a trial of its own."""
    generator = np.random.default_rng(seed)
    inserted, left_out = [], []
    for release in range(RELEASES):
        present = generator.random(CANARIES) < 0.5
        ctx = RoundContext(release, "a", False, streams.fresh_secret())
        down = Payload({"prompt": torch.zeros(LENGTH, WIDTH)})
        _, up = METHOD.client(FederatedState({"prompt": torch.ones(LENGTH, WIDTH)}), down, Canaries(present), ctx)
        scores = up.fields["prompt"].flatten()[:CANARIES].double().numpy()
        inserted.append(scores[present])
        left_out.append(scores[~present])
    return canary_epsilon(np.concatenate(inserted), np.concatenate(left_out), DELTA, generator)


def stated() -> float:
    """One release, one canary in or out."""
    plan = SamplingPlan(1, 1, CANARIES, CANARIES, Adjacency.REPLACE_ONE)
    return accounting.compute_epsilon(METHOD.privacy_spent(plan), DELTA, Adjacency.ZERO_OUT)


@pytest.mark.long
def test_the_bound_never_exceeds_the_stated_epsilon():
    bounds = [bound(seed) for seed in range(RUNS)]
    assert max(bounds) <= stated(), (max(bounds), stated())
    assert np.median(bounds) > 0.3 * stated(), "a bound that is always 0 would tell nothing"


@pytest.mark.long
def test_with_the_noise_halved_it_does(monkeypatch):
    real = gaussian_noise.draw_gaussian
    monkeypatch.setattr(gaussian_noise, "draw_gaussian", lambda shape, std, source: real(shape, std / 2, source))
    bounds = [bound(seed) for seed in range(RUNS)]
    assert min(bounds) > stated(), (min(bounds), stated())


@pytest.mark.parametrize("mu", [0.0, 1.0, 2.0])
def test_the_bound_holds_as_often_as_it_says(mu):
    """At 80 % confidence, so that misses are there to be counted."""
    generator = np.random.default_rng(7)
    from dp_accounting import gaussian_mechanism

    true = gaussian_mechanism.get_epsilon_gaussian(1 / mu, DELTA) if mu else 0.0
    bounds = [
        canary_epsilon(mu + generator.normal(size=400), generator.normal(size=400), DELTA, generator, 0.8)
        for _ in range(150)
    ]
    assert sum(f > true for f in bounds) <= 150 * 0.2 + 2 * math.sqrt(150 * 0.2 * 0.8)
    assert np.median(bounds) > 0.4 * true or mu == 0
