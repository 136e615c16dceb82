"""Token classification on small bases: tokens and loss compared with transformers', data formats, scores, bad input."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Sequence, Value
from transformers import AutoModelForTokenClassification, AutoTokenizer

from fedveil import rng
from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.adapters.lora import LoraAdapter
from fedveil.adapters.prefix import PrefixAdapter
from fedveil.adapters.prompt import PromptAdapter
from fedveil.contract.task import Example
from fedveil.data import conll_files, label_studio
from fedveil.errors import ConfigError, TaskError
from fedveil.models import library_logging
from fedveil.tasks.token_classification import NO_TAG
from tests.fedveil.tasks import small_taggers as small
from tests.fedveil.tasks.small_taggers import TAGS, draw_rows, filled, make_task, save_base, save_rows

KINDS = ("bert", "llama")
ROW = {"tokens": ["takes", "folic", "acid", "5", "mg"], "ner_tags": ["O", "B-DRUG", "I-DRUG", "B-DOSE", "I-DOSE"]}
TEXT = "takes folic acid 5 mg"
SPANS = [[6, 16, "DRUG"], [17, 21, "DOSE"]]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Both kinds, without a head, and with one for the tags."""
    root = tmp_path_factory.mktemp("bases")
    for kind in KINDS:
        save_base(root / kind, kind)
        save_base(root / f"{kind}-head", kind, TAGS)
    return root


def stream(purpose: str = "weights", seed: int = 0) -> rng.RandomStream:
    return rng.initial_stream(seed, purpose)


def encode(task, rows):
    return task.encode(Example.from_columns(rows))


def tags_of(task, row) -> list[str]:
    return [task.names[tag] for tag in row.tags if tag != NO_TAG]


def aligned(tokenizer, rows):
    """transformers' example (run_ner.py): the first token of a word has its label, the others have -100."""
    encoded = tokenizer([row["tokens"] for row in rows], is_split_into_words=True, truncation=True)
    labels = []
    for at, row in enumerate(rows):
        before, found = None, []
        for word in encoded.word_ids(at):
            new = word is not None and word != before
            found.append(TAGS.index(row["ner_tags"][word]) if new else -100)
            before = word
        labels.append(found)
    return encoded["input_ids"], labels


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_labels_and_loss_are_those_of_transformers_own_example(bases, kind):
    folder = bases / f"{kind}-head"
    task, rows = make_task(task__model=str(folder)), draw_rows(10)
    with library_logging.quiet_libraries():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        plain = AutoModelForTokenClassification.from_pretrained(folder).eval()
    ids, labels = aligned(tokenizer, rows)
    encoded = encode(task, rows)
    assert [row.ids for row in encoded] == ids
    assert [row.tags for row in encoded] == labels
    assert any(len(each) > len(row["tokens"]) + 2 for each, row in zip(ids, rows, strict=True))  # words of several
    width, padding = max(map(len, ids)), 0 if kind == "bert" else small.END
    padded = torch.tensor([each + [padding] * (width - len(each)) for each in ids])
    mask = torch.tensor([[1] * len(each) + [0] * (width - len(each)) for each in ids])
    wanted = torch.tensor([each + [-100] * (width - len(each)) for each in labels])
    task.show(task.initial(stream()))
    loss = plain(input_ids=padded, attention_mask=mask, labels=wanted).loss.item()
    assert task.mean_loss(encoded) == pytest.approx(loss, rel=1e-5)
    batch = task.collate(encoded)
    assert float(task.loss_sum(batch).detach()) / batch.terms == pytest.approx(loss, rel=1e-5)
    assert batch.terms == sum(len(row["tokens"]) for row in rows)
    assert task.base.is_causal == (kind == "llama")
    assert (batch.types is not None) == (kind == "bert")


