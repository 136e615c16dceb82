"""LoRA with a residual: its algebra, its gradients, and training on a bundled base."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedveil import config as run_config
from fedveil import rng
from fedveil.adapters.lora import LoraAdapter
from fedveil.adapters.residual_lora import RESIDUAL, ResidualLinear, ResidualLoraAdapter, factor_names, residual_names
from fedveil.contract.method import AcceptedUpload, RoundContext
from fedveil.contract.param_spec import movable_names
from fedveil.contract.task import Example
from fedveil.errors import ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.models.planning import memory as planned_memory
from fedveil.models.planning import meta_model as planned_base
from fedveil.models.planning.model_config import ModelConfig
from fedveil.privacy.dp_sgd import DpSgdConfig, NoisyTrainer
from fedveil.strategies.fedex_lora import FedExLoRA
from fedveil.tasks import load_task
from tests.fedveil.adapters.bases import BASES

ROWS = Example.from_columns(
    {"mr": f"name[Aromi {i}], food[Thai]", "ref": f"Aromi {i} has Thai food."} for i in range(8)
)
CTX = RoundContext(0, "a", True, bytes(32))


def task_of(adapter, **keys):
    flat = {"run.deterministic": True, "train.max-steps": 3, "train.batch-size": 2, **keys}
    return load_task(run_config.parse(flat), adapter, "cpu")


def test_a_layer_by_hand():
    """x = [1, 2]: W x = 1 * 1 + 1 * 2 = 3, R x = 4 * 1 - 1 * 2 = 2, B A x = 3 * (1 * 1 + 0 * 2) = 3, scale 2: 13."""
    layer = ResidualLinear(nn.Linear(2, 1, bias=False), ResidualLoraAdapter(rank=1, alpha=2.0))
    for name, value in (("base_layer.weight", [[1.0, 1.0]]), ("residual", [[4.0, -1.0]]), ("lora_A", [[1.0, 0.0]])):
        layer.get_parameter(name).data = torch.tensor(value)
    layer.lora_B.data = torch.tensor([[3.0]])
    out = layer(torch.tensor([[1.0, 2.0]]))
    assert out.tolist() == [[13.0]]
    out.sum().backward()
    assert layer.residual.grad is None
    assert layer.lora_A.grad.tolist() == [[6.0, 12.0]]


@pytest.mark.long
@pytest.mark.parametrize("base", sorted(BASES))
def test_without_a_residual_it_is_lora_and_only_the_pairs_ask_for_gradients(base):
    from tests.fedveil.adapters.test_export import logits, root

    model_logits, names = [], set()
    for adapter in (LoraAdapter(rank=2), ResidualLoraAdapter(rank=2)):
        model = BASES[base]()
        trained = adapter.attach(root(model).requires_grad_(True))
        shapes = {name: tuple(p.shape) for name, p in trained.items()}
        weights = adapter.draw(
            {n: s for n, s in shapes.items() if not n.endswith(RESIDUAL)}, rng.initial_stream(0, "w"), {}
        )
        for name, w in weights.items():
            trained[name].data = torch.randn(w.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1
        if adapter.kind == "residual-lora":
            asked = {id(p) for p in root(model).parameters() if p.requires_grad}
            assert asked == {id(p) for p in factor_names(trained).values()}
            assert set(factor_names(trained)) == names
            for name, p in residual_names(trained).items():
                module = name.removesuffix(RESIDUAL)
                assert p.shape == (trained[f"{module}.lora_B"].shape[0], trained[f"{module}.lora_A"].shape[1])
        names = set(trained)
        model.eval()
        with torch.no_grad():
            model_logits.append(logits(model))
    torch.testing.assert_close(model_logits[0], model_logits[1], rtol=1e-4, atol=1e-4)


def test_the_spec_says_what_is_fixed_and_a_training_leaves_it_as_it_is():
    task = task_of(ResidualLoraAdapter(rank=2))
    assert set(movable_names(task.spec)) == set(factor_names(task.spec))
    rows, start = task.encode(ROWS), dict(task.initial(rng.initial_stream(0, "w")))
    generator = torch.Generator().manual_seed(3)
    start |= {name: 0.01 * torch.randn(w.shape, generator=generator) for name, w in residual_names(start).items()}
    trained = task.trainer(rows, rng.initial_stream(0, "t")).train(start).weights
    for name, w in trained.items():
        assert torch.equal(w, start[name]) == name.endswith(RESIDUAL), name


@pytest.mark.long
def test_single_rows_have_no_gradient_of_it_and_noisy_steps_leave_it():
    """The gradients of the pairs are those of LoRA, where the residual is zero."""
    task, plain = task_of(ResidualLoraAdapter(rank=2)), task_of(LoraAdapter(rank=2))
    rows, start = task.encode(ROWS), dict(task.initial(rng.initial_stream(0, "w")))
    drawn = task.trainer(rows, rng.initial_stream(0, "t")).rows
    batch = drawn.batches("fixed", 1, rng.initial_stream(0, "b"))[0]
    gradients = drawn.per_sample(start, batch).gradients
    assert set(gradients) == set(factor_names(task.spec))
    theirs = plain.trainer(rows, rng.initial_stream(0, "t")).rows.per_sample(factor_names(start), batch).gradients
    for name, g in theirs.items():
        torch.testing.assert_close(gradients[name], g, rtol=1e-3, atol=1e-5)
    noisy = NoisyTrainer(task.spec, drawn, DpSgdConfig(1.0, 1.0, 0.1), CTX)
    after = noisy.train(start, {name: torch.tensor(True) for name in residual_names(start)}).weights
    for name, w in after.items():
        assert torch.equal(w, start[name]) == name.endswith(RESIDUAL), name


@pytest.mark.long
def test_a_round_on_a_real_model_scores_as_the_mean_of_the_two_models():
    """Two sites train; the server's model gives the logits of a base that has the mean of the two changes in it."""
    method = FedExLoRA(adapter=ResidualLoraAdapter(rank=2, alpha=4.0))
    task = task_of(method.adapter, **{"train.learning-rate": 0.05})
    exchange, rows = MessageExchange(method, "fedex_lora", task.spec), task.encode(ROWS)
    server = method.init(task.spec, task.initial(rng.initial_stream(0, "w")), rng.initial_stream(0, "m"))
    uploads, changes = [], dict.fromkeys(residual_names(task.spec), 0.0)
    for site, part in (("a", rows[:5]), ("b", rows[5:])):
        ctx = RoundContext(0, site, True, bytes(32))
        trainer = task.trainer(part, rng.initial_stream(0, site))
        _, parts = exchange.participate(exchange.broadcast(server, ctx), None, trainer, ctx)
        sent = exchange.receive(b"".join(parts), 0)
        uploads.append(AcceptedUpload(sent.payload, sent.num_examples, ctx))
        for name in changes:
            m = name.removesuffix(RESIDUAL)
            product = sent.payload.fields[f"{m}.lora_B"] @ sent.payload.fields[f"{m}.lora_A"]
            changes[name] = changes[name] + len(part) / len(rows) * product
    new = exchange.aggregate(server, uploads)
    served = method.models(new)["server"]
    assert any(bool(r.any()) for r in residual_names(served).values())
    mean = {n: torch.zeros(t.shape) for n, t in task.spec.items()} | changes
    without = {**served, **{name: torch.zeros_like(r) for name, r in residual_names(served).items()}}
    scored = task.trainer(rows, rng.initial_stream(0, "s"))
    served_loss, wanted, apart = (scored.mean_loss(w, rows) for w in (served, mean, without))
    assert served_loss == pytest.approx(wanted, rel=1e-5)
    assert abs(apart - wanted) > 10 * abs(served_loss - wanted)


