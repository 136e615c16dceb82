"""Properties that every adapter has, and the fields of LoRA."""

from __future__ import annotations

import typing

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from fedveil import rng
from fedveil.adapters.adapter_types import AnyAdapter
from fedveil.adapters.lora import LoraAdapter
from fedveil.adapters.prefix import PrefixAdapter
from fedveil.adapters.prompt import PromptAdapter
from fedveil.contract.adapter import Mount
from fedveil.errors import ConfigError

KINDS = [
    *(cls() for cls in typing.get_args(AnyAdapter)),
    PrefixAdapter(3, cells=1),
    PromptAdapter(5, form="factored", rank=2),
]


@pytest.fixture(params=KINDS, ids=lambda adapter: f"{adapter.kind} {adapter.trains_base}")
def adapter(request):
    return request.param


def shapes_of(adapter):
    return {name: tensor.shape for name, tensor in adapter.example_spec().items()}


def test_every_kind_has_a_name_and_a_mount():
    assert len({cls().kind for cls in typing.get_args(AnyAdapter)}) == len(typing.get_args(AnyAdapter))
    assert {adapter.mount for adapter in KINDS} == set(typing.get_args(Mount))


def test_a_draw_follows_the_stream_and_not_the_order_of_the_names(adapter):
    shapes = shapes_of(adapter)
    base = {name: torch.randn(shape) for name, shape in shapes.items() if name != "prefix" and adapter.trains_base}
    drawn = adapter.draw(shapes, rng.initial_stream(0, "w"), base)
    assert {name: tuple(w.shape) for name, w in drawn.items()} == shapes
    assert list(drawn) == list(shapes)
    turned = adapter.draw(dict(reversed(shapes.items())), rng.initial_stream(0, "w"), base)
    assert all(torch.equal(drawn[name], turned[name]) for name in shapes)
    other = adapter.draw(shapes, rng.initial_stream(1, "w"), base)
    own = [name for name in shapes if not any(torch.equal(drawn[name], w) for w in base.values())]
    assert any(not torch.equal(drawn[name], other[name]) for name in own) or adapter.kind == "all"


def test_what_trains_the_base_starts_from_copies_of_its_tensors(adapter):
    if not adapter.trains_base:
        return
    shapes = shapes_of(adapter)
    base = {name: torch.full(shape, 0.25) for name, shape in shapes.items() if name != "prefix"}
    drawn = adapter.draw(shapes, rng.initial_stream(0, "w"), base)
    taken = [name for name in base if torch.equal(drawn[name], base[name])]
    assert taken == list(base)
    drawn[taken[0]].zero_()
    assert base[taken[0]].eq(0.25).all()


def test_only_what_is_attached_asks_for_gradients(adapter):
    config = GPT2Config(
        vocab_size=19, n_layer=2, n_embd=8, n_head=2, n_positions=64, eos_token_id=0, bos_token_id=0
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if adapter.mount == "texts":
        with pytest.raises(ConfigError, match='found "prompt"; kind "prompt" requires a CLIP model'):
            adapter.attach(model)
        return
    trained = adapter.attach(model)
    assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in trained.values()}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert (len(trained) < sum(1 for _ in model.parameters())) == (not adapter.trains_base)


@pytest.mark.parametrize(
    "fields,match",
    [({"rank": 0}, "adapter.rank"), ({"alpha": 0.0}, "adapter.alpha"), ({"alpha": float("nan")}, "adapter.alpha")],
)
def test_adapter_fields_are_checked(fields, match):
    with pytest.raises(ConfigError, match=match):
        LoraAdapter(**fields)


def test_scale_is_alpha_over_rank():
    assert LoraAdapter(rank=8).scale == 1.0
    assert LoraAdapter(rank=8, alpha=2.0).scale == 0.25
