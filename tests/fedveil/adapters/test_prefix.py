from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config, LlamaConfig, LlamaForCausalLM

from fedveil import rng, tasks
from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.adapters.prefix import PrefixAdapter, prefix_shape
from fedveil.config import parse
from fedveil.errors import ConfigError
from tests.conftest import ROOT

SIZES = {"vocab_size": 19, "num_hidden_layers": 4, "hidden_size": 24, "num_attention_heads": 4}
CONFIGS = {
    "gpt2": GPT2Config(
        **SIZES, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0, n_positions=32, eos_token_id=0, bos_token_id=0
    ),
    "llama": LlamaConfig(
        **SIZES, num_key_value_heads=2, intermediate_size=40, max_position_embeddings=32, eos_token_id=0
    ),
}
IDS = torch.tensor([[5, 3, 11, 2, 7], [9, 1, 4, 8, 6]])

CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


@pytest.fixture(params=sorted(CONFIGS))
def kind(request) -> str:
    return request.param


def build(kind: str, seed: int = 3):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return AutoModelForCausalLM.from_config(CONFIGS[kind]).eval()


def prefixed(kind: str, length: int = 6, cells: int = 0):
    model = build(kind)
    trained = PrefixAdapter(length, cells).attach(model)
    trained["prefix"].data.normal_(generator=torch.Generator().manual_seed(1))
    return model, trained


def test_layout_is_that_of_the_cache(kind):
    """Keys and values that the bare model keeps of 6 tokens are a prefix: the same logits as reading these tokens
    first.
    """
    bare, read = build(kind), torch.tensor([[4, 4, 2, 17, 13, 10]])
    model, trained = prefixed(kind)
    with torch.no_grad():
        cache = DynamicCache()
        bare(read, use_cache=True, **{CACHE: cache})
        prefix = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers])
        assert prefix.shape == prefix_shape(model, 6) == trained["prefix"].shape
        trained["prefix"].copy_(prefix)
        wanted = bare(torch.cat([read, IDS[:1]], 1)).logits[:, 6:]
        torch.testing.assert_close(model(IDS[:1]).logits, wanted, rtol=1e-4, atol=1e-5)
        padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), IDS[:1]], 1)
        mask = torch.tensor([[0] * 3 + [1] * 5])
        logits = model(input_ids=padded, attention_mask=mask, use_cache=False).logits[:, 3:]
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)


