"""The Hadamard adapter: its algebra, its gradients, and the models that it supports."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from fedveil import config as run_config
from fedveil import strategies
from fedveil.adapters.hadamard import HadamardLinear, HadamardLoraAdapter, weight_change
from fedveil.adapters.lora import LoraAdapter
from fedveil.contract.task import Example
from fedveil.errors import ConfigError
from fedveil.models.loaded_model import LoadedModel
from fedveil.rng import RandomStream
from fedveil.tasks import load_task
from tests.fedveil.adapters.bases import BASES, gpt2, llama

KEY = bytes(range(32))
FORMS = ("plus-one", "product")
FACTORS = ("lora_A", "lora_B", "private_A", "private_B")


def put(weights, trained) -> None:
    LoadedModel(None, None, trained, None).put(weights)


def filled(trained) -> dict[str, torch.Tensor]:
    """Weights with no zero factor, so that a factor left out shows."""
    generator = torch.Generator().manual_seed(577215)
    return {n: 0.3 * torch.randn(p.shape, generator=generator) for n, p in trained.items()}


def logits(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(2 * 9).reshape(2, 9)
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits


@pytest.mark.parametrize(
    "form,expected", [("plus-one", [[4.5, -9.0], [22.5, -63.0]]), ("product", [[3.0, -12.0], [18.0, -72.0]])]
)
def test_change_by_hand(form, expected):
    """B A = [[1, 2], [3, 6]], B_p A_p = [[2, -4], [4, -8]], scale 1.5.

    plus-one: 1.5 * [[1 * 3, 2 * -3], [3 * 5, 6 * -7]]; product: 1.5 * [[1 * 2, 2 * -4], [3 * 4, 6 * -8]].
    """
    a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0], [3.0]])
    private_a, private_b = torch.tensor([[1.0, -2.0]]), torch.tensor([[2.0], [4.0]])
    assert weight_change(a, b, private_a, private_b, form, 1.5).tolist() == expected


@pytest.mark.parametrize("form", FORMS)
def test_change_equals_a_naive_twin_and_exceeds_the_rank_of_lora(form):
    """Entry by entry, in double precision; r = 2 gives rank 4 (and one pair of rank 2 more for the "+ 1")."""
    generator = torch.Generator().manual_seed(141421)
    a, b, p, q = (torch.randn(s, generator=generator).double() for s in ((2, 9), (8, 2), (2, 9), (8, 2)))
    change = weight_change(a, b, p, q, form, 0.7)
    for i, j in itertools.product(range(8), range(9)):
        shared = sum(b[i, k] * a[k, j] for k in range(2))
        private = sum(q[i, k] * p[k, j] for k in range(2)) + (1 if form == "plus-one" else 0)
        assert change[i, j].item() == pytest.approx(0.7 * float(shared * private), rel=1e-9)
    assert int(torch.linalg.matrix_rank(change)) == (6 if form == "plus-one" else 4)


def gradients(form, private_b_std: float | None = None) -> dict[str, float]:
    """Norms of the gradients at the initial values, of one layer under a squared loss."""
    adapter = HadamardLoraAdapter(rank=4, form=form)
    layer = HadamardLinear(nn.Linear(11, 7), adapter)
    parameters = {n: p for n, p in layer.named_parameters() if not n.startswith("base_layer")}
    start = adapter.draw({f"m.{n}": tuple(p.shape) for n, p in parameters.items()}, RandomStream(KEY), {})
    if private_b_std is not None:
        start["m.private_B"] = private_b_std * torch.randn(7, 4, generator=torch.Generator().manual_seed(1))
    put(start, {f"m.{n}": p for n, p in parameters.items()})
    x = torch.randn(5, 11, generator=torch.Generator().manual_seed(2))
    layer(x).square().sum().backward()
    return {n: float(p.grad.norm()) for n, p in parameters.items()}


def test_which_gradients_are_zero_at_the_start():
    """Form "product" would never start with both B zero; in "plus-one", and in "product" as drawn, B has a gradient."""
    assert gradients("product", private_b_std=0.0) == dict.fromkeys(FACTORS, 0.0)
    for form in FORMS:
        norms = gradients(form)
        assert norms.pop("lora_B") > 0.01
        assert norms == {"lora_A": 0.0, "private_A": 0.0, "private_B": 0.0}  # B = 0: the product is flat in the others


@pytest.mark.parametrize("base", ["gpt2", "llama"])
@pytest.mark.parametrize("form", FORMS)
def test_attached_model_equals_a_dense_one(base, form):
    """The same base with the change added to its weights: GPT-2's layers are Conv1D, Llama's nn.Linear."""
    adapter = HadamardLoraAdapter(rank=3, alpha=4.5, form=form)
    model, dense = BASES[base](), BASES[base]()
    plain = logits(dense)
    trained = adapter.attach(model)
    assert torch.equal(logits(model), plain)  # all zero
    weights = filled(trained)
    put(weights, trained)
    for module in {n.rpartition(".")[0] for n in weights}:
        a, b, p, q = (weights[f"{module}.{factor}"] for factor in FACTORS)
        delta = 1.5 * (b @ a) * (q @ p + (1.0 if form == "plus-one" else 0.0))
        layer = dense.get_submodule(module)
        layer.weight.data += delta if isinstance(layer, nn.Linear) else delta.T
    torch.testing.assert_close(logits(model), logits(dense), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(model), plain, atol=1e-2)


@pytest.mark.parametrize("base", ["gpt2", "llama"])
@pytest.mark.parametrize("targets", ["all-linear", r".*\.[01]\..*(c_fc|q_proj)", r".*(attn\.c_proj|down_proj)"])
def test_same_layers_in_the_same_order_as_peft(base, targets):
    ours = HadamardLoraAdapter(rank=2, targets=targets).attach(BASES[base]())
    theirs = LoraAdapter(rank=2, targets=targets).attach(BASES[base]())
    assert [n for n in ours if ".private_" not in n] == list(theirs)
    assert {n: p.shape for n, p in ours.items() if n in theirs} == {n: p.shape for n, p in theirs.items()}
    pairs = {n.replace(".private_", ".lora_"): p.shape for n, p in ours.items() if ".private_" in n}
    assert pairs == {n: p.shape for n, p in theirs.items()}


def test_only_the_factors_train():
    model = llama()
    trained = HadamardLoraAdapter(rank=2).attach(model)
    assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in trained.values()}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    put(filled(trained), trained)
    logits(model).square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in trained.values())
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_a_head_is_left_out_and_other_modules_are_refused():
    assert not any("lm_head" in n for n in HadamardLoraAdapter(rank=2).attach(gpt2()))
    for targets, reason in (
        ("nothing", "no module name matches"),
        (r".*\.attn", r"transformer\.h\.0\.attn is not a linear layer"),
        ("(", "not a regular expression"),
    ):
        with pytest.raises(ConfigError, match=f"adapter.targets: .*{reason}"):
            HadamardLoraAdapter(targets=targets).attach(gpt2())


def test_small_private_products_count_under_autocast():
    """bf16 has no number between 1 and 1 + 2**-7: a change formed in it would be that of B_p A_p = 0."""
    layer = HadamardLinear(nn.Linear(4, 4, bias=False).to(torch.bfloat16), HadamardLoraAdapter(rank=1))
    layer.base_layer.weight.data.zero_()
    x = torch.eye(4)
    outs = []
    for private in (0.0, 2.0**-8):
        for name, value in zip(FACTORS, (1.0, 1.0 + 2.0**-8, private, 1.0), strict=True):
            getattr(layer, name).data.fill_(value)
        with torch.autocast("cpu", torch.bfloat16):
            outs.append(layer(x))
    assert outs[0].dtype == outs[1].dtype == torch.bfloat16
    assert not torch.equal(outs[0], outs[1])
    assert layer(x.to(torch.bfloat16)).dtype == torch.bfloat16  # without autocast: the factors stay fp32


def make(adapter: HadamardLoraAdapter, **keys):
    flat = {key.replace("__", ".").replace("_", "-"): value for key, value in keys.items()}
    return load_task(run_config.parse({"run.deterministic": True, "train.batch-size": 4, **flat}), adapter, "cpu")


ROWS = Example.from_columns(
    {"mr": f"name[The {n}]", "ref": f"The {n} is by the river."} for n in ("Mill", "Vaults", "Rose", "Star")
)


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("quantised", ["none", "4bit"])
def test_a_task_trains_it(form, quantised):
    """Three steps lower the loss; a second pass moves all four factors. A quantised base is allowed: it is frozen."""
    task = make(
        HadamardLoraAdapter(rank=4, form=form),
        train__epochs=3,
        train__learning_rate=2e-2,
        train__quantized_base=quantised,
    )
    start = task.initial(RandomStream(KEY))
    assert list(start) == list(task.spec)
    result = task.trainer(task.encode(ROWS), RandomStream(KEY)).train(start)
    assert task.evaluate(result.weights, ROWS, False)["loss"] < task.evaluate(start, ROWS, False)["loss"]
    assert all(not torch.equal(result.weights[n], start[n]) for n in start)


def test_initial_shared_pair_is_that_of_lora_s_kind():
    """A uniform within 1/sqrt(d_in), B zero; the order of the shapes changes nothing."""
    adapter = HadamardLoraAdapter(rank=5)
    shapes = {name: tensor.shape for name, tensor in adapter.example_spec().items()}
    drawn = adapter.draw(shapes, RandomStream(KEY), {})
    turned = adapter.draw(dict(reversed(shapes.items())), RandomStream(KEY), {})
    assert all(torch.equal(drawn[n], turned[n]) for n in shapes)
    for name, value in drawn.items():
        bound = value.shape[1] ** -0.5
        assert not value.any() if name.endswith("_B") else 0.5 * bound < value.abs().max() <= bound


def test_fields_are_checked_as_lora_s_are():
    with pytest.raises(ConfigError, match="adapter.rank"):
        HadamardLoraAdapter(rank=0)
    with pytest.raises(ConfigError, match="adapter.alpha"):
        HadamardLoraAdapter(alpha=-1.0)
    assert HadamardLoraAdapter(rank=8, alpha=2.0).scale == 0.25
    assert (HadamardLoraAdapter(rank=16).private_b_std, HadamardLoraAdapter(rank=16, form="product").private_b_std) == (
        0.0,
        0.25,
    )


@pytest.mark.parametrize("kind", [LoraAdapter, HadamardLoraAdapter])
def test_each_name_of_a_list_is_a_layer_s(kind):
    """A typo in one of two names would train the other alone; an embedding has no pair."""
    method = strategies.create_method("fedavg", 'adapter = {targets = ["c_attn", "c_proj", "attn.c_attn"]}')
    assert kind(targets=method.adapter.targets).attach(gpt2())
    for names, said in (
        ('["c_attn", "c_pro"]', 'no linear layer is named "c_pro"; did you mean c_proj.*named c_attn, c_fc, c_proj'),
        ('["c_attn", "c.proj"]', 'no linear layer is named "c.proj"'),
        ('["wte"]', "transformer.wte is not a linear layer"),
    ):
        targets = strategies.create_method("fedavg", f"adapter = {{targets = {names}}}").adapter.targets
        with pytest.raises(ConfigError, match=f"adapter.targets: .*{said}"):
            kind(targets=targets).attach(gpt2())
    assert kind(targets=r"(.*\.)?(c_(attn|pro)|c_fc)").attach(gpt2())  # a regular expression of the user's own
    with pytest.raises(ConfigError, match="adapter.targets: .*not a regular expression"):
        kind(targets="(").attach(gpt2())
