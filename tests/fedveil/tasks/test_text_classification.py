"""Text classification on small bases: the loss compared with transformers', new heads, labels, scores, bad input."""

from __future__ import annotations

import logging
import re
import shutil

import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Value
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BartConfig, XLNetConfig

from fedveil import rng
from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.adapters.lora import LoraAdapter
from fedveil.adapters.prefix import PrefixAdapter
from fedveil.adapters.prompt import PromptAdapter
from fedveil.contract.task import DatasetShard, Example
from fedveil.errors import ConfigError, TaskError
from fedveil.models import library_logging
from tests.fedveil.tasks import small_classifiers as small
from tests.fedveil.tasks.small_classifiers import NAMES, draw_rows, filled, make_task, save_base, save_rows

KINDS = ("bert", "llama")


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Both kinds, without a head, and with one for three classes."""
    root = tmp_path_factory.mktemp("bases")
    for kind in KINDS:
        save_base(root / kind, kind)
        save_base(root / f"{kind}-head", kind, NAMES)
    return root


def stream(purpose: str = "weights", seed: int = 0) -> rng.RandomStream:
    return rng.initial_stream(seed, purpose)


def head_of(task) -> dict[str, torch.Tensor]:
    """The frozen tensors of the head, or all of it, by their names in the plain model."""
    named = {n.replace(".base_layer.", "."): p for n, p in task.base.model.named_parameters() if "lora" not in n}
    return {n: p.detach().clone() for n, p in named.items() if n.startswith(task.base.heads)}


def encode(task, rows):
    return task.encode(Example.from_columns(rows))


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_the_original_model(bases, kind):
    """With transformers' own model, tokenizer, padding and loss: texts of different lengths in one batch."""
    folder = bases / f"{kind}-head"
    task, rows = make_task(task__model=str(folder)), draw_rows(12)
    assert len({row["note"].count(" ") for row in rows}) > 2
    with library_logging.quiet_libraries():
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        plain = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        inputs = tokenizer([row["note"] for row in rows], padding=True, return_tensors="pt")
    labels = torch.tensor([NAMES.index(row["ward"]) for row in rows])
    wanted = plain(**inputs, labels=labels).loss.item()
    task.show(task.initial(stream()))
    encoded = encode(task, rows)
    assert task.mean_loss(encoded) == pytest.approx(wanted, rel=1e-5)
    assert task.mean_loss(encode(task, [row | {"ward": "bone"} for row in rows])) != pytest.approx(wanted, rel=1e-2)
    assert task.base.is_causal == (kind == "llama")
    assert (task.collate(encoded).types is not None) == (kind == "bert")


@pytest.mark.parametrize("kind", KINDS)
def test_training_lowers_the_loss_and_raises_the_scores(bases, tmp_path, kind):
    keys = {"train__epochs": 8, "train__learning_rate": 5e-3, "train__batch_size": 4}
    task = make_task(task__model=str(bases / kind), **keys)
    data = save_rows(save_rows(tmp_path, draw_rows(60)), draw_rows(40, seed=1), "test")
    before, test = task.initial(stream()), task.examples(data, "test")
    rows = task.encode(task.examples(data, "train"))
    after = task.trainer(rows, stream("batches")).train(before).weights
    first, last = (task.evaluate(weights, test, False) for weights in (before, after))
    assert list(first) == ["loss", "accuracy", "macro_f1", "auroc"]
    assert last["loss"] < 0.7 * first["loss"]
    assert min(last["accuracy"], last["macro_f1"], last["auroc"]) > 0.7


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapter", [LoraAdapter(rank=2), AllWeightsAdapter()], ids=["lora", "all"])
def test_a_new_head_is_the_same_at_every_site_of_a_run_and_another_in_another_run(bases, kind, adapter):
    one, two, other = (make_task(adapter, task__model=str(bases / kind), run__seed=seed) for seed in (3, 3, 4))
    torch.manual_seed(len(kind))  # the generator that the library would draw from
    first, again, third = head_of(one), head_of(two), head_of(other)
    assert first.keys() >= ({"score.weight"} if kind == "llama" else {"classifier.weight", "classifier.bias"})
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert all(not torch.equal(first[n], third[n]) for n in first if not n.endswith("bias"))
    (weight,) = (w for n, w in first.items() if n in ("score.weight", "classifier.weight"))
    assert 0.2 < float(weight.std()) < 0.4  # initializer_range
    assert all(torch.equal(w, torch.zeros_like(w)) for n, w in first.items() if n.endswith("bias"))
    if kind == "bert":  # the masked language model has no pooler either
        assert "bert.pooler.dense.weight" in first
        assert one.base.heads == ("classifier", "bert.pooler")
    starts = [task.initial(stream()) for task in (one, two)]
    assert all(torch.equal(starts[0][n], starts[1][n]) for n in one.spec)


