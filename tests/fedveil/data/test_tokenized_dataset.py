"""Prepared text rows, compared with a simple reference that handles one line, text and list at a time."""

from __future__ import annotations

import json
import os
import random

import pytest
import torch

from fedveil import tasks
from fedveil.adapters.lora import LoraAdapter
from fedveil.config import parse
from fedveil.contract.task import DatasetShard, ExampleOrigin
from fedveil.data import batches, tables
from fedveil.data.batches import TokenExample
from fedveil.data.tokenization import MarkedText, TextTokenizer
from fedveil.errors import TaskError
from fedveil.rng import RandomStream
from fedveil.tasks import text_generation

WORDS = [
    "The", "Vaults", "near", "Café Adriatic", "", "has\ta", "£30", "日本", "👍🏽", "<|endoftext|>", "name[x],", "\n",
]  # fmt: skip


def texts(count: int) -> list[dict[str, object]]:
    draw = random.Random(0)
    rows = [
        {k: " ".join(["a", *draw.choices(WORDS, k=draw.randrange(60))]) for k in ("mr", "ref")} for _ in range(count)
    ]
    return [*rows, {"mr": "a", "ref": "b"}, *rows[:3]]


def naive(task, folder, split="train") -> list[TokenExample]:
    """FedVeil 0.1's preparation of a whole file."""
    encode, end = task.base.tokenizer.encode, task.base.tokenizer.eos_token_id
    separator, longest = encode("\n", add_special_tokens=False), task.config.task.max_tokens
    examples = []
    for line in (folder / f"{split}.jsonl").read_bytes().split(b"\n"):
        if line.strip():
            source, target = (encode(str(json.loads(line)[k]), add_special_tokens=False) for k in ("mr", "ref"))
            answer = [*target, end][: longest - len(separator)]
            prompt = [*source[: max(0, longest - len(answer) - len(separator))], *separator]
            examples.append(TokenExample(prompt + answer, len(prompt)))
    return examples


def write(folder, rows):
    (folder / "train.jsonl").write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    return folder


@pytest.fixture
def data(tmp_path):
    (tmp_path / "data").mkdir()
    return write(tmp_path / "data", texts(40))


@pytest.fixture(scope="module")
def base():
    return make().base


def make(**changes):
    keys = {
        key.replace("__", ".").replace("task.max_tokens", "task.max-tokens"): value for key, value in changes.items()
    }
    config = parse({"train.batch-size": 4, "task.max-tokens": 96} | keys)
    return tasks.load_task(config, LoraAdapter(rank=2), "cpu")


@pytest.mark.parametrize("longest", [8, 20, 96])
def test_rows_are_the_naive_ones_in_memory_on_the_first_and_on_the_second_time(
    tmp_path, data, base, longest, monkeypatch
):
    monkeypatch.setattr(text_generation, "_AT_ONCE", 7)
    monkeypatch.setattr(tables, "_PARSED", 9)
    monkeypatch.setattr(tables, "_AT_ONCE", 5)
    task = make(task__max_tokens=longest)
    task.base = base
    expected, shelf = naive(task, data), tmp_path / "shelf"
    ways = [task.encode(list(task.examples(data, "train"))), task.prepare(data, "train").rows]
    ways += [task.prepare(data, "train", shelf=shelf).rows for _ in range(2)]
    for rows in ways:
        assert list(rows) == expected
        assert (rows[-1], rows[3:5], len(rows)) == (expected[-1], expected[3:5], len(expected))
        for bucketing in (False, True):
            orders = [batches.epoch_order(r, 4, torch.Generator().manual_seed(1), bucketing) for r in (rows, expected)]
            assert orders[0] == orders[1]
    assert list(tmp_path.rglob("*.part")) == []


@pytest.mark.long
def test_training_on_them_ends_bit_identically(tmp_path, data):
    task, ends = make(run__deterministic=True), []
    start = task.initial(RandomStream(bytes(32)))
    for rows in (naive(task, data), task.prepare(data, "train", shelf=tmp_path).rows):
        ends.append(task.trainer(rows, RandomStream(bytes(range(32)))).train(start))
    assert ends[0].report["loss_received"] == ends[1].report["loss_received"]
    assert all(torch.equal(ends[0].weights[name], ends[1].weights[name]) for name in start)


def test_the_second_time_no_row_is_read_or_tokenised(tmp_path, data, base, monkeypatch):
    task = make()
    task.base = base
    first = task.prepare(data, "train", shelf=tmp_path / "shelf")
    monkeypatch.setattr(tables, "read_split", None)
    monkeypatch.setattr(TextTokenizer, "tokenize", None)
    again = task.prepare(data, "train", shelf=tmp_path / "shelf")
    assert list(again.rows) == list(first.rows)
    expected = [ExampleOrigin(str(data / "train.jsonl"), i + 1) for i in range(len(first.rows))]
    assert list(first.origins()) == list(again.origins()) == expected


