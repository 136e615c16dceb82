"""Text generation on the bundled base and a generated Llama: loss, adapter and training, with values by hand."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil import config as run_config
from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.adapters.lora import LoraAdapter
from fedveil.adapters.prompt import PromptAdapter
from fedveil.contract.method import TRAINING_FIELDS
from fedveil.contract.task import DatasetShard, Example, ExampleOrigin
from fedveil.data.prompt_template import SEPARATOR
from fedveil.errors import ConfigError, TaskError
from fedveil.models import bundled, library_logging
from fedveil.privacy.guarantee_source import check_guarantee
from fedveil.rng import RandomStream
from fedveil.strategies.fedavg import FedAvg
from fedveil.tasks import load_task
from fedveil.tasks.text_generation import TextGeneration

ROOT = Path(__file__).parents[3]
DATA = ROOT / "data" / "e2e"
KEY = bytes(range(32))


def make(adapter: LoraAdapter | AllWeightsAdapter = LoraAdapter(rank=3, alpha=6.0), **keys: object) -> TextGeneration:
    flat = {key.replace("__", ".").replace("_", "-"): value for key, value in keys.items()}
    task = load_task(run_config.parse(flat), adapter, "cpu")
    assert isinstance(task, TextGeneration)
    return task


@pytest.fixture(scope="module")
def task() -> TextGeneration:
    return make(train__batch_size=4, train__max_steps=3, train__learning_rate=2e-3, evaluate__max_new_tokens=12)


@pytest.fixture(scope="module")
def rows(task) -> list[dict[str, str]]:
    return list(task.examples(DATA, "train"))[:24]


def randomised(task: TextGeneration) -> dict[str, torch.Tensor]:
    """Weights with no zero factor, so that a factor left out shows."""
    generator = torch.Generator().manual_seed(577215)
    return {n: 0.1 * torch.randn(s.shape, generator=generator) for n, s in task.spec.items()}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A Llama of two layers whose tokenizer puts a begin token, saved as a user would."""
    from tokenizers import processors
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    tokenizer = make().base.tokenizer
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(), library_logging.quiet_libraries():
        torch.manual_seed(1)
        LlamaForCausalLM(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def test_the_spec_names_both_factors_of_every_linear_layer(task):
    block = {"attn.c_attn": (160, 480), "attn.c_proj": (160, 160), "mlp.c_fc": (160, 640), "mlp.c_proj": (640, 160)}
    expected = {}
    for layer in range(4):
        for module, (d_in, d_out) in block.items():
            expected[f"transformer.h.{layer}.{module}.lora_A"] = (3, d_in)
            expected[f"transformer.h.{layer}.{module}.lora_B"] = (d_out, 3)
    assert {name: spec.shape for name, spec in task.spec.items()} == expected
    assert {spec.dtype for spec in task.spec.values()} == {torch.float32}


def test_targets_choose_layers_by_regular_expression():
    assert {n.split(".")[2] for n in make(LoraAdapter(targets=r".*\.h\.[13]\.attn\.c_attn")).spec} == {"1", "3"}
    with pytest.raises(ConfigError, match=r'adapter.targets: "nothing"'):
        _ = make(LoraAdapter(targets="nothing")).spec


def test_initial_factors_start_the_model_at_its_base(task):
    weights = task.initial(RandomStream(KEY))
    for name, w in weights.items():
        if name.endswith(".lora_B"):
            assert not w.any()
        else:
            bound = 1 / math.sqrt(w.shape[1])
            assert 0.9 * bound < float(w.abs().max()) <= bound
    again = task.initial(RandomStream(KEY))
    other = task.initial(RandomStream(bytes(32)))
    name = "transformer.h.0.mlp.c_fc.lora_A"
    assert torch.equal(weights[name], again[name])
    assert not torch.equal(weights[name], other[name])
    assert list(weights) == list(task.spec)


def test_lora_is_the_base_plus_scale_b_a(task, rows):
    """Against a plain GPT-2 whose matrices were changed by hand: W (stored d_in x d_out) += scale (B A)^T."""
    from transformers import GPT2LMHeadModel

    weights = randomised(task)
    with library_logging.quiet_libraries():
        plain = GPT2LMHeadModel.from_pretrained(bundled.bundled_folder("text-generation"), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, w in weights.items():
            if name.endswith(".lora_A"):
                module = name.removesuffix(".lora_A")
                plain.get_submodule(module).weight += 2.0 * (weights[f"{module}.lora_B"] @ w).T
    task.base.put(weights)
    ids = torch.tensor([task.base.tokenizer.encode(rows[0].values["ref"])])
    with torch.no_grad():
        difference = task.base.model(input_ids=ids).logits - plain(input_ids=ids).logits
    assert float(difference.abs().max()) < 2e-4


def plain_loss(task: TextGeneration, source: str, target: str) -> tuple[float, int]:
    """The library's own loss of one row, by its own labels: (mean, target tokens)."""
    tokenizer = task.base.tokenizer
    prompt = tokenizer.encode(source + SEPARATOR, add_special_tokens=False)
    answer = [*tokenizer.encode(target, add_special_tokens=False), tokenizer.eos_token_id]
    ids, labels = torch.tensor([prompt + answer]), torch.tensor([[-100] * len(prompt) + answer])
    with torch.no_grad():
        logits = task.base.model(input_ids=ids).logits
    loss = task.base.model.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1])
    return float(loss), len(answer)