def test_a_head_of_other_classes_is_replaced_and_the_log_says_so(bases, caplog):
    folder = bases / "bert-head"
    own = load_file(folder / "model.safetensors")["classifier.weight"]
    with caplog.at_level(logging.WARNING, "fedveil.models"):
        assert torch.equal(head_of(make_task(task__model=str(folder)))["classifier.weight"], own)
        assert not caplog.messages
        for names in ("x,y,z", "heart,lung"):
            task = make_task(task__model=str(folder), task__class_names=names)
            found = head_of(task)["classifier.weight"]
            assert found.shape[0] == names.count(",") + 1
            assert not torch.equal(found, own[: len(found)])
            assert "its head is replaced" in caplog.messages.pop()


def test_the_order_of_the_bases_own_classes_is_required(bases):
    with pytest.raises(
        TaskError, match='task.class-names: expected the class names in the order of .*"heart,lung,bone"'
    ):
        make_task(task__model=str(bases / "bert-head"), task__class_names="bone,heart,lung").base  # noqa: B018


def test_a_base_that_lacks_more_than_its_head_is_refused(bases, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(bases / "bert", folder)
    file = folder / "model.safetensors"
    kept = {n: w for n, w in load_file(file).items() if "layer.1.output.dense.weight" not in n}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(TaskError, match="apart from its head, but .* lacks bert.encoder.layer.1.output.dense.weight"):
        make_task(task__model=str(folder)).base  # noqa: B018


@pytest.mark.parametrize(
    "config, words",
    [
        (XLNetConfig(vocab_size=len(small.WORDS), d_model=16, n_layer=1, n_head=2, d_inner=16), "depend on padding"),
        (
            BartConfig(vocab_size=len(small.WORDS), d_model=16, encoder_layers=1, decoder_layers=1,
                       encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16),
            "is an encoder-decoder",
        ),
    ],
    ids=["xlnet", "bart"],
)  # fmt: skip
def test_bases_that_read_texts_in_another_way_are_refused(tmp_path, config, words):
    with library_logging.quiet_libraries():
        AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    small.save_tokenizer(tmp_path, encoder=True)
    with pytest.raises(TaskError, match=words):
        make_task(task__model=str(tmp_path)).base  # noqa: B018


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_do_not_depend_on_the_batch(bases, kind):
    rows = draw_rows(9)
    few, many = (make_task(task__model=str(bases / kind), train__batch_size=size) for size in (1, 16))
    weights = filled(few)
    alone, together = (list(task.predict(weights, encode(task, rows))) for task in (few, many))
    for a, b, row in zip(alone, together, rows, strict=True):
        torch.testing.assert_close(a.logits["target"], b.logits["target"], rtol=1e-4, atol=1e-5)
        assert a.logits["target"].shape == (1, 3)
        assert a.wanted.tolist() == [NAMES.index(row["ward"])]
    losses = [float(torch.nn.functional.cross_entropy(p.logits["target"], p.wanted)) for p in together]
    many.show(weights)
    assert many.mean_loss(encode(many, rows)) == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_texts_that_are_cut_are_counted(bases, caplog):
    task = make_task(task__model=str(bases / "bert"), task__max_tokens=8)
    rows = [{"note": "cough " * n, "ward": "lung"} for n in (5, 6, 7, 20)]
    with caplog.at_level(logging.WARNING, "fedveil.data"):
        encoded = encode(task, rows)
    sep = small.WORDS.index("[SEP]")
    assert [len(row.ids) for row in encoded] == [7, 8, 8, 8]
    assert all(row.ids[-1] == sep for row in encoded)
    assert caplog.messages == [
        "task.max-tokens = 8: 2 of 4 (50.0 %) texts lose their end; raise it, to at most 24 (22 tokens keep 95 % whole)"
    ]
    with pytest.raises(ConfigError, match="task.max-tokens: expected at most 24, .* found 25"):
        make_task(task__model=str(bases / "bert"), task__max_tokens=25).base  # noqa: B018


@pytest.mark.parametrize(
    "value, names, wanted",
    [
        ("lung", "heart,lung,bone", 1),
        (" lung ", "heart,lung,bone", 1),
        (2, "heart,lung,bone", 2),
        (3, "heart,lung,bone", None),
        (-1, "heart,lung,bone", None),
        (True, "heart,lung,bone", None),
        (1.0, "heart,lung,bone", None),
        (None, "heart,lung,bone", None),
        ("", "heart,lung,bone", None),
        ("Lung", "heart,lung,bone", None),
        ("1", "heart,lung,bone", 1),
        ("10", "heart,lung,bone", None),
        (["lung"], "heart,lung,bone", None),
        (10, "2,10,1", 1),  # names that are integers: a value is a name, not a number
        ("2", "2,10,1", 0),
        (0, "2,10,1", None),
        (True, "false,true", 1),
    ],
)
def test_a_class_is_a_name_or_the_number_of_one(bases, value, names, wanted):
    task = make_task(task__model=str(bases / "bert"), task__class_names=names)
    row = {"note": "cough", "ward": value}
    if wanted is None:
        words = f'expected a class, of the {names.count(",") + 1} names .* in column "ward"'
        with pytest.raises(TaskError, match=words) as error:
            encode(task, [row])
        assert re.search(r"found (an?|true|no) .* in a row with note, ward", str(error.value))
    else:
        assert encode(task, [row])[0].label == wanted


def test_numbers_with_stored_names_are_those_names(bases, tmp_path):
    """A Parquet file numbers its classes in an own order: the run's order counts."""
    features = Features({"note": Value("string"), "ward": ClassLabel(names=["bone", "heart", "lung"])})
    rows = [{"note": "cough", "ward": 2}, {"note": "swelling", "ward": 0}]
    Dataset.from_list(rows, features=features).to_parquet(str(tmp_path / "train.parquet"))
    task = make_task(task__model=str(bases / "bert"))
    assert [row.label for row in task.encode(task.examples(tmp_path, "train"))] == [1, 2]
    other = make_task(task__model=str(bases / "bert"), task__class_names="bone,heart")
    words = r"among the 2 of the run \(bone, heart\), found 3 \(bone, heart, lung\); the unknown ones are lung"
    examples = other.examples(tmp_path, "train")
    for refusing in (other.require_shared_classes, lambda: other.encode(examples)):
        with pytest.raises(TaskError, match=words):
            refusing()


@pytest.mark.parametrize("value", [None, "", "  ", ["cough"], float("nan")])
def test_a_row_without_text_is_refused_by_file_and_row(bases, tmp_path, value):
    task = make_task(task__model=str(bases / "bert"))
    with pytest.raises(TaskError, match='expected text in column "note" of every row, found .* in a row with'):
        encode(task, [{"note": value, "ward": "lung"}])


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"task__class_names": ""}, "task.class-names: expected at least two class names, .* found 0"),
        ({"task__class_names": "one"}, "found 1"),
        ({"task__class_names": "a,b, a"}, "none of them empty or repeated"),
        ({"train__packing": True}, "train.packing"),
        ({"task__chat_template": True}, "task.chat-template"),
        ({"train__loss_mask": "all"}, "train.loss-mask"),
    ],
)
def test_settings_that_do_not_fit_are_refused(bases, keys, words):
    with pytest.raises(ConfigError, match=words):
        make_task(task__model=str(bases / "bert"), **keys)


