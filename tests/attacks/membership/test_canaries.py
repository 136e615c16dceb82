"""A lower bound on epsilon from canaries: below the stated epsilon, above it where the noise is too small for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

from fedveil import rng as streams
from fedveil.adapters.prompt import Prompt
from fedveil.attacks.statistics import canary_epsilon
from fedveil.contract.budget import Neighbours, Plan
from fedveil.contract.layout import Payload
from fedveil.contract.method import RoundContext, State
from fedveil.contract.spec import TensorSpec
from fedveil.contract.trainer import Batch, PerSample
from fedveil.privacy import accounting, noise
from fedveil.strategies.dp_fpl import DpFpl

LENGTH, WIDTH, CANARIES, RELEASES, RUNS = 16, 64, 512, 4, 20
DELTA = 1e-5
METHOD = DpFpl(
    rank=4,
    adapter=Prompt(LENGTH),
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
    spec: ClassVar = {"prompt": TensorSpec((LENGTH, WIDTH))}

    @property
    def rows(self):
        return self

    def batches(self, sampling, steps, rng, skip=0):
        return [Batch(tuple(range(CANARIES)))]

    def per_sample(self, weights, batch) -> PerSample:
        gradients = torch.zeros(CANARIES, LENGTH * WIDTH)
        gradients[torch.arange(CANARIES), torch.arange(CANARIES)] = 1e3 * torch.from_numpy(self.present).float()
        return PerSample({"prompt": gradients.reshape(-1, LENGTH, WIDTH)}, torch.zeros(CANARIES))


def bound(seed: int) -> float:
    """Of one run: each release of each canary is a trial of its own."""
    generator = np.random.default_rng(seed)
    inserted, left_out = [], []
    for release in range(RELEASES):
        present = generator.random(CANARIES) < 0.5
        ctx = RoundContext(release, "a", False, streams.fresh_secret())
        down = Payload({"prompt": torch.zeros(LENGTH, WIDTH)})
        _, up = METHOD.client(State({"prompt": torch.ones(LENGTH, WIDTH)}), down, Canaries(present), ctx)
        scores = up.fields["prompt"].flatten()[:CANARIES].double().numpy()
        inserted.append(scores[present])
        left_out.append(scores[~present])
    return canary_epsilon(np.concatenate(inserted), np.concatenate(left_out), DELTA, generator)


def stated() -> float:
    """One release, one canary in or out."""
    plan = Plan(1, 1, CANARIES, CANARIES, Neighbours.REPLACE_ONE)
    return accounting.epsilon(METHOD.privacy_spent(plan), DELTA, Neighbours.ADD_OR_REMOVE_ONE)


@pytest.mark.long
def test_the_bound_never_exceeds_the_stated_epsilon():
    found = [bound(seed) for seed in range(RUNS)]
    assert max(found) <= stated(), (max(found), stated())
    assert np.median(found) > 0.3 * stated(), "a bound that is always 0 would tell nothing"


@pytest.mark.long
def test_with_the_noise_halved_it_does(monkeypatch):
    real = noise.gaussian
    monkeypatch.setattr(noise, "gaussian", lambda shape, std, source: real(shape, std / 2, source))
    found = [bound(seed) for seed in range(RUNS)]
    assert min(found) > stated(), (min(found), stated())


@pytest.mark.parametrize("mu", [0.0, 1.0, 2.0])
def test_the_bound_holds_as_often_as_it_says(mu):
    """At 80 % confidence, so that misses are there to be counted."""
    generator = np.random.default_rng(7)
    from dp_accounting import gaussian_mechanism

    true = gaussian_mechanism.get_epsilon_gaussian(1 / mu, DELTA) if mu else 0.0
    found = [
        canary_epsilon(mu + generator.normal(size=400), generator.normal(size=400), DELTA, generator, 0.8)
        for _ in range(150)
    ]
    assert sum(f > true for f in found) <= 150 * 0.2 + 2 * math.sqrt(150 * 0.2 * 0.8)
    assert np.median(found) > 0.4 * true or mu == 0


def test_too_few_scores_bound_nothing():
    one = np.zeros(1)
    assert canary_epsilon(one, one, DELTA, np.random.default_rng(0)) == 0.0
    with pytest.raises(ValueError, match="both sides"):
        canary_epsilon(one, np.zeros(0), DELTA, np.random.default_rng(0))