def test_the_loss_is_the_librarys_mean_over_target_tokens(task, rows):
    weights = randomised(task)
    got = task.evaluate(weights, rows[:9], generate=False)
    each = [plain_loss(task, row.values["mr"], row.values["ref"]) for row in rows[:9]]
    assert set(got) == {"loss"}
    assert got["loss"] == pytest.approx(sum(mean * n for mean, n in each) / sum(n for _, n in each), rel=1e-5)


def test_training_steps_as_a_plain_loop_does(task, rows):
    """The naive twin: the same batches one row at a time, AdamW of torch."""
    start = task.initial(RandomStream(KEY))
    start_copy = {name: w.clone() for name, w in start.items()}
    local = task.trainer(task.encode(rows), RandomStream(KEY))
    result = local.train(start)
    assert all(torch.equal(start[name], start_copy[name]) for name in start_copy)
    assert set(result.report) == TRAINING_FIELDS
    assert (result.report["steps"], local.num_examples) == (3, 24)

    order = torch.randperm(24, generator=RandomStream(KEY).torch_generator()).tolist()
    task.base.put(start)
    optimiser = torch.optim.AdamW(list(task.base.trained.values()), lr=2e-3, weight_decay=1e-6)
    losses, tokens = [], 0
    for i in (0, 4, 8):
        encoded = list(task.encode([rows[j] for j in order[i : i + 4]]))
        sums = []
        for row in encoded:
            logits = task.base.model(input_ids=torch.tensor([row.ids])).logits[0, row.start - 1 : -1]
            sums.append(torch.nn.functional.cross_entropy(logits, torch.tensor(row.ids[row.start :]), reduction="sum"))
        loss = sum(sums) / sum(len(row.ids) - row.start for row in encoded)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        tokens += sum(len(row.ids) for row in encoded)
    optimiser.zero_grad()
    assert result.report["loss_trained"] == pytest.approx(sum(losses) / 3, rel=1e-4)
    assert result.report["tokens"] == tokens
    name = "transformer.h.3.mlp.c_proj.lora_B"  # its first gradients are no rounding noise
    assert torch.allclose(result.weights[name], task.base.trained[name], atol=2e-4)
    assert float(result.weights[name].abs().max()) > 2e-3
    assert result.report["loss_received"] == pytest.approx(task.evaluate(start, rows, False)["loss"], rel=1e-5)


