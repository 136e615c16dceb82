"""Two real ranks over gloo: what they train is what one process trains."""

import pytest
import torch

from fedveil.config import parse
from fedveil.contract.method import RoundContext
from fedveil.contract.trainer import BatchIndices
from fedveil.privacy.dp_sgd import DpSgdConfig, NoisyTrainer
from fedveil.training.unit_gradients import UnitTrainer
from tests.client_app.ranks.two import CLOSE, Pair, assert_same


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    made = Pair(tmp_path_factory.mktemp("pair"))
    yield made
    made.launched.close()


@pytest.fixture
def plain(pair):
    """The pair; its config is as before after the test."""
    before = pair.alone.config
    yield pair
    pair.alone.config = pair.both.config = before


@pytest.mark.long
@pytest.mark.parametrize(
    ("rows", "train"),
    [
        (10, {}),
        (
            9,
            {"gradient_accumulation_steps": 2, "max_steps": 0, "epochs": 2},
        ),  # a last batch of one row: rank 1 has none of it
        (1, {"max_steps": 2}),
        (10, {"max_grad_norm": 0.05}),
        (10, {"gradient_checkpointing": True}),
        (10, {"bucketing": True, "loss_mask": "all"}),
        (10, {"packing": True}),
    ],
)
def test_two_ranks_train_as_one(plain, rows, train):
    one, two = (trainer.train(plain.weights) for trainer in plain.trainers(plain.rows[:rows], **train))
    assert_same(one.weights, two.weights, plain.weights)
    assert one.looked == two.looked
    for key in ("steps", "tokens", "loss_received", "loss_trained"):
        assert two.report[key] == pytest.approx(one.report[key], rel=1e-5)


@pytest.mark.long
def test_with_frozen_entries_and_a_penalty(plain):
    frozen = {
        name: torch.rand(w.shape, generator=torch.Generator().manual_seed(1)) < 0.5 for name, w in plain.weights.items()
    }
    penalty = lambda now: 3.0 * sum((w - 1).square().sum() for w in now.values())  # noqa: E731
    one, two = (trainer.train(plain.weights, frozen, penalty) for trainer in plain.trainers(plain.rows[:10]))
    assert_same(one.weights, two.weights, plain.weights)
    for name, mask in frozen.items():
        assert torch.equal(two.weights[name][mask], plain.weights[name][mask])


@pytest.mark.long
def test_the_gradient_of_a_batch(plain):
    one, two = (trainer.gradient(plain.weights) for trainer in plain.trainers(plain.rows[:10]))
    assert_same(one.weights, two.weights)
    assert two.report["loss_received"] == pytest.approx(one.report["loss_received"])


@pytest.mark.long
@pytest.mark.parametrize("rows", [(), (3,), (0, 1, 2, 5, 7)])
def test_the_gradients_of_single_rows_each_once_and_in_order(plain, rows):
    one, two = (t.rows.per_sample(plain.weights, BatchIndices(rows)) for t in plain.trainers(plain.rows[:10]))
    assert len(two.losses) == len(rows)
    torch.testing.assert_close(one.losses, two.losses, **CLOSE)
    assert_same(one.gradients, two.gradients)


@pytest.mark.long
def test_noisy_steps_on_units_add_their_noise_once(plain):
    """Rank 0 draws the units, clips their means and adds noise; the other rank computes gradients of rows alone."""
    units = ((0, 5, 6), (1,), (2, 9), (3, 4), (7, 8))
    config = parse({"train.batch-size": 3, "train.max-steps": 2, "dp.unit-column": "patient", "dp.unit-rows": 2})
    how, ctx = DpSgdConfig(0.5, 0.05, 0.5), RoundContext(0, "s", True, bytes(32), seeded=True)
    one, two = (
        NoisyTrainer(trainer.spec, UnitTrainer(trainer, units, config).rows, how, ctx).train(plain.weights)
        for trainer in plain.trainers(plain.rows[:10])
    )
    assert_same(one.weights, two.weights, plain.weights)


@pytest.mark.long
def test_an_error_between_two_steps_leaves_the_ranks_ready_for_the_next_training(plain):
    def broken(now):
        raise ZeroDivisionError

    for trainer in plain.trainers(plain.rows[:10]):
        with pytest.raises(ZeroDivisionError):
            trainer.train(plain.weights, penalty=broken)
    one, two = (trainer.train(plain.weights) for trainer in plain.trainers(plain.rows[:10]))
    assert_same(one.weights, two.weights, plain.weights)