@pytest.mark.long
def test_a_plan_has_its_residual_in_memory_and_no_states_for_it():
    values = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    settings, config = (
        ModelConfig("gpt2", values),
        run_config.parse({"task.max-tokens": 16, "train.gradient-accumulation-steps": 2}),
    )
    spec = planned_base.param_specs(settings, ResidualLoraAdapter(rank=2))
    assert {name for name, t in spec.items() if t.fixed} == set(residual_names(spec))
    dense = 4 * sum(t.shape[0] * t.shape[1] for t in residual_names(spec).values())
    ours, theirs = (
        {
            part.name: part.nbytes
            for part in planned_memory.plan_memory(settings, config, adapter, False).phases["training"]
        }
        for adapter in (ResidualLoraAdapter(rank=2), LoraAdapter(rank=2))
    )
    assert ours["adapter, fp32"] - theirs["adapter, fp32"] == dense
    assert ours["gradients of the trained weights"] == theirs["gradients of the trained weights"]
    assert ours["states of adamw"] == theirs["states of adamw"]


def test_its_fields_are_checked():
    with pytest.raises(ConfigError, match=r"adapter\.rank"):
        ResidualLoraAdapter(rank=0)
    assert ResidualLoraAdapter(rank=4, alpha=2.0).scale == 0.5