def test_every_row_comes_once_an_epoch_and_max_steps_caps(rows):
    task = make(train__batch_size=5, train__epochs=2, train__max_steps=7)
    numbered = Example.from_columns({"mr": str(i), "ref": str(i)} for i in range(13))
    batches = list(task.trainer(task.encode(numbered), RandomStream(KEY))._batches())
    assert [len(b) for b in batches] == [5, 5, 3, 5, 5, 3]
    first = [tuple(row.ids) for batch in batches[:3] for row in batch]
    second = [tuple(row.ids) for batch in batches[3:] for row in batch]
    assert sorted(first) == sorted(second)
    assert len(set(first)) == 13
    assert first != second
    capped = make(train__batch_size=5, train__epochs=2, train__max_steps=4)
    assert len(list(capped.trainer(task.encode(numbered), RandomStream(KEY))._batches())) == 4


@pytest.mark.parametrize("adapter", [LoraAdapter(), AllWeightsAdapter()])
def test_no_step_returns_the_weights_bit_for_bit(adapter, rows):
    task = make(adapter, train__epochs=0)
    weights = {n: w + 0.125 for n, w in task.initial(RandomStream(KEY)).items()}
    result = task.trainer(task.encode(rows), RandomStream(KEY)).train(weights)
    assert all(torch.equal(result.weights[n], weights[n]) for n in task.spec)
    assert all(result.weights[n].data_ptr() != weights[n].data_ptr() for n in task.spec)
    assert result.report["steps"] == 0
    assert result.report["loss_trained"] == result.report["loss_received"]


@pytest.mark.long
def test_all_weights_train_and_the_base_values_survive(rows):
    task = make(AllWeightsAdapter(), train__batch_size=8, train__learning_rate=1e-3)
    base = task.initial(RandomStream(KEY))
    assert "transformer.wte.weight" in base
    assert "lm_head.weight" not in base  # tied
    result = task.trainer(task.encode(rows), RandomStream(KEY)).train(base)
    assert all(not torch.equal(result.weights[n], base[n]) for n in base)
    assert task.evaluate(result.weights, rows, False)["loss"] < task.evaluate(base, rows, False)["loss"]
    again = task.initial(RandomStream(bytes(32)))
    assert all(torch.equal(again[n], base[n]) for n in base)


@pytest.mark.long
def test_a_few_steps_teach_the_mapping():
    task = make(
        LoraAdapter(),
        train__max_steps=25,
        train__learning_rate=3e-3,
        evaluate__eval_examples=8,
        evaluate__max_new_tokens=32,
    )
    start = task.initial(RandomStream(KEY))
    test = task.examples(DATA, "test")
    trained = task.trainer(task.encode(task.examples(DATA, "train")), RandomStream(KEY)).train(start)
    before, after = task.evaluate(start, test, True), task.evaluate(trained.weights, test, True)
    assert set(after) == {"loss", "bleu", "rouge_l", "nist", "meteor", "cider"}
    assert after["loss"] < before["loss"] - 0.15
    assert after["bleu"] > 1.5 * before["bleu"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("transformer.h.2.mlp.c_fc.lora_B"), "the tensor transformer.h.2.mlp.c_fc.lora_B is missing"),
        (lambda w: w.update(extra=torch.zeros(1)), "extra is not a tensor of the spec"),
        (
            lambda w: w.update({"transformer.h.0.attn.c_attn.lora_A": torch.zeros(2, 160)}),
            r"lora_A of shape \(3, 160\), found \(2, 160\)",
        ),
    ],
)
def test_weights_are_taken_strictly(task, rows, change, message):
    weights = dict(task.initial(RandomStream(KEY)))
    change(weights)
    for use in (task.trainer(task.encode(rows), RandomStream(KEY)).train, lambda w: task.evaluate(w, rows, False)):
        with pytest.raises(TaskError, match=message):
            use(weights)


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=40).filter(str.strip), st.text(max_size=40).filter(str.strip), st.integers(8, 40))
def test_a_row_fits_and_its_source_gives_way_first(source, target, limit):
    task = _unlimited()
    task.config = run_config.parse({"task.max-tokens": limit})
    tokenizer = task.base.tokenizer
    (row,) = task.encode(Example.from_columns([{"mr": source, "ref": target}]))
    answer = [*tokenizer.encode(target, add_special_tokens=False), tokenizer.eos_token_id]
    whole = tokenizer.encode(source, add_special_tokens=False)
    separator = tokenizer.encode(SEPARATOR, add_special_tokens=False)
    num_answer_tokens = min(len(answer), limit - 1)
    assert len(row.ids) <= limit
    assert row.ids[row.start :] == answer[:num_answer_tokens]
    assert row.ids[: row.start] == whole[: limit - 1 - num_answer_tokens] + separator