@pytest.mark.parametrize("word", ["É", "Ж", "a"])
def test_a_space_that_the_tokenizer_puts_before_a_word_has_no_tag(bases, word):
    """ "É" is two tokens of this base, and so the space before it is a token, which has no character of the word."""
    task = make_task(task__model=str(bases / "llama"))
    (row,) = encode(task, [{"tokens": [word, "5"], "ner_tags": ["B-DRUG", "B-DOSE"]}])
    tokens = task.base.tokenizer.convert_ids_to_tokens(row.ids)
    assert tokens[1:-1] == {"É": ["Ġ", "Ã", "ī"], "Ж": ["Ġ", "Ð", "ĸ"], "a": ["Ġa"]}[word]
    tagged = {token: task.names[tag] for token, tag in zip(tokens, row.tags, strict=True) if tag != NO_TAG}
    assert tagged == {tokens[2 if word != "a" else 1]: "B-DRUG", "Ġ5": "B-DOSE"}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_training_lowers_the_loss_and_finds_the_entities(bases, tmp_path, kind):
    keys = {"train__epochs": 8, "train__learning_rate": 1e-2, "train__batch_size": 4}
    task = make_task(task__model=str(bases / kind), **keys)
    data = save_rows(save_rows(tmp_path, draw_rows(60)), draw_rows(30, seed=1), "test")
    before, test = task.initial(stream()), task.examples(data, "test")
    after = task.trainer(task.encode(task.examples(data, "train")), stream("batches")).train(before).weights
    first, last = (task.evaluate(weights, test, False) for weights in (before, after))
    assert list(first) == ["loss", "accuracy", "precision", "recall", "f1"]
    assert last["loss"] < 0.5 * first["loss"]
    assert last["f1"] > 0.6
    assert last["accuracy"] > 0.8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapter", [LoraAdapter(rank=2), AllWeightsAdapter()], ids=["lora", "all"])
def test_a_new_head_is_the_same_at_every_site_of_a_run_and_another_in_another_run(bases, kind, adapter):
    def head(seed: int) -> torch.Tensor:
        task = make_task(adapter, task__model=str(bases / kind), run__seed=seed)
        (name,) = task.base.heads
        named = {n.replace(".base_layer.", "."): p for n, p in task.base.model.named_parameters() if "lora" not in n}
        return named[f"{name}.weight"].detach().clone()

    torch.manual_seed(5)  # the generator that the library would draw from
    one, again, other = head(3), head(3), head(4)
    assert one.shape == (5, 32)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_predictions_have_a_position_for_each_word_whatever_the_batch(bases):
    rows = draw_rows(7)
    few, many = (make_task(task__model=str(bases / "bert"), train__batch_size=size) for size in (1, 16))
    weights = filled(few)
    alone, together = (list(task.predict(weights, encode(task, rows))) for task in (few, many))
    for a, b, row in zip(alone, together, rows, strict=True):
        torch.testing.assert_close(a.logits["target"], b.logits["target"], rtol=1e-4, atol=1e-5)
        assert a.logits["target"].shape == (len(row["tokens"]), 5)
        assert [TAGS[i] for i in a.wanted] == row["ner_tags"]


FORMS = {
    "words": (ROW, {}),
    "numbers": (ROW | {"ner_tags": [0, 1, 2, 3, 4]}, {"task__class_names": ",".join(TAGS)}),
    "numbers as texts": (ROW | {"ner_tags": ["0", "1", "2", "3", "4"]}, {"task__class_names": ",".join(TAGS)}),
    "iob1": (ROW | {"ner_tags": ["O", "I-DRUG", "I-DRUG", "I-DOSE", "I-DOSE"]}, {"task__tag_scheme": "iob1"}),
    "iobes": (ROW | {"ner_tags": ["O", "B-DRUG", "E-DRUG", "B-DOSE", "E-DOSE"]}, {"task__tag_scheme": "iobes"}),
    "bilou": (ROW | {"ner_tags": ["O", "B-DRUG", "L-DRUG", "B-DOSE", "L-DOSE"]}, {"task__tag_scheme": "bilou"}),
    "mixed words": (ROW | {"tokens": ["takes", "folic", "acid", 5, "mg"]}, {}),
}
ENTITIES = [
    {"id": 1, "label": "DRUG", "start_offset": 6, "end_offset": 16},
    {"id": 2, "label": "DOSE", "start_offset": 17, "end_offset": 21},
]
SHORT = [
    {"start": 6, "end": 16, "text": "folic acid", "labels": ["DRUG"]},
    {"start": 17, "end": 21, "text": "5 mg", "labels": ["DOSE"]},
]


def annotated(text: str, labels: list[dict[str, object]], **more: object) -> dict[str, object]:
    """A task of Label Studio's JSON export."""
    result = [
        {"value": each, "id": f"r{i}", "from_name": "entity", "to_name": "text", "type": "labels", "origin": "manual"}
        for i, each in enumerate(labels)
    ]
    return {
        "id": 7, "data": {"text": text, "patient": "p1"}, "predictions": [], "meta": {}, "file_upload": "a.txt",
        "annotations": [{"id": 3, "completed_by": 1, "result": result, "was_cancelled": False, "lead_time": 2.5}],
    } | more  # fmt: skip