@pytest.mark.parametrize("adapter", [PromptAdapter(), PrefixAdapter()], ids=["prompt", "prefix"])
def test_prompts_and_prefixes_are_refused_with_the_reason(adapter):
    with pytest.raises(ConfigError, match='the task "text-classification" supports LoRA pairs or all weights'):
        make_task(adapter)


def test_a_part_of_a_shared_folder(bases, tmp_path):
    task = make_task(task__model=str(bases / "bert"), task__partition="pathological", task__classes_per_site=1)
    data = save_rows(tmp_path, draw_rows(30))
    parts = [task.examples(data, "train", DatasetShard(i, 3)) for i in range(3)]
    assert sum(map(len, parts)) == 30
    assert all(len({example.values["ward"] for example in part}) == 1 for part in parts)


def test_a_sorted_file_is_scored_by_a_spread_choice(bases, caplog):
    rows = sorted(draw_rows(120), key=lambda row: row["ward"])
    task = make_task(task__model=str(bases / "bert"), evaluate__eval_examples=30)
    scores = task.evaluate(task.initial(stream()), Example.from_columns(rows), False)
    assert "auroc" in scores  # the first 30 are of one class
    again = make_task(task__model=str(bases / "bert"), evaluate__eval_examples=30)
    assert again.evaluate(again.initial(stream()), Example.from_columns(rows), False) == scores
    with caplog.at_level(logging.WARNING, "fedveil.data"):
        few = task.evaluate(task.initial(stream()), Example.from_columns(rows[:30]), False)
    assert sorted(few) == ["accuracy", "loss", "macro_f1"]
    (said,) = caplog.messages
    assert said.startswith("task.evaluation: no auroc of 30 scored examples")
    choosing = make_task(task__model=str(bases / "bert"), evaluate__metric="auroc")
    with pytest.raises(TaskError, match="evaluate.metric: auroc of 30 scored examples"):
        choosing.evaluate(choosing.initial(stream()), Example.from_columns(rows[:30]), False)
    with pytest.raises(TaskError, match="there are none to score"):
        task.evaluate(task.initial(stream()), [], False)