_CACHE: list[TextGeneration] = []


def _unlimited() -> TextGeneration:
    if not _CACHE:
        _CACHE.append(make())
    return _CACHE[0]


def test_generation_does_not_depend_on_the_batch(task):
    """Left padding must be invisible: one at a time gives the same texts."""
    sources = [row.values["mr"] for row in task.examples(DATA, "test")[:40:8]]
    weights = task.initial(RandomStream(KEY))
    together = task.generate(weights, sources)
    assert together == [task.generate(weights, [source])[0] for source in sources]
    assert any(together)
    beams = make(LoraAdapter(rank=3, alpha=6.0), evaluate__num_beams=3, evaluate__max_new_tokens=12)
    assert len(beams.generate(weights, sources)) == 5


def test_references_are_grouped_by_source():
    task = make(evaluate__eval_examples=2)
    rows = Example.from_columns(
        {"mr": m, "ref": r} for m, r in (("a", "1"), ("b", "2"), ("a", "3"), ("c", "4"), ("b", "5"))
    )
    # One of each half of the sources a, b and c, drawn from run.seed.
    assert task._references(rows) == {"a": ["1", "3"], "c": ["4"]}
    assert make(evaluate__eval_examples=3)._references(rows) == {"a": ["1", "3"], "b": ["2", "5"], "c": ["4"]}


def test_a_llama_from_a_folder_goes_the_same_way(llama, rows):
    task = make(LoraAdapter(rank=2), task__model=str(llama), train__max_steps=2, train__learning_rate=1e-2)
    modules = {n.split("layers.0.")[1] for n in task.spec if "layers.0." in n}
    linear = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    linear += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert modules == {f"{m}.lora_{side}" for m in linear for side in "AB"}
    assert not any("lm_head" in n for n in task.spec)
    assert task.encode(Example.from_columns([{"mr": "x", "ref": "y"}]))[0].ids[0] == task.base.tokenizer.bos_token_id
    start = task.initial(RandomStream(KEY))
    result = task.trainer(task.encode(rows), RandomStream(KEY)).train(start)
    assert task.evaluate(result.weights, rows, False)["loss"] < task.evaluate(start, rows, False)["loss"]
    assert len(task.generate(start, ["name[X]", "name[The Mill], area[riverside]"])) == 2


@pytest.mark.long
@pytest.mark.parametrize("quantised", ["4bit", "8bit"])
def test_a_quantised_base_trains_its_factors(quantised, rows):
    task = make(LoraAdapter(rank=2), train__quantized_base=quantised, train__max_steps=2, train__learning_rate=5e-3)
    kinds = {type(m).__name__ for m in task.base.model.modules()}
    assert "Linear4bit" in kinds or "Linear8bitLt" in kinds
    start = task.initial(RandomStream(KEY))
    assert list(task.spec) == list(make(LoraAdapter(rank=2)).spec)
    result = task.trainer(task.encode(rows), RandomStream(KEY)).train(start)
    assert task.evaluate(result.weights, rows, False)["loss"] < task.evaluate(start, rows, False)["loss"]
    with pytest.raises(ConfigError, match='train.quantized-base: an adapter of kind "all"'):
        make(AllWeightsAdapter(), train__quantized_base=quantised)


