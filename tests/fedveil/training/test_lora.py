"""LoRA's scale and dropout agree with PEFT's; dropout is repeatable and applies only in training steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config

from fedveil import config as run_config
from fedveil import strategies
from fedveil.adapters.lora import LoraAdapter
from fedveil.errors import ConfigError
from fedveil.rng import RandomStream
from fedveil.tasks import load_task
from fedveil.tasks.text_generation import TextGeneration
from fedveil.training import optimizers
from tests.conftest import ROOT

KEY = bytes(range(32))
DROPPING = LoraAdapter(rank=3, alpha=6.0, dropout=0.4)


def model() -> torch.nn.Module:
    config = GPT2Config(vocab_size=19, n_layer=2, n_embd=8, n_head=2, n_positions=64, eos_token_id=0, bos_token_id=0)
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def fill(parameters) -> None:
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for p in parameters:
            p.normal_(generator=generator)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("rslora,scale", [(False, 1.5), (True, 3.0)])
def test_a_model_computes_as_pefts_own_and_as_with_the_product_added(rslora, scale):
    """alpha = 6, rank 4: 6 / 4 and 6 / 2."""
    adapter = LoraAdapter(rank=4, alpha=6.0, rslora=rslora)
    assert adapter.scale == scale
    ours, merged, ids = model(), model(), torch.arange(12).view(2, 6)
    trained = adapter.attach(ours)
    fill(trained.values())
    asked = LoraConfig(r=4, lora_alpha=6.0, use_rslora=rslora, target_modules="all-linear", fan_in_fan_out=True)
    theirs = get_peft_model(model(), asked).eval()
    fill(p for p in theirs.parameters() if p.requires_grad)
    with torch.no_grad():
        for name in {name.rpartition(".")[0] for name in trained}:
            product = trained[f"{name}.lora_B"] @ trained[f"{name}.lora_A"]
            merged.get_submodule(name).weight += adapter.scale * product.T
        got, plain = ours(input_ids=ids).logits, model()(input_ids=ids).logits
        assert torch.equal(got, theirs(input_ids=ids).logits)
        torch.testing.assert_close(got, merged(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(got, plain, atol=0.1)


@pytest.mark.parametrize(
    "fields,match",
    [
        ({"rslora": True}, "adapter.alpha: rslora = true requires it; set it"),
        ({"dropout": 1.0}, "adapter.dropout: expected a number from 0 to below 1, found 1.0"),
        ({"dropout": -0.1}, "adapter.dropout"),
        ({"dropout": float("nan")}, "adapter.dropout"),
        ({"rank": 0, "dropout": 0.5}, "adapter.rank"),
    ],
)
def test_fields_are_checked(fields, match):
    with pytest.raises(ConfigError, match=match):
        LoraAdapter(**fields)


@pytest.fixture(scope="module")
def task() -> TextGeneration:
    text_task = load_task(run_config.parse({}), DROPPING, "cpu")
    assert isinstance(text_task, TextGeneration)
    return text_task


@pytest.fixture
def trained(task, monkeypatch):
    rows = task.encode(task.examples(Path(ROOT) / "data" / "e2e", "train")[:12])
    generator = torch.Generator().manual_seed(271828)
    start = {n: 0.05 * torch.randn(s.shape, generator=generator) for n, s in task.spec.items()}

    def train(key=KEY, adapter=DROPPING, times=1, **keys):
        flat = {"train.batch-size": 4, "run.deterministic": True} | {f"train.{k}": v for k, v in keys.items()}
        monkeypatch.setattr(task, "config", run_config.parse(flat))
        monkeypatch.setattr(task, "adapter", adapter)
        local = task.trainer(rows, RandomStream(key))
        return [local.train(start) for _ in range(times)][-1]

    return train


def same(one, other) -> bool:
    return all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)


@pytest.mark.long
def test_a_deterministic_turn_repeats_and_another_drops_other_entries(trained, monkeypatch):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = trained()
    assert torch.equal(torch.get_rng_state(), before)  # no other random draws change
    torch.manual_seed(2)
    assert same(first, trained())
    plain = trained(adapter=replace(DROPPING, dropout=0.0))
    assert not same(first, plain)
    assert first.report["loss_received"] == plain.report["loss_received"]  # scoring drops nothing
    assert first.report["loss_trained"] != plain.report["loss_trained"]
    monkeypatch.setattr("fedveil.rng.RandomStream.split", lambda self, purpose: RandomStream(bytes(32)))
    assert not same(first, trained())  # in the same batches


@pytest.mark.long
def test_a_second_training_of_the_turn_drops_other_entries(task, trained, monkeypatch):
    monkeypatch.setattr("fedveil.data.batches.epoch_order", lambda rows, *_: list(range(len(rows))))
    assert not same(trained(times=1), trained(times=2))


@pytest.mark.long
def test_recomputed_layers_drop_the_same_entries_twice(trained):
    assert same(trained(), trained(gradient_checkpointing=True))


def test_dropout_is_off_after_a_training_also_one_that_an_error_ended(task, trained, monkeypatch):
    trained()
    dropouts = [m for m in task.base.model.modules() if isinstance(m, torch.nn.Dropout) and m.p == 0.4]
    assert dropouts
    seen = []

    def fail(batch):
        if torch.is_grad_enabled():
            seen.extend(m.training for m in dropouts)
            raise MemoryError
        return honest(batch)

    honest = task.loss_sum
    monkeypatch.setattr(task, "loss_sum", fail)
    with pytest.raises(MemoryError):
        trained()
    assert all(seen)
    assert not any(m.training for m in task.base.model.modules())


def test_noisy_steps_with_dropout_are_refused():
    config = run_config.parse({"method.name": "fedavg", "dp.clip-norm": 1.0})
    optimizers.check_optimizer(strategies.create_method("fedavg", "adapter = {rslora = true, alpha = 4.0}"), config)
    with pytest.raises(ConfigError, match=r"adapter\.dropout: dp\.\* computes .* leave it out"):
        optimizers.check_optimizer(strategies.create_method("fedavg", "adapter = {dropout = 0.1}"), config)