SEVERAL = {"task__multi_label": True}


@pytest.mark.parametrize(
    "value, names, wanted",
    [
        ("lung", NAMES, (0, 1, 0)),
        ("heart|bone", NAMES, (1, 0, 1)),
        (" heart | bone |", NAMES, (1, 0, 1)),
        ("", NAMES, (0, 0, 0)),
        ([], NAMES, (0, 0, 0)),
        (["bone", "heart", "bone"], NAMES, (1, 0, 1)),
        ([2, 0], NAMES, (1, 0, 1)),
        (1, NAMES, (0, 1, 0)),
        ("1|3", ("1", "2", "3"), (1, 0, 1)),
        (None, NAMES, None),
        ("heart|skin", NAMES, None),
        ("heart,bone", NAMES, None),
        (["heart", None], NAMES, None),
        ([3], NAMES, None),
        ([True], NAMES, None),
    ],
)
def test_several_labels_are_a_list_or_separated_names(bases, value, names, wanted):
    task = make_task(task__model=str(bases / "bert"), task__class_names=",".join(names), **SEVERAL)
    row = {"note": "cough", "ward": value}
    if wanted is None:
        with pytest.raises(TaskError, match=r'expected classes separated by "\|" or a list of them, of the 3 names'):
            encode(task, [row])
    else:
        assert encode(task, [row])[0].label == wanted