@pytest.mark.long
def test_bf16_computes_coarsely_and_keeps_fp32_weights(task, rows):
    coarse = make(LoraAdapter(rank=3, alpha=6.0), train__precision="bf16", train__max_steps=2)
    assert {p.dtype for p in coarse.base.trained.values()} == {torch.float32}
    weights = randomised(task)
    exact = task.evaluate(weights, rows, False)["loss"]
    rounded = coarse.evaluate(weights, rows, False)["loss"]
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.02)
    assert coarse.trainer(task.encode(rows), RandomStream(KEY)).train(weights).report["steps"] == 2


_SCRIPT = """
import hashlib, sys, torch
from pathlib import Path
from fedveil import config, rng, tasks
from fedveil.adapters.lora import LoraAdapter
torch.set_num_threads(1)
task = tasks.load_task(config.parse({"train.max-steps": 4}), LoraAdapter(), "cpu")
local = task.trainer(task.encode(task.examples(Path(sys.argv[1]), "train")[:40]), rng.RandomStream(bytes(range(32))))
trained = local.train(task.initial(rng.RandomStream(bytes(range(32)))))
print(hashlib.sha256(b"".join(trained.weights[n].numpy().tobytes() for n in sorted(trained.weights))).hexdigest())
"""


@pytest.mark.long
def test_two_processes_train_bit_identically():
    command = [sys.executable, "-c", _SCRIPT, str(DATA)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stderr == ""  # and no library talks
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        task = make(LoraAdapter(), train__max_steps=4)
        local = task.trainer(task.encode(task.examples(DATA, "train")[:40]), RandomStream(KEY))
        weights = local.train(task.initial(RandomStream(KEY))).weights
    finally:
        torch.set_num_threads(threads)
    here = hashlib.sha256(b"".join(weights[n].numpy().tobytes() for n in sorted(weights))).hexdigest()
    assert done.stdout.strip() == here


def test_examples_of_a_share_are_capped_by_seed():
    task = make(task__examples_per_site=50, run__seed=4)
    parts = [list(task.examples(DATA, "train", DatasetShard(i, 3))) for i in range(3)]
    assert [len(p) for p in parts] == [50, 50, 50]
    assert parts[0] == list(make(task__examples_per_site=50, run__seed=4).examples(DATA, "train", DatasetShard(0, 3)))
    assert parts[0] != list(make(task__examples_per_site=50, run__seed=5).examples(DATA, "train", DatasetShard(0, 3)))
    assert set(parts[0][0].values) == {"mr", "ref"}
    assert len(task.examples(DATA, "test")) > 1000


def test_parquet_and_single_files_read_as_folders_do(task, tmp_path):
    from datasets import Dataset

    expected = list(task.examples(DATA, "test"))
    Dataset.from_list([row.values for row in expected]).to_parquet(tmp_path / "test.parquet")
    file = tmp_path / "test.parquet"
    parquet = [Example(row.values, ExampleOrigin(str(file), i + 1), str(tmp_path)) for i, row in enumerate(expected)]
    assert list(task.examples(tmp_path, "test")) == parquet
    assert list(task.examples(tmp_path / "test.parquet", "anything")) == parquet
    assert list(task.examples(DATA / "test.jsonl", "train")) == expected
    assert {p.name for p in tmp_path.iterdir()} == {"test.parquet"}


def test_text_that_looks_like_a_date_stays_text(task, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"mr": "2020-01-01", "ref": "2020-01-01T00:00:00"}\n')
    (row,) = task.examples(tmp_path, "train")
    assert (row.values["mr"], row.values["ref"]) == ("2020-01-01", "2020-01-01T00:00:00")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("dev.jsonl", "", r'expected a file of the split "train" in .* found dev.jsonl'),
        ("train.jsonl", "", "there are no rows in"),
        ("train.jsonl", '{"mr": "a", "text": "b"}', 'expected column "ref" in .* found mr, text'),
        ("train.jsonl", '{"mr": "a", "ref": "b"}\n{"mr": ', "line 2 of .* is not JSON"),
        ("train.jsonl", "[1]", "expected an object in row 1"),
        ("train.jsonl", '{"mr": {"a": 1}, "ref": "b"}\n{"mr": "x", "ref": "b"}', "in row 2, but objects before it"),
        ("train.parquet", "no parquet", "as Parquet"),
    ],
)
def test_bad_data_is_refused_with_the_next_step(task, tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(TaskError, match=message) as caught:
        task.examples(tmp_path, "train")
    assert "\n" not in str(caught.value)


def test_a_data_path_that_is_not_there_is_named(task, tmp_path):
    with pytest.raises(TaskError, match=f'no folder or file of rows at "{tmp_path}/nowhere"'):
        task.examples(tmp_path / "nowhere", "train")
    with pytest.raises(TaskError, match='text in column "ref" of every row, found no value'):
        task.trainer(task.encode(Example.from_columns([{"mr": "a", "ref": None}])), RandomStream(KEY)).train(
            task.initial(RandomStream(KEY))
        )
    with pytest.raises(TaskError, match="there are no examples to train on"):
        task.trainer([], RandomStream(KEY))


def test_a_base_that_is_not_there_or_not_whole_is_refused(tmp_path, llama):
    from safetensors.torch import load_file, save_file

    with pytest.raises(TaskError, match=f'task.model: there is no folder with a model at "{tmp_path}/gone"'):
        make(task__model=f"{tmp_path}/gone")
    with pytest.raises(TaskError, match="config.json"):
        make(task__model=str(tmp_path))
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(llama / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TaskError, match=r"lacks the weights model.layers.1.mlp.up_proj.weight"):
        _ = make(task__model=str(tmp_path)).spec
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(TaskError, match="cannot load .* as a causal language model") as caught:
        _ = make(task__model=str(tmp_path)).spec
    assert "\n" not in str(caught.value)


def test_a_sequence_longer_than_the_context_is_refused():
    with pytest.raises(ConfigError, match="task.max-tokens: expected at most 192"):
        make(task__max_tokens=193)  # by its config.json: no model is loaded for that
    task = make(evaluate__max_new_tokens=192)
    with pytest.raises(ConfigError, match="evaluate.max-new-tokens: expected less than 192"):
        task.generate(task.initial(RandomStream(KEY)), ["name[X]"])
    scored = {"evaluate__max_new_tokens": 192, "task__evaluation": "/data"}
    with pytest.raises(ConfigError, match="less than 192, the context, found 192; lower"):
        make(**scored)
    assert make(**scored, evaluate__generate="never").config.evaluate.max_new_tokens == 192


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match='device: expected "auto"'):
        load_task(run_config.parse({}), LoraAdapter(), "tpu")