EMPTY = annotated("takes no aspirin", [])
FILES = {
    "jsonl": ("train.jsonl", json.dumps(ROW), "tokens", "ner_tags"),
    "conll with tabs": (
        "train.conll", "takes\tO\nfolic\tB-DRUG\nacid\tI-DRUG\n5\tB-DOSE\nmg\tI-DOSE\n\n", "tokens", "ner_tags",
    ),
    "conll 2003": (
        "train.iob2", "-DOCSTART- -X- -X- O\n\ntakes VB B-VP O\nfolic NN B-NP B-DRUG\nacid NN I-NP I-DRUG\n5 CD I-NP "
        "B-DOSE\nmg NN I-NP I-DOSE", "tokens", "ner_tags",
    ),
    "doccano": ("train.jsonl", json.dumps({"id": 1, "text": TEXT, "label": SPANS, "Comments": []}), "text", "label"),
    "doccano with relations": (
        "train.jsonl", json.dumps({"text": TEXT, "entities": ENTITIES, "relations": []}), "text", "entities"
    ),
    "label studio": ("train.json", json.dumps([annotated(TEXT, SHORT), EMPTY], indent=1), "text", "entity"),
    "label studio, short": (
        "train.json", json.dumps([{"text": TEXT, "id": 1, "entity": SHORT, "annotator": 1}]), "text", "entity"
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_words_give_the_same_tags(bases, tmp_path, form):
    row, keys = FORMS[form]
    task = make_task(task__model=str(bases / "bert"), **keys)
    (read,) = task.encode(task.examples(save_rows(tmp_path, [row]), "train"))
    assert tags_of(task, read) == ROW["ner_tags"]
    assert read == encode(make_task(task__model=str(bases / "bert")), [ROW])[0]


@pytest.mark.parametrize("form", FILES)
def test_files_as_people_have_them_give_the_same_tags(bases, tmp_path, form, caplog):
    name, content, source, target = FILES[form]
    (tmp_path / name).write_text(content)
    task = make_task(task__model=str(bases / "bert"), task__source_column=source, task__target_column=target)
    with caplog.at_level(logging.WARNING, "fedveil.data"):
        examples = task.examples(tmp_path, "train")
    assert examples[0].where == f"row 1 of {tmp_path / name}"
    read = task.encode(examples)
    assert tags_of(task, read[0]) == ROW["ner_tags"]
    assert read[0] == encode(make_task(task__model=str(bases / "bert")), [ROW])[0]
    if form == "label studio":
        assert tags_of(task, read[1]) == ["O", "O", "O"]
        assert examples[0].values.keys() == {"text", "entity"}
    how = {"conll with tabs": "of 2 columns between tabs", "conll 2003": "of 4 columns between spaces"}
    how |= {"doccano": "Doccano", "doccano with relations": "Doccano", "jsonl": ""}
    assert how.get(form, "Label Studio") in caplog.text
    assert bool(caplog.text) == (form != "jsonl")


def test_rows_that_only_look_like_tasks_of_label_studio_stay_as_they_are(tmp_path):
    rows = [{"data": {"a": 1}, "annotations": [], "text": "x"}] * 2
    assert not label_studio.is_export(rows)
    assert label_studio.is_export([EMPTY, *rows])


def test_every_kind_of_label_is_a_column_up_to_a_limit():
    def kinds(count: int) -> list[dict[str, object]]:
        return [
            {"data": {"t": i}, "annotations": [{"result": [{"from_name": f"k{i}", "value": {"n": n}} for n in (1, 2)]}]}
            for i in range(count)
        ]

    flat = label_studio.flatten_rows(kinds(100), Path("a.json"))
    assert all(len(row) == 102 for row in flat)
    assert flat[7]["k7"] == [{"n": 1}, {"n": 2}]
    assert flat[7]["k8"] == []
    with pytest.raises(
        TaskError, match=r'a.json" has 101 kinds of labels \(from_name\), but at most 100 are allowed; export'
    ):
        label_studio.flatten_rows(kinds(101), Path("a.json"))


CONLL = {  # the lines of a file, and its words or the reason for a refusal
    "a document before tabs": ("-DOCSTART- -X- O\n\nNew York\tB-X\nis\tO\n", [["New York", "is"]]),
    "a document within": ("a O\n-DOCSTART-\tO\nb O\n", [["a"], ["b"]]),
    "a word like a document": ("-DOCSTART-x O\n", [["-DOCSTART-x"]]),
    "numbers of two columns": ("1 O\n2 O\n", [["1", "2"]]),
    "numbers among words": ("5 CD O\nmg NN O\n\n5 CD O\n", [["5", "mg"], ["5"]]),
    "one number": ("5 CD O\n", [["5"]]),
    "numbers from 1": ("a NN O\n\n1 a O\n2 b O\n", "the numbers of the words before line 5"),
    "numbers from 0": ("a NN O\n\n0 a O\n1 b O\n\n", "the numbers of the words before line 5"),
    "only numbers": ("1 a O\n\n7 b O\n9 c O\n\n", "found only numbers; put the words into the first column"),
}


@pytest.mark.parametrize("case", CONLL)
def test_the_first_column_of_a_conll_file_has_its_words(case):
    content, wanted = CONLL[case]
    parsed = conll_files.parse_sentences(content.encode().splitlines(keepends=True), Path("a.conll"))
    if isinstance(wanted, str):
        with pytest.raises(TaskError, match=wanted):
            list(parsed)
    else:
        assert [row["tokens"] for row in parsed] == wanted


def test_a_column_beside_the_texts_of_label_studio_can_be_the_unit(bases, tmp_path):
    from fedveil.data.units import count_units

    (tmp_path / "train.json").write_text(json.dumps([annotated(TEXT, SHORT), EMPTY]))
    assert count_units(tmp_path / "train.json", "patient").units == 1


def test_numbers_with_stored_names_are_those_names(bases, tmp_path):
    """A Parquet file numbers its tags in an own order: the run's order counts. Another entity is refused."""

    def write(folder: Path, names: list[str], tags: list[int]) -> Path:
        folder.mkdir()
        features = Features({"tokens": Sequence(Value("string")), "ner_tags": Sequence(ClassLabel(names=names))})
        row = {"tokens": ["takes", "folic", "acid"], "ner_tags": tags}
        Dataset.from_list([row], features=features).to_parquet(str(folder / "train.parquet"))
        return folder

    task = make_task(task__model=str(bases / "bert"))
    same = write(tmp_path / "same", ["I-DRUG", "B-DRUG", "O"], [2, 1, 0])
    assert tags_of(task, task.encode(task.examples(same, "train"))[0]) == ["O", "B-DRUG", "I-DRUG"]
    task.require_shared_classes()
    scheme = make_task(task__model=str(bases / "bert"), task__tag_scheme="iobes")
    ends = write(tmp_path / "ends", ["O", "B-DRUG", "E-DRUG", "S-DRUG"], [0, 1, 2])
    assert tags_of(scheme, scheme.encode(scheme.examples(ends, "train"))[0]) == ["O", "B-DRUG", "I-DRUG"]
    other = write(tmp_path / "other", ["O", "B-DRUG", "I-DRUG", "B-SITE", "I-SITE"], [0, 1, 2])
    examples = task.examples(other, "train")
    words = r"among the 5 of the run \(O, B-DRUG.*found 5 \(O, B-DRUG.*; the unknown ones are B-SITE, I-SITE"
    for refusing in (task.require_shared_classes, lambda: task.encode(examples)):
        with pytest.raises(TaskError, match=words):
            refusing()


def of_text(target: object) -> dict[str, object]:
    return {"tokens": TEXT, "ner_tags": target}


WRONG = {
    "no words": ({"tokens": [], "ner_tags": []}, "a list of nonempty words .* found an empty list"),
    "no source": (ROW | {"tokens": None}, r"a list of words or a text .* found no value \(null\)"),
    "an empty word": (ROW | {"tokens": ["takes", "", "acid", "5", "mg"]}, "found an empty text as one of them"),
    "a word that is null": (ROW | {"tokens": ["takes", None, "a", "5", "mg"]}, "found no value .* as one of them"),
    "no tags": (ROW | {"ner_tags": None}, r"a list with one tag per word .* found no value \(null\)"),
    "tags in a text": (ROW | {"ner_tags": "O O O O O"}, "a list with one tag per word .* found a text of 9 characters"),
    "fewer tags": (ROW | {"ner_tags": ["O"]}, "expected 5 tags, one per word, .* found 1"),
    "another entity": (
        ROW | {"ner_tags": ["O"] * 4 + ["B-SITE"]},
        "a tag at word 5 that does not belong to task.class-names",
    ),
    "iob1": (ROW | {"ner_tags": ["O", "I-DRUG", "I-DRUG", "O", "O"]}, 'word 2.* "iob2" \\(or "iob1"'),
    "iobes": (ROW | {"ner_tags": ["O", "B-DRUG", "E-DRUG", "O", "O"]}, 'a tag at word 3 .*or "iob1", "iobes"'),
    "numbers": (ROW | {"ner_tags": [0, 1, 2, 3, 4]}, "found an integer at word 1.* give all tags in task.class-names"),
    "a tag that is null": (ROW | {"ner_tags": ["O", None, "O", "O", "O"]}, "found no value .* at word 2"),
    "true": (ROW | {"ner_tags": [True] * 5}, "found true or false at word 1"),
    "spans that are null": (of_text(None), "found no value .*; write an empty list .* full JSON export"),
    "a class": (of_text("DRUG"), "a list of spans.* found a text of 4 characters"),
    "classes": (of_text(["DRUG"]), "span 1 that is a text of 4 characters"),
    "two numbers": (of_text([[6, 16]]), "span 1 that is a list of 2 entries"),
    "no number": (of_text([["a", "16", "DRUG"]]), "span 1 without whole numbers from 0"),
    "a fraction": (of_text([["6.0", "16", "DRUG"]]), "span 1 without whole numbers from 0"),
    "inside a word": (of_text([[7, 16, "DRUG"]]), "span 1 that begins or ends inside a word"),
    "behind the text": (of_text([[17, 22, "DOSE"]]), "not within the 21 characters"),
    "overlapping": (of_text([[6, 16, "DRUG"], [12, 16, "DOSE"]]), "span 2 that overlaps another one"),
    "another name": (of_text([[6, 16, "SITE"]]), "span 1 with a name that is not in"),
    "two names": (of_text([{"start": 6, "end": 16, "labels": ["DRUG", "DOSE"]}]), "span 1 with 2 names"),
    "no name": (of_text([{"start": 6, "end": 16, "labels": None}]), "or without a name"),
    "offsets of UTF-16": (
        {"tokens": f"🙂 {TEXT}", "ner_tags": [{"start": 9, "end": 19, "labels": ["DRUG"], "text": "folic acid"}]},
        "span 1 with a text that differs from the text at its offsets",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_row_is_refused_with_its_file_and_row_and_no_value(bases, tmp_path, case):
    row, words = WRONG[case]
    task = make_task(task__model=str(bases / "bert"))
    good = {**ROW, "tokens": TEXT, "ner_tags": []} if isinstance(row["tokens"], str) else ROW
    with pytest.raises(TaskError, match=words) as error:
        encode(task, [good, row])
    assert "in a row with tokens, ner_tags" in str(error.value)
    assert "folic" not in str(error.value)
    data = save_rows(tmp_path, [row])
    with pytest.raises(TaskError, match=f"row 1 of {data / 'train.jsonl'}"):
        task.encode(task.examples(data, "train"))


def test_numbers_of_tags_count_in_the_order_that_people_wrote(bases):
    task = make_task(task__model=str(bases / "bert"), task__class_names="I-DRUG,B-DRUG,O")
    row = {"tokens": ["takes", "folic", "acid"], "ner_tags": [2, 1, 0]}
    assert tags_of(task, encode(task, [row])[0]) == ["O", "B-DRUG", "I-DRUG"]
    with pytest.raises(TaskError, match="its number from 0 to 2, .* found an integer at word 3"):
        encode(task, [row | {"ner_tags": [2, 1, 3]}])


def test_a_scheme_is_for_tags(bases):
    task = make_task(task__model=str(bases / "bert"), task__tag_scheme="iobes")
    with pytest.raises(TaskError, match='task.tag-scheme: "iobes" has no effect, because spans'):
        encode(task, [of_text(SPANS)])


def test_texts_that_are_cut_are_counted_and_their_last_words_are_not_learned(bases, caplog):
    task = make_task(task__model=str(bases / "bert"), task__max_tokens=8)
    rows = [{"tokens": ["acid"] * n, "ner_tags": ["B-DRUG"] * n} for n in (5, 6, 7, 20)]
    with caplog.at_level(logging.WARNING, "fedveil.data"):
        encoded = encode(task, rows)
    assert [row.length for row in encoded] == [7, 8, 8, 8]
    assert [sum(tag != NO_TAG for tag in row.tags) for row in encoded] == [5, 6, 6, 6]
    assert list(task.find_cut(encoded)) == [False, False, True, True]
    assert caplog.messages == [
        "task.max-tokens = 8: 2 of 4 (50.0 %) texts lose their end; raise it, to at most 64 (22 tokens keep 95 % whole)"
    ]
    whole = make_task(task__model=str(bases / "bert"), task__max_tokens=0)
    assert not whole.find_cut(encode(whole, rows)).any()
    with pytest.raises(TaskError, match=r"1 of 2 .* of the examples are longer than 64 tokens"):
        encode(whole, [{"tokens": ["acid"] * n, "ner_tags": ["O"] * n} for n in (5, 70)])


def test_spans_with_space_and_words_without_a_token_are_counted(bases, caplog):
    """ "no5" is two words and, for this base, three tokens; "aspi" and "rin" of one word; a mark is no token."""
    task = make_task(task__model=str(bases / "llama"))
    spaced = {"tokens": "takes 5 mg", "ner_tags": [[5, 10, "DOSE"]]}
    with caplog.at_level(logging.WARNING, "fedveil.data"):
        (row,) = encode(task, [spaced])
    assert tags_of(task, row) == ["O", "B-DOSE", "I-DOSE"]
    assert caplog.messages == ["task.data: 1 spans begin or end with whitespace, which is ignored"]
    caplog.clear()
    bert = make_task(task__model=str(bases / "bert"))
    with caplog.at_level(logging.WARNING, "fedveil.data"):
        (row,) = encode(bert, [{"tokens": "takes 5äö mg", "ner_tags": [[7, 9, "DOSE"]]}])  # "5äö" is one [UNK]
    assert tags_of(bert, row) == ["O", "O", "O"]
    assert caplog.messages == [
        "task.data: 1 words do not begin a token of the base, so they are neither learned nor scored"
    ]
    with pytest.raises(TaskError, match="no word in a row with .* begins a token of the base"):
        encode(bert, [{"tokens": ["\u0000"], "ner_tags": ["O"]}])


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"task__class_names": ""}, "task.class-names: set it to the names of all entities"),
        ({"task__class_names": "O,PER"}, '"O", and "B-" and "I-" for every entity'),
        ({"task__multi_label": True}, "task.multi-label"),
        ({"task__source_template": "{a} {b}"}, "task.source-template"),
        ({"task__empty_texts": "drop"}, "task.empty-texts"),
        ({"train__packing": True}, "train.packing"),
        ({"task__chat_template": True}, "task.chat-template"),
        ({"train__loss_mask": "all"}, "train.loss-mask"),
        ({"task__tag_scheme": "conll"}, "task.tag-scheme"),
        (
            {"task__name": "text-classification", "task__tag_scheme": "iob1"},
            'task.tag-scheme: the task "text-classification"',
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(bases, keys, words):
    with pytest.raises(ConfigError, match=words):
        make_task(task__model=str(bases / "bert"), **keys)


@pytest.mark.parametrize("adapter", [PromptAdapter(), PrefixAdapter()], ids=["prompt", "prefix"])
def test_prompts_and_prefixes_are_refused_with_the_reason(adapter):
    with pytest.raises(ConfigError, match='the task "token-classification" supports LoRA pairs or all weights'):
        make_task(adapter)


def test_the_order_of_the_bases_own_tags_is_required(bases):
    with pytest.raises(TaskError, match=r"task.class-names: expected the class names in the order of"):
        make_task(task__model=str(bases / "bert-head"), task__class_names="DOSE,DRUG").base  # noqa: B018


def test_without_an_entity_only_the_accuracy_is_scored(bases, caplog):
    task = make_task(task__model=str(bases / "bert"))
    rows = Example.from_columns([{"tokens": ["takes", "no"], "ner_tags": ["O", "O"]}])
    with caplog.at_level(logging.WARNING, "fedveil.data"):
        assert set(task.evaluate(task.initial(stream()), rows, False)) == {"loss", "accuracy"}
    with pytest.raises(TaskError, match="there are none to score"):
        task.evaluate(task.initial(stream()), [], False)


def test_the_bundled_base_tags_words():
    task = make_task()
    (row,) = encode(task, [ROW])
    assert tags_of(task, row) == ROW["ner_tags"]