def test_the_separator_is_a_key_that_no_class_name_contains(bases):
    keys = SEVERAL | {"task__model": str(bases / "bert"), "task__label_separator": ";"}
    assert encode(make_task(**keys), [{"note": "cough", "ward": "lung;bone"}])[0].label == (0, 1, 1)
    with pytest.raises(ConfigError, match='task.label-separator: ";" occurs in the class name'):
        make_task(**keys, task__class_names="a;b,c")


def test_the_loss_of_several_labels_is_that_of_the_original_model(bases):
    folder = bases / "bert-head"
    task, rows = make_task(task__model=str(folder), **SEVERAL), draw_rows(10, several=True)
    with library_logging.quiet_libraries():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        kind = {"problem_type": "multi_label_classification"}
        plain = AutoModelForSequenceClassification.from_pretrained(folder, **kind).eval()
        inputs = tokenizer([row["note"] for row in rows], padding=True, return_tensors="pt")
    labels = torch.tensor([[float(name in row["ward"].split("|")) for name in NAMES] for row in rows])
    assert {int(n) for n in labels.sum(1)} >= {0, 1, 2}
    weights, encoded = task.initial(stream()), encode(task, rows)
    task.show(weights)
    assert task.mean_loss(encoded) == pytest.approx(plain(**inputs, labels=labels).loss.item(), rel=1e-5)
    predictions = list(task.predict(weights, encoded))
    assert [p.wanted.tolist() for p in predictions] == labels.int().tolist()
    losses = [float(torch.nn.functional.cross_entropy(p.logits["target"], p.wanted)) for p in predictions]
    assert sum(losses) / len(losses) == pytest.approx(task.mean_loss(encoded), rel=1e-5)


def test_several_labels_are_learned_and_scored(bases, tmp_path):
    keys = {"train__epochs": 8, "train__learning_rate": 5e-3, "train__batch_size": 4}
    task = make_task(task__model=str(bases / "bert"), **keys, **SEVERAL)
    data = save_rows(save_rows(tmp_path, draw_rows(60, several=True)), draw_rows(40, seed=1, several=True), "test")
    before, test = task.initial(stream()), task.examples(data, "test")
    after = task.trainer(task.encode(task.examples(data, "train")), stream("batches")).train(before).weights
    first, last = (task.evaluate(weights, test, False) for weights in (before, after))
    assert list(first) == ["loss", "accuracy", "macro_f1", "auroc"]
    assert last["loss"] < 0.7 * first["loss"]
    assert min(last["macro_f1"], last["auroc"]) > 0.8
    assert last["accuracy"] > first["accuracy"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_has_a_pair_whatever_the_targets_are(bases, kind):
    task = make_task(LoraAdapter(rank=2, targets=r".*\.(query|q_proj)"), task__model=str(bases / kind))
    modules = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in task.spec}
    assert modules == ({"q_proj", "score"} if kind == "llama" else {"query", "classifier", "dense"})  # a new pooler


def test_without_a_length_texts_are_cut_by_the_context_alone_and_at_most_5_percent(bases):
    task = make_task(task__model=str(bases / "bert"), task__max_tokens=0)
    rows = draw_rows(40)
    whole = task.encode(Example.from_columns(rows))
    assert not task.find_cut(whole).any()
    long = {"note": " ".join([rows[0]["note"]] * 20), "ward": rows[0]["ward"]}
    cut = task.find_cut(task.encode(Example.from_columns([*rows, long])))
    assert list(cut) == [False] * 40 + [True]
    with pytest.raises(TaskError, match=r"3 of 43 \(7.0 %\) of the examples are longer than 24 tokens"):
        task.encode(Example.from_columns([*rows, long, long, long]))