def test_generation_stops_at_each_end_token_and_the_export_names_all(llama, tmp_path, monkeypatch):
    """Gemma's kind: the turn's end is not the tokenizer's end token, and the base has a further one."""
    import json
    import shutil

    from transformers import AutoTokenizer, GenerationConfig

    folder = tmp_path / "base"
    shutil.copytree(llama, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    turn, other = (tokenizer.convert_tokens_to_ids(piece) for piece in ("~", "^"))
    tokenizer.add_special_tokens({"extra_special_tokens": ["~"]})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}~\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [other], "do_sample": True}))
    task = make(LoraAdapter(rank=2), task__model=str(folder), task__chat_template=True, task__max_tokens=60)
    assert task.end_tokens == (tokenizer.eos_token_id, other, turn)
    (row,) = task.encode([Example({"mr": "a", "ref": "b"})])
    assert task.base.tokenizer.decode(row.ids) == "user: a~\nassistant: b~"
    written: list[int] = []

    def forced(input_ids, **given):
        from types import SimpleNamespace

        assert given["generation_config"].eos_token_id == list(task.end_tokens)
        new = torch.tensor([written])
        logits = [torch.zeros(1, len(tokenizer))] * len(written)
        return SimpleNamespace(sequences=torch.cat([input_ids, new], 1), logits=logits)

    weights, letters = task.initial(RandomStream(KEY)), tokenizer.encode("xyz", add_special_tokens=False)
    monkeypatch.setattr(task.base.model, "generate", forced)
    for end in task.end_tokens:
        written[:] = [*letters, end, tokenizer.eos_token_id]
        assert task.generate(weights, ["a"]) == ["xyz"]
        assert len(next(iter(task.predict(weights, [row], generate=True))).logits["generated"]) == len(letters) + 1
    task.save(weights, tmp_path)
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == list(task.end_tokens)
    assert not GenerationConfig.from_pretrained(tmp_path).do_sample
    for wrong, found in ((True, "True"), (10**6, "1000000"), ([-1], "-1")):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
        with pytest.raises(
            TaskError,
            match=f"eos_token_id in generation_config.json of .* must be from 0 to .*, found {found}; correct",
        ):
            make(LoraAdapter(rank=2), task__model=str(folder)).base  # noqa: B018
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(TaskError, match="cannot read generation_config.json"):
        make(LoraAdapter(rank=2), task__model=str(folder)).base  # noqa: B018


