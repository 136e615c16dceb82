from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from fedveil import rng, tasks
from fedveil.adapters import AllWeights, Prefix
from fedveil.config import parse
from fedveil.errors import ConfigError
from fedveil.method import Batch, PerSample, RoundContext, TensorSpec
from fedveil.privacy.plan import Neighbours, Plan
from fedveil.privacy.steps import NoisySteps
from fedveil.tasks.per_sample import draw

CTX = RoundContext(0, "a", True, bytes(32), seeded=True)


@dataclass
class Rows:
    """A client whose rows have the gradients (3, 4) and (0, 1), and whose batches hold both."""

    spec: dict = field(default_factory=lambda: {"w": TensorSpec((2,))})
    num_examples: int = 2
    batch_size: int = 2
    steps: int = 2

    def batches(self, sampling, steps, rng, skip=0):
        assert sampling == "poisson"
        return draw(sampling, self.num_examples, self.batch_size, steps, rng, skip)

    def per_sample_gradients(self, weights, batch: Batch) -> PerSample:
        return PerSample({"w": torch.tensor([[3.0, 4.0], [0.0, 1.0]])[list(batch.rows)]}, torch.zeros(len(batch.rows)))


def test_step_by_hand():
    """Clipped to norm 2: (1.2, 1.6) and (0, 1); their sum over 2 times 0.5 is (0.3, 0.65), twice."""
    start = {"w": torch.tensor([1.0, 1.0])}
    found = NoisySteps(Rows(), 2.0, 0.0, 0.5, CTX).train(start)
    assert found.weights["w"].tolist() == pytest.approx([0.4, -0.3])
    assert found.report == {"steps": 2.0}
    assert start["w"].tolist() == [1.0, 1.0]


def test_frozen_entries_stay_and_count_for_no_clipping():
    """Without its first entry (3, 4) has norm 4: clipped (0, 2); with (0, 1) a step of 0.75."""
    held = {"w": torch.tensor([True, False])}
    for noise in (0.0, 3.0):
        found = NoisySteps(Rows(), 2.0, noise, 0.5, CTX).train({"w": torch.tensor([1.0, 1.0])}, held)
        assert found.weights["w"][0] == 1.0
        assert (found.weights["w"][1] == pytest.approx(-0.5)) == (noise == 0.0)


def test_noise_has_its_standard_deviation():
    """z C eta / B = 3 * 2 * 0.5 / 2 a step and two steps: 1.5 sqrt 2. 5 standard errors of the deviation, seed fixed."""
    drawn = [
        NoisySteps(Rows(), 2.0, 3.0, 0.5, RoundContext(i, "a", True, bytes(32), seeded=True)).train(
            {"w": torch.zeros(2)}
        )
        for i in range(500)
    ]
    values = torch.stack([d.weights["w"] for d in drawn]) - torch.tensor([-0.6, -1.3])
    assert float(values.std()) == pytest.approx(1.5 * 2**0.5, rel=5 / 2000**0.5)
    assert abs(float(values.mean())) < 5 * 1.5 * 2**0.5 / 1000**0.5


def test_charges_and_refusals():
    local = NoisySteps(Rows(), 2.0, 1.1, 0.5, CTX)
    plan = Plan(3, 2, 4, 40, Neighbours.ADD_OR_REMOVE_ONE)
    assert local.spent(plan) == {("poisson", 40, 4, 1.1): 6}
    with pytest.raises(ConfigError, match="gradient"):
        local.gradient({})
    with pytest.raises(ConfigError, match="batches"):
        local.batches("poisson", 1, CTX.rng("x"))
    for name, values in (("clip", (0.0, 1.0, 0.1)), ("noise", (1.0, -1.0, 0.1)), ("learning_rate", (1.0, 1.0, 0.0))):
        with pytest.raises(ConfigError, match=name):
            NoisySteps(Rows(), *values, CTX)


@pytest.mark.parametrize("adapter", [AllWeights(), Prefix(3)], ids=["all", "prefix"])
def test_text_rows_have_gradients_of_their_own(adapter):
    """Against backpropagation through each row alone, unpadded; the mean over target tokens."""
    task = tasks.load(parse({}), adapter, "cpu")
    weights = task.initial(rng.initial(0, "w"))
    rows = task.prepare(
        [{"mr": "name[Aromi], food[Thai]", "ref": "Aromi."}, {"mr": "x", "ref": "A long one about Thai food."}]
    )
    found = task.local(rows, rng.initial(0, "b")).per_sample_gradients(weights, Batch((0, 1)))
    for i, row in enumerate(rows):
        task.put(weights)
        batch = task.collate([row])
        loss = task.loss_sum(batch) / batch.terms
        wanted = torch.autograd.grad(loss, list(task.trained.values()))
        assert float(found.losses[i]) == pytest.approx(float(loss.detach()), rel=1e-5)
        for name, g in zip(task.trained, wanted, strict=True):
            torch.testing.assert_close(found.gradients[name][i], g, rtol=1e-3, atol=2e-5)