def test_changed_rows_are_never_taken_from_the_shelf(tmp_path, data, base):
    """Not even where name, size and time of the file are the same."""
    task, file = make(), data / "train.jsonl"
    task.base = base
    task.prepare(data, "train", shelf=tmp_path / "shelf")
    then = file.stat()
    file.write_bytes(file.read_bytes().replace(b"Vaults", b"Vaulty"))
    os.utime(file, ns=(then.st_atime_ns, then.st_mtime_ns))
    assert file.stat().st_size == then.st_size
    assert list(task.prepare(data, "train", shelf=tmp_path / "shelf").rows) == naive(task, data)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, data, base, monkeypatch):
    task, table = make(), tables.read_split
    task.base = base

    def changing(*asked):
        split = table(*asked)
        write(data, texts(5))
        return split

    monkeypatch.setattr(tables, "read_split", changing)
    with pytest.raises(TaskError, match="was changed while it was read"):
        task.prepare(data, "train", shelf=tmp_path / "shelf")
    assert list((tmp_path / "shelf").iterdir()) == []


@pytest.mark.long
def test_another_task_share_or_seed_has_rows_of_its_own(tmp_path, data, base):
    cases = [({}, None), ({"task__max_tokens": 20}, None), ({"task__source_column": "ref"}, None)]
    cases += [({"run__seed": seed}, DatasetShard(i, 2)) for seed in (1, 2) for i in (0, 1)]
    cases += [({"run__seed": seed, "task__examples_per_site": 9}, None) for seed in (1, 2)]
    for changes, share in (*cases, *cases):
        task = make(**changes)
        task.base = base
        dataset = task.prepare(data, "train", share, tmp_path / "shelf")
        examples = task.examples(data, "train", share)
        assert list(dataset.rows) == list(task.encode(list(examples)))
        assert list(dataset.origins()) == [example.origin for example in examples]


def test_a_tokenizer_that_cuts_and_pads_by_itself_does_neither(base):
    tokens, long = TextTokenizer(base.tokenizer), "name[The Vaults], food[French]"
    expected = base.tokenizer.encode(long, add_special_tokens=False)
    base.tokenizer.backend_tokenizer.enable_truncation(3)
    base.tokenizer.backend_tokenizer.enable_padding(length=50)
    texts = [MarkedText(long), MarkedText("x"), MarkedText(long)]
    assert [each.ids for each in tokens.tokenize(texts)] == [expected, tokens.tokenize(texts[1:2])[0].ids, expected]


def test_columns_whose_type_shows_late_read_as_one(tmp_path, monkeypatch):
    """Whole numbers before broken ones, nothing before a text, a column that comes later: as if read at once."""
    rows = [{"a": 1, "b": None}] * 4 + [{"a": 2.5, "b": "x", "c": {"d": 1}}] + [{"a": 3, "c": {"e": "y"}}] * 4
    write(tmp_path, rows)
    whole = tables.read_table(tmp_path / "train.jsonl", ())
    monkeypatch.setattr(tables, "_PARSED", 3)
    for scratch in (None, tmp_path / "scratch"):
        table = tables.read_table(tmp_path / "train.jsonl", (), scratch)
        assert table.features == whole.features
        assert table.to_list() == whole.to_list()
    assert [row["a"] for row in whole.to_list()[:2]] == [1.0, 1.0]
    assert list((tmp_path / "scratch").iterdir()) == []
    write(tmp_path, [{"a": 1}] * 4 + [{"a": "x"}])
    with pytest.raises(TaskError, match="column .* in row 5, but .* before it; correct"):
        tables.read_table(tmp_path / "train.jsonl", ())


def test_parquet_reads_alike_in_memory_and_mapped(tmp_path):
    write(tmp_path, texts(20))
    tables.read_table(tmp_path / "train.jsonl", ()).to_parquet(tmp_path / "train.parquet")
    loaded_tables = [
        tables.read_table(tmp_path / "train.parquet", (), scratch) for scratch in (None, tmp_path / "scratch")
    ]
    assert loaded_tables[0].to_list() == loaded_tables[1].to_list()
    assert loaded_tables[0].features == loaded_tables[1].features
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "train.parquet").read_bytes()[:-30])
    with pytest.raises(TaskError, match="as Parquet"):
        tables.read_table(tmp_path / "cut.parquet", (), tmp_path / "scratch")


@pytest.mark.long
def test_a_site_scores_the_received_weights_on_so_many_rows_or_on_none(data):
    write(data, texts(90))
    for count, reported in ((0, False), (64, True), (70, True)):
        task = make(train__received_loss_examples=count, train__max_steps=1)
        start, rows = task.initial(RandomStream(bytes(32))), task.encode(task.examples(data, "train"))
        seen = []
        scored = task.mean_loss
        task.mean_loss = lambda of, scored=scored, seen=seen: seen.append(len(of)) or scored(of)
        report = task.trainer(rows, RandomStream(bytes(32))).train(start).report
        assert ("loss_received" in report) is reported
        assert seen == ([count] if count else [])
        assert report["loss_trained"] > 0
    none = make(train__received_loss_examples=0, train__epochs=0)
    assert set(none.trainer(rows, RandomStream(bytes(32))).train(start).report) == {"steps", "tokens", "train_seconds"}