EMPTY = [
    {"mr": "a", "ref": "b"}, {"mr": " \n", "ref": "c"}, {"mr": "d", "ref": ""}, {"mr": None, "ref": "e"},
    {"mr": "f", "ref": "g"},
]  # fmt: skip


def test_an_empty_text_is_refused_as_null_is(task, tmp_path):
    for at, found in ((1, "an empty text"), (2, "an empty text"), (3, r"no value \(null\)")):
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (EMPTY[0], EMPTY[at])))
        with pytest.raises(TaskError, match=rf"found {found} in row 2 of .*; .* task.empty-texts = \"drop\""):
            task.prepare(tmp_path, "train")


def test_rows_without_a_text_are_left_out_and_counted(tmp_path, caplog):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in EMPTY))
    task, shelf = make(task__empty_texts="drop"), tmp_path / "shelf"
    shelf.mkdir(mode=0o700)
    said = 'task.empty-texts = "drop": 3 of 5 rows of the split "{}" are dropped'
    for _ in range(2):  # also where another run has prepared the rows before
        caplog.clear()
        prepared = task.prepare(tmp_path, "train", None, shelf)
        assert prepared.dropped == 3
        assert [origin.row for origin in prepared.origins()] == [1, 5]
        assert len(prepared.rows) == 2
        assert said.format("train") in caplog.text
    assert [example.values["ref"] for example in task.examples(tmp_path, "test")] == ["b", "g"]
    assert said.format("test") in caplog.text
    (tmp_path / "train.jsonl").write_text(json.dumps(EMPTY[1]) + "\n")
    with pytest.raises(TaskError, match="none of the 1 rows of the split"):
        task.prepare(tmp_path, "train")


def test_tasks_and_claims_that_cannot_leave_rows_out_refuse_it():
    config = run_config.parse({"task.empty-texts": "drop", "dp.clip-norm": 1.0, "dp.noise-multiplier": 1.0})
    with pytest.raises(ConfigError, match='task.empty-texts: with "drop"'):
        check_guarantee(FedAvg(), config, has_row_gradients=True)
    with pytest.raises(ConfigError, match='task.empty-texts: the task "vision-language" does not support "drop"'):
        load_task(run_config.parse({"task.empty-texts": "drop", "task.name": "vision-language"}), LoraAdapter(), "cpu")


@pytest.mark.parametrize(
    ("task", "key"),
    [
        ("text-generation", "hint"), ("text-classification", "choices"),
        ("image-classification", "rejected"), ("clip-prompt", "hint"), ("preference", "choices"),
        ("vision-language", "rejected"),
    ],
)  # fmt: skip
def test_a_column_that_only_another_task_reads_is_refused(task, key):
    adapter = PromptAdapter() if task == "clip-prompt" else LoraAdapter()
    settings = run_config.parse({"task.name": task, f"task.{key}-column": "extra"})
    with pytest.raises(ConfigError, match=f'task.{key}-column: the task "{task}" reads no'):
        load_task(settings, adapter, "cpu")