def test_it_starts_as_the_keys_and_values_of_tokens_of_the_vocabulary(kind):
    model, trained = prefixed(kind)
    adapter, stream = PrefixAdapter(6), rng.initial_stream(2, "weights")
    drawn = adapter.draw({"prefix": prefix_shape(model, 6)}, stream, adapter.read(model, stream))
    again = rng.initial_stream(2, "weights")
    tokens = torch.tensor([[again.choice(SIZES["vocab_size"], 1)[0] for _ in range(6)]])
    trained["prefix"].data.copy_(drawn["prefix"])
    with torch.no_grad():
        wanted = build(kind)(torch.cat([tokens, IDS[:1]], 1)).logits[:, 6:]
        torch.testing.assert_close(model(IDS[:1]).logits, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("cells", [0, 2])
def test_a_model_is_set_back_by_little_at_first(cells):
    """By two tenths of a nat at most, where a prefix at random took nine."""
    config = parse({"task.max-tokens": 64})
    whole = tasks.load_task(config, AllWeightsAdapter(), "cpu")
    rows = whole.prepare(ROOT / "data" / "e2e", "train").rows[:32]
    whole.put(whole.initial(rng.initial_stream(0, "weights")))
    task = tasks.load_task(config, PrefixAdapter(20), "cpu")
    start = task.initial(rng.initial_stream(0, "weights"))
    task.put(start)
    assert task.mean_loss(rows) - whole.mean_loss(rows) < 0.2
    if cells:
        proxy = tasks.load_task(config, PrefixAdapter(20, cells), "cpu")
        first = proxy.initial(rng.initial_stream(0, "weights"))
        proxy.put({name: torch.zeros_like(w) for name, w in first.items()})
        again = proxy.initial(rng.initial_stream(0, "weights"))  # of the base, whatever was put in
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_is_the_greedy_loop(kind, beams):
    """Token by token from the whole sequence, without a cache between calls; and left padding changes nothing."""
    model, _ = prefixed(kind)
    given = torch.cat([torch.zeros(1, 2, dtype=torch.long), IDS[:1]], 1)
    mask = torch.tensor([[0] * 2 + [1] * 5])
    how = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        ids = IDS[:1]
        for _ in range(6):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
        generated_ids = model.generate(given, attention_mask=mask, num_beams=beams, **how)[:, 2:]
        # Without padding the library drops the mask.
        assert torch.equal(generated_ids, model.generate(IDS[:1], attention_mask=mask[:, 2:], num_beams=beams, **how))
        if beams == 1:
            assert torch.equal(generated_ids, ids)
        else:  # as probable as the greedy text, by the model without a cache
            score = lambda text: model(text).logits[:, 4:-1].log_softmax(-1).gather(2, text[:, 5:, None]).sum()  # noqa: E731
            assert score(generated_ids) >= score(ids) - 1e-4


def test_only_the_prefix_trains_without_cells(kind):
    model, trained = prefixed(kind)
    assert set(trained) == {"prefix"}
    model(IDS, labels=IDS).loss.backward()
    assert trained["prefix"].grad.ne(0).flatten(1).any(1).all()
    assert all(p.grad is None for n, p in model.named_parameters() if n != "prefix")


def test_layers_share_their_cell(kind):
    """Layers 0, 2 and 1, 3 are one each: the same parameters, an index of their own; as a bare model with copied
    layers.
    """
    model, trained = prefixed(kind, cells=2)
    layers = next(m for m in model.base_model.children() if isinstance(m, torch.nn.ModuleList))
    for one, other in ((0, 2), (1, 3)):
        pairs = list(zip(layers[one].parameters(), layers[other].parameters(), strict=True))
        assert pairs
        assert all(a is b for a, b in pairs)
    assert [
        m.layer_idx for m in model.modules() if "layer_idx" in vars(m) and type(m).__name__.endswith("Attention")
    ] == [0, 1, 2, 3]
    bare = build(kind)
    theirs = next(m for m in bare.base_model.children() if isinstance(m, torch.nn.ModuleList))
    for at in (2, 3):
        theirs[at].load_state_dict(theirs[at - 2].state_dict())
    torch.testing.assert_close(model.base_model(IDS)[0], bare.base_model(IDS)[0])
    assert len(trained) == 1 + sum(1 for n, _ in bare.named_parameters() if not any(f".{i}." in n for i in (2, 3)))
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for p in trained.values())


def test_more_cells_than_layers_are_refused(kind):
    with pytest.raises(ConfigError, match=r"adapter.cells: 5 is more than .*4 layers"):
        PrefixAdapter(3, cells=5).attach(build(kind))


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_prefix_reaches_forward_under_the_name_that_it_takes(name):
    """A forward with **kwargs accepts the other name without a word, and generates as if there were no prefix."""
    source = f"def forward(self, input_ids=None, {name}=None, **kwargs): return {name}, kwargs"
    scope: dict = {}
    exec(source, scope)
    model = build("llama")
    named = type("Named", (type(model),), {"forward": scope["forward"]})
    model.__class__ = named
    PrefixAdapter(6).attach(model)
    cache, others = model(input_ids=IDS)
    assert cache.get_seq_length() == 6
    assert not {"cache", "past_key_values"} & set(others)


def test_model_without_a_cache_is_refused():
    class NoCache(nn.Module):
        def forward(self, input_ids, **kwargs):
            return input_ids

    with pytest.raises(ConfigError, match=r"task.model: the forward of NoCache does not take a cache"):
        PrefixAdapter(6).attach(NoCache())


def test_what_does_not_go_together_is_refused():
    with pytest.raises(ConfigError, match=r"task.max-tokens: expected at most 92.* found 96"):
        tasks.load_task(parse({"task.max-tokens": 96}), PrefixAdapter(100), "cpu").initial(rng.initial_stream(0, "w"))
    for key in ("train.gradient-checkpointing", "train.compile"):
        with pytest.raises(ConfigError, match="train.gradient-checkpointing, train.compile"):
            tasks.load_task(parse({key: True}), PrefixAdapter(), "cpu")
    with pytest.raises(ConfigError, match=r"adapter.kind: .* supports LoRA pairs or all weights, found \"prefix\""):
        tasks.load_task(parse({"task.name": "image-classification"}), PrefixAdapter(), "cpu")
    with pytest.raises(ConfigError, match="train.quantized-base"):
        tasks.load_task(parse({"train.quantized-base": "4bit"}), PrefixAdapter(cells=1), "cpu")
