"""The learning rate over a run follows transformers' curve, and depends only on the round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import get_scheduler

from fedveil import config as run_config
from fedveil import strategies
from fedveil.adapters.lora import LoraAdapter
from fedveil.errors import ConfigError
from fedveil.rng import RandomStream
from fedveil.tasks import load_task
from fedveil.training import optimizers
from fedveil.training.lr_schedule import LearningRateSchedule
from tests.conftest import ROOT

KEY = bytes(range(32))
BASE = {"run.rounds": 4, "train.learning-rate": 2e-3}


def schedule(**keys: object) -> LearningRateSchedule:
    lr_schedule = LearningRateSchedule.from_config(
        run_config.parse(BASE | {f"train.{key}": value for key, value in keys.items()})
    )
    assert lr_schedule is not None
    return lr_schedule


def middles(name: str, warmup: int, steps: int) -> list[float]:
    """transformers' scheduler, taken two steps for each one: its rates between the two."""
    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2e-3)
    scheduler = get_scheduler(name, optimiser, 2 * warmup, 2 * steps)
    rates = []
    for _ in range(2 * steps):
        rates.append(scheduler.get_last_lr()[0])
        optimiser.step()
        scheduler.step()
    return rates[1::2]


@pytest.mark.parametrize(
    "name,theirs", [("constant", "constant_with_warmup"), ("linear", "linear"), ("cosine", "cosine")]
)
@pytest.mark.parametrize("warmup", [0.0, 0.25, 0.625])
def test_every_rate_of_a_run_is_the_librarys(name, theirs, warmup):
    if (name, warmup) == ("constant", 0.0):
        return
    own = schedule(lr_schedule=name, warmup_ratio=warmup)
    rates = [own.rate(round_, step, 6) for round_ in range(4) for step in range(6)]
    assert rates == pytest.approx(middles(theirs, round(24 * warmup), 24), rel=1e-6)
    assert min(rates) > 0


def test_sites_with_other_numbers_of_steps_are_at_the_same_place():
    own = schedule(lr_schedule="linear", warmup_ratio=0.5)
    for round_ in range(4):
        means = [sum(own.rate(round_, step, steps) for step in range(steps)) / steps for steps in (1, 2, 7, 50)]
        assert means == pytest.approx([means[0]] * 4, rel=1e-6)


def test_the_defaults_have_no_schedule():
    assert LearningRateSchedule.from_config(run_config.parse(BASE)) is None


def test_a_round_past_the_runs_is_refused():
    with pytest.raises(ConfigError, match=r"run\.rounds: expected more than 4 with train\.lr-schedule .* found 4; set"):
        schedule(lr_schedule="cosine").rate(4, 0, 1)


@pytest.mark.long
@pytest.mark.parametrize("optimiser", ["adamw", "adamw-8bit"])
def test_the_optimiser_steps_with_the_rounds_rates(monkeypatch, optimiser):
    """29 rows of 8 a batch: 4 steps. The same round again has the same rates, and ends in the same weights."""
    flat = BASE | {
        "train.batch-size": 8,
        "train.lr-schedule": "linear",
        "train.warmup-ratio": 0.25,
        "run.deterministic": True,
    }
    task = load_task(run_config.parse(flat | {"train.optimizer": optimiser}), LoraAdapter(rank=3), "cpu")
    rows = task.encode(task.examples(Path(ROOT) / "data" / "e2e", "train")[:29])
    start, used = task.initial(RandomStream(KEY)), []
    made = optimizers.create

    def create(parameters, train):
        torch_optimizer = made(parameters, train)
        step = torch_optimizer.step
        monkeypatch.setattr(
            torch_optimizer, "step", lambda: (used.append(torch_optimizer.param_groups[0]["lr"]), step()), raising=False
        )
        return torch_optimizer

    monkeypatch.setattr(optimizers, "create", create)
    trained = [task.trainer(rows, RandomStream(KEY), round_=round_).train(start).weights for round_ in (0, 2, 2)]
    expected = middles("linear", 4, 16)
    assert used == pytest.approx(expected[:4] + expected[8:12] * 2, rel=1e-6)
    assert all(torch.equal(trained[1][name], trained[2][name]) for name in start)
    assert not all(torch.equal(trained[0][name], trained[1][name]) for name in start)


@pytest.mark.parametrize(
    "flat,match",
    [
        ({"dp.clip-norm": 1.0}, r"with dp\.\*, whose noisy steps are plain SGD and clip every example; leave it out"),
        ({"method.name": "random_binary"}, "with the method random_binary, whose clients take no such steps; leave"),
        ({"method.name": "fixed_position"}, "with the method fixed_position"),
        ({"method.name": "dp_fpl"}, "with the method dp_fpl"),
    ],
)
@pytest.mark.parametrize("key,value", [("lr-schedule", "linear"), ("warmup-ratio", 0.1), ("max-grad-norm", 1.0)])
def test_what_would_be_ignored_is_refused(flat, match, key, value):
    config = run_config.parse({"method.name": "fedavg"} | flat)
    method = strategies.create_method(config.method.name)
    optimizers.check_optimizer(method, config)
    with pytest.raises(ConfigError, match=rf"train\.{key}: expected .*, found .*{match}"):
        optimizers.check_optimizer(method, run_config.parse(config.flat() | {f"train.{key}": value}))


def test_local_epochs_of_a_gradient_method_take_it():
    config = run_config.parse({"method.name": "random_binary", "train.lr-schedule": "linear"})
    optimizers.check_optimizer(strategies.create_method("random_binary", 'exchange = "epoch"'), config)
    for name in ("fedavg", "fedrand", "fedper", "fedpara", "fedqsn", "fedlpp", "fedsp", "promptfl", "fedotp", "fedpgp"):
        optimizers.check_optimizer(strategies.create_method(name), config)