def test_the_scored_sources_are_spread_and_one_instruction_does_not_evade_the_bound():
    """The first rows of a sorted file are of one kind; one instruction stands before all targets."""
    rows = Example.from_columns({"mr": f"{kind} {i}", "ref": kind} for kind in "abcd" for i in range(50))
    task = make(evaluate__eval_examples=8)
    chosen = task._references(rows)
    assert sorted(chosen.values()) == [[kind] for kind in "abcd" for _ in range(2)]
    assert task._references(rows) == chosen == make(evaluate__eval_examples=8)._references(rows)
    assert make(evaluate__eval_examples=8, run__seed=1)._references(rows) != chosen
    one = Example.from_columns({"mr": "summarize", "ref": str(i)} for i in range(500))
    (targets,) = make(evaluate__eval_examples=120)._references(one).values()
    assert len(targets) == len(set(targets)) == 120
    assert targets == sorted(targets, key=int)
    assert int(targets[0]) < 5 < 495 < int(targets[-1]) + 5
    (targets,) = make(evaluate__eval_examples=8)._references(one).values()
    assert len(targets) == 50


def test_short_answers_are_scored_by_exact_match():
    task = make(evaluate__eval_examples=4, evaluate__max_new_tokens=2)
    start = task.initial(RandomStream(KEY))
    short = Example.from_columns({"mr": f"name[{i}]", "ref": "yes"} for i in range(4))
    assert sorted(task.evaluate(start, short, True)) == ["exact_match", "loss", "rouge_l"]
    long = Example.from_columns({"mr": f"name[{i}]", "ref": "a pub by the river"} for i in range(4))
    assert sorted(task.evaluate(start, long, True)) == ["bleu", "cider", "loss", "meteor", "nist", "rouge_l"]
    wrong = make(evaluate__metric="bleu", evaluate__eval_examples=4, evaluate__max_new_tokens=2)
    wrong.base = task.base
    with pytest.raises(
        TaskError,
        match='"bleu" does not tell .*, because most of the 4 scored sources have answers of at most 1 words',
    ):
        wrong.evaluate(start, short, True)


def test_a_source_of_several_columns_is_the_text_that_the_template_gives(tmp_path, caplog):
    rows = [
        {"instruction": "Add.", "input": "1", "ref": "b"}, {"instruction": "Say.", "input": "", "ref": "c"},
        {"instruction": None, "input": "", "ref": "d"}, {"instruction": "Go.", "input": "2.50", "ref": "e"},
    ]  # fmt: skip
    joined = [{"mr": "Add.\n1", "ref": "b"}, {"mr": "Say.", "ref": "c"}, {"mr": "Go.\n2.50", "ref": "e"}]
    for name, content in (("several", rows), ("one", joined)):
        (tmp_path / name).mkdir()
        for split in ("train", "test"):
            (tmp_path / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    several, one = make(task__source_template="{instruction}\n{input}", task__empty_texts="drop"), make()
    prepared, wanted = (task.prepare(tmp_path / name, "train") for task, name in ((several, "several"), (one, "one")))
    assert list(prepared.rows) == list(wanted.rows)
    assert prepared.dropped == 1
    weights = randomised(one)
    scored = [
        task.evaluate(weights, task.examples(tmp_path / name, "test"), generate=False)
        for task, name in ((several, "several"), (one, "one"))
    ]
    assert scored[0] == scored[1]
    with pytest.raises(
        TaskError, match=r'at least one of the columns "instruction", "input" of every row, found no va'
    ):
        make(task__source_template="{instruction}\n{input}").prepare(tmp_path / "several", "train")
    with pytest.raises(TaskError, match='expected column "inputs"'):
        make(task__source_template="{instruction}\n{inputs}").prepare(tmp_path / "several", "train")


def test_a_template_is_refused_where_it_would_not_be_read():
    with pytest.raises(ConfigError, match=r'task\.source-template: the task "vision-language" does not support it'):
        load_task(
            run_config.parse({"task.source-template": "{a}", "task.name": "vision-language"}), LoraAdapter(), "cpu"
        )
    with pytest.raises(ConfigError, match=r'task\.source-column: "b" has no effect with task\.source-template'):
        make(task__source_template="{a}", task__source_column="b")
