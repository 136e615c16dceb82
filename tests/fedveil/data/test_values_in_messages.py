"""No row value leaks: marked rows go through every error of every task, and all output is searched for the marks."""

from __future__ import annotations

import ast
import io
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from PIL import Image, PngImagePlugin

from fedveil import config as run_config
from fedveil import data as data_package
from fedveil import rng, strategies, tasks
from fedveil.client_app import app as client
from fedveil.client_app import failure_reason
from fedveil.console.doctor import data_checks
from fedveil.contract.task import DatasetShard
from fedveil.data.row_values import describe_value
from fedveil.errors import TaskError
from tests.fedveil.data import test_excel_files, test_nifti_images
from tests.fedveil.data.test_dicom_images import MARK, REFUSED, dicom
from tests.fedveil.data.test_image_decoding import with_significant_bits

# MARK is the patient: in every column, in names of image files and inside of images.
OTHER = {"note": f"{MARK} has diabetes", "born": f"{MARK} 1931"}
ROOT = Path(data_package.__file__).parent.parent

TEXT = {"task.name": "text-generation", "task.max-tokens": 32}
CHAT = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{{ '[assistant] ' if add_generation_prompt }}"
)
TALK = TEXT | {"task.messages-column": "messages", "task.chat-template": True}
CLASS = {"task.name": "image-classification", "task.target-column": "label", "task.num-classes": 3}
CLIP = {"task.name": "clip-prompt", "task.target-column": "label"}
LABELLED = {
    "task.name": "text-classification", "task.source-column": "note", "task.target-column": "label",
    "task.class-names": "a,b", "task.max-tokens": 32,
}  # fmt: skip
TAGGED = {
    "task.name": "token-classification", "task.source-column": "tokens", "task.target-column": "ner_tags",
    "task.class-names": "a,b", "task.max-tokens": 32,
}  # fmt: skip
SPANS = TAGGED | {"task.source-column": "note", "task.target-column": "label"}
PAIR = {
    "task.name": "preference", "task.source-column": "note", "task.target-column": "label", "task.max-tokens": 32,
}  # fmt: skip
CAPTION = {"task.name": "vision-language", "task.target-column": "caption", "task.max-tokens": 64}
OPEN = CAPTION | {"task.source-column": "question"}
CHOICE = {
    "task.name": "vision-language", "task.target-column": "answer", "task.source-column": "question",
    "task.choices-column": "choices", "task.hint-column": "hint", "task.max-tokens": 64,
}  # fmt: skip
METHOD = {"clip-prompt": "promptfl"}

# Errors of the data that no row takes part in.
WITHOUT_ROWS = {
    "there is no folder or file at",
    "expected a file ending in", "there is no folder or file of rows at", "was changed while it was read",
    "expected images at <class>", "has no rows; add some", "there are no rows in ", "there are no examples to train on",
    " gets no rows", "which dp.unit-column does not allow", "are named for the split",
    "bytes; write one row per line", "the JSON document", "bytes when decompressed", "does not have a known encoding",
    "several files or sets of shards", "has the same shard number", "copy the missing ones", "shards in ",
    "files, but at most", "so Spark has not finished writing",
    "must contain only files", "must have the same format", "has several files of rows next to", "files of the split",
    "does not contain the list of files", "something other than .arrow files", "some of them are missing",
    "several folders in", "are in several places", "bytes unpacked", "Excel files need the package",
    "task.data::",  # another error, under another key
}  # fmt: skip


def png() -> bytes:
    about = PngImagePlugin.PngInfo()
    about.add_text("Patient", MARK)
    out = io.BytesIO()
    Image.new("RGB", (32, 32), (200, 0, 0)).save(out, "PNG", pnginfo=about)
    return out.getvalue()


def deep() -> bytes:
    out = io.BytesIO()
    Image.new("I;16", (32, 32), 60000).save(out, "PNG")
    return out.getvalue()


def lines(*rows: object) -> Callable[[Path], None]:
    return raw("".join(json.dumps(row) + "\n" for row in rows).encode())


def raw(content: bytes, suffix: str = "jsonl") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for split in ("train", "test"):
            (folder / f"{split}.{suffix}").write_bytes(content)

    return write


def exported(annotations: list[dict[str, object]]) -> Callable[[Path], None]:
    """A JSON export of Label Studio."""
    return raw(json.dumps([{"id": 7, "data": OTHER, "annotations": annotations}]).encode(), "json")


def parquet(**columns: object) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for split in ("train", "test"):
            pyarrow.parquet.write_table(pyarrow.table(columns), folder / f"{split}.parquet")

    return write


def seen(label: object, image: object = None, **more: object) -> Callable[[Path], None]:
    """One good row and one with a fault, for a task with images."""
    images = [png(), png() if image is None else image]
    stored = pyarrow.array(images, pyarrow.binary() if isinstance(images[1], bytes) else pyarrow.string())
    return parquet(image=stored, label=[label, label], **{k: [v, v] for k, v in {**OTHER, **more}.items()})


def named(path: str, **row: object) -> Callable[[Path], None]:
    return lines({"image": path, "label": 1, **OTHER, **row})


def files(contents: dict[str, str]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for split in ("train", "test"):
            for name, text in contents.items():
                (folder / f"{split}-{name}").write_text(text)

    return write


def shards(*tables: dict[str, object]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for split in ("train", "test"):
            for number, columns in enumerate(tables):
                pyarrow.parquet.write_table(pyarrow.table(columns), folder / f"{split}-{number}.parquet")

    return write


def pairs() -> pyarrow.Array:
    return pyarrow.array([[(MARK, MARK)]], pyarrow.map_(pyarrow.string(), pyarrow.string()))


def scans(content: bytes, name: str = "1.dcm") -> Callable[[Path], None]:
    """One good DICOM file and one file with a fault, in class folders."""

    def write(folder: Path) -> None:
        for split in ("train", "test"):
            for path, data in (("a/1.dcm", dicom()), (f"b/{name}", content)):
                (folder / split / path).parent.mkdir(parents=True)
                (folder / split / path).write_bytes(data)

    return write


def described(about: bytes) -> Callable[[Path], None]:
    """A file with a description of its columns as `datasets` writes it."""
    return parquet_table(pyarrow.table({"mr": [MARK], "ref": [MARK]}).replace_schema_metadata({b"huggingface": about}))


def twice(folder: Path) -> None:
    table = pyarrow.table([pyarrow.array([MARK])] * 3, names=["mr", "ref", "ref"])
    parquet_table(table)(folder)


def parquet_table(table: pyarrow.Table) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for split in ("train", "test"):
            pyarrow.parquet.write_table(table, folder / f"{split}.parquet")

    return write


CASES: dict[str, tuple[dict[str, object], Callable[[Path], None]]] = {
    "no source": (TEXT, lines({"mr": MARK, "ref": MARK, **OTHER}, {"ref": MARK * 9000, **OTHER})),
    "empty source": (TEXT, lines({"mr": " ", "ref": MARK, **OTHER})),
    "no column of a template": (
        TEXT | {"task.source-template": "{mr} {b}"},
        lines({"mr": [MARK], "b": MARK, "ref": MARK}),
    ),
    "no conversation": (TALK, lines({"messages": MARK, **OTHER})),
    "an unknown role": (TALK, lines({"messages": [{"role": MARK, "content": MARK}], **OTHER})),
    "an empty turn": (TALK, lines({"messages": [{"role": "user", "content": MARK}, {"role": "assistant"}]})),
    "a tool": (TALK, lines({"messages": [{"role": "user", "content": MARK, "tool_calls": [{"name": MARK}]}]})),
    "other parts": (TALK, lines({"messages": [{"role": "user", "content": [{"type": MARK, "text": MARK}]}]})),
    "turns in another order": (TALK, lines({"messages": [{"from": "gpt", "value": MARK}], **OTHER})),
    "all empty": (TEXT | {"task.empty-texts": "drop"}, lines({"mr": MARK, "ref": ""}, {"mr": None, "ref": MARK})),
    "cut by the context": (TEXT | {"task.max-tokens": 0}, lines({"mr": f"{MARK} " * 300, "ref": MARK, **OTHER})),
    "list": (TEXT, lines({"mr": [MARK], "ref": MARK, **OTHER})),
    "object": (TEXT, lines({"mr": {MARK: MARK}, "ref": MARK, **OTHER})),
    "no object": (TEXT, lines(MARK * 1000)),
    "no JSON": (TEXT, raw(f'{{"mr": "{MARK}", "ref": {MARK}}}'.encode())),
    "no UTF-8": (TEXT, raw(f'{{"mr": "{MARK}\xe9"}}'.encode("latin-1"))),
    "mixed": (TEXT, lines({"mr": {"a": 1}, "ref": MARK, **OTHER}, {"mr": MARK, "ref": MARK, **OTHER})),
    "mixed keys": (TEXT, lines({"mr": MARK, "ref": {MARK: 1}}, {"mr": MARK, "ref": {MARK: MARK}})),
    "surrogate": (TEXT, raw(f'{{"mr": "{MARK} \\ud800", "ref": "{MARK}"}}'.encode())),
    "no column": (TEXT, lines(OTHER)),
    "no Parquet": (TEXT, raw(MARK.encode() * 100, "parquet")),
    "CSV without names": (TEXT, raw(f"{MARK},{MARK} senior\n{MARK},b\n".encode(), "csv")),
    "CSV with a name twice": (TEXT, raw(f"{MARK},{MARK}\n{MARK},b\n".encode(), "csv")),
    "CSV of one column": (TEXT, raw(f"{MARK}\n{MARK}\n".encode(), "csv")),
    "CSV with too many values": (TEXT, raw(f"mr,ref\n{MARK},{MARK},{MARK}\n".encode(), "csv")),
    "CSV with an open quote": (TEXT, raw(f'mr,ref\n{MARK},"{MARK}\n'.encode(), "csv")),
    "CSV in another encoding": (TEXT, raw(f"mr,ref\n{MARK},\x8a\n".encode("latin-1"), "csv")),
    "CSV in no UTF-8": (TEXT, raw(f"mr,ref\n{MARK},\x8a\n".encode("latin-1"), "utf-8.csv")),
    "no gzip": (TEXT, raw(f"mr,ref\n{MARK},{MARK}\n".encode(), "csv.gz")),
    "no JSON document": (TEXT, raw(f'[{{"mr": {MARK}}}]'.encode(), "json")),
    "no list of objects": (TEXT, raw(f'{{"{MARK}": [1]}}'.encode(), "json")),
    "a list of texts": (TEXT, raw(f'["{MARK}"]'.encode(), "json")),
    "CSV files unlike": (TEXT, files({"0.csv": f"mr,ref\n{MARK},b\n", "1.csv": f"{MARK},{MARK} senior\na,b\n"})),
    "Parquet files unlike": (TEXT, shards({"mr": [MARK], "ref": [MARK]}, {"mr": [MARK], "ref": [1931]})),
    "a type of Arrow": (TEXT, parquet(mr=pairs(), ref=[MARK])),
    "a description of types": (TEXT, described(b"{")),
    "a column twice": (TEXT, twice),
    "no Arrow": (TEXT, raw(MARK.encode() * 100, "arrow")),
    "no file": (TEXT, lambda folder: (folder / "notes.txt").write_text(MARK)),
    "Parquet text not UTF-8": (
        TEXT,
        parquet(
            mr=pyarrow.StringArray.from_buffers(
                1, pyarrow.py_buffer(b"\0\0\0\0\x0a\0\0\0"), pyarrow.py_buffer(MARK.encode() + b"\xff")
            ),
            ref=[MARK],
        ),
    ),
    "pathological": (
        TEXT | {"task.partition": "pathological", "task.classes-per-site": 2, "shares": 4},
        lines(*[{"mr": MARK, "ref": MARK} for _ in range(9)]),
    ),
    "pathological of many": (
        TEXT | {"task.partition": "pathological", "task.classes-per-site": 1, "shares": 4},
        lines(*[{"mr": f"{MARK} {i}", "ref": MARK} for i in range(9)]),
    ),
    "pathological of few rows": (
        TEXT | {"task.partition": "pathological", "task.classes-per-site": 1, "shares": 4},
        lines(*[{"mr": f"{MARK} {i // 4}", "ref": MARK} for i in range(5)]),
    ),
    "few rows": (TEXT | {"shares": 4}, lines({"mr": MARK, "ref": MARK})),
    "label column": (
        TEXT | {"shares": 2, "task.partition": "natural", "task.label-column": "x"},
        lines({"mr": MARK, "ref": MARK}, {"mr": MARK, "ref": MARK}),
    ),
    "natural": (
        TEXT | {"shares": 2, "task.partition": "natural"},
        lines({"mr": MARK, "ref": MARK}, {"mr": MARK, "ref": MARK}),
    ),
    "whole labels": (
        TEXT | {"shares": 4, "task.partition": "pathological", "task.classes-per-site": 0},
        lines(*[{"mr": f"{MARK} {i // 9}", "ref": MARK} for i in range(9)]),
    ),
    "class names": (CLASS, seen(MARK)),
    "class": (CLASS, seen(1931)),
    "labels": (CLASS | {"task.class-names": "a,b,c", "task.multi-label": True}, seen(f"a|{MARK}")),
    "no class": (CLASS, seen(None)),
    "class bytes": (CLASS, seen(MARK.encode())),
    "no image": (CLASS, seen(1, MARK.encode())),
    "image cut": (CLASS, seen(1, png()[:-40])),
    "image path": (CLASS, named(f"{MARK}.png")),
    "image path of a zero": (CLASS, named(f"{MARK}\0.png")),
    "image too long a path": (CLASS, named(MARK * 1000)),
    "image path that leaves": (CLASS, named(f"../{MARK}.png")),
    "image path of a device": (CLASS, named("/dev/zero", label=MARK)),
    "image out of range": (CLASS, seen(1, with_significant_bits(deep(), 12))),
    "no image column": (CLASS, named("", image=[MARK])),
    "no prompt class": (CLIP, seen(1931)),
    "prompt class": (CLIP | {"task.class-names": "a,b"}, seen(MARK)),
    "prompt names": (CLIP | {"second": True}, seen(MARK)),
    "prompt image": (CLIP | {"task.class-names": "a,b"}, seen(1, MARK.encode())),
    "no text to classify": (LABELLED, lines({"note": None, "label": "a", "born": MARK})),
    "class of a text": (LABELLED, lines({**OTHER, "label": MARK})),
    "classes of a text": (LABELLED | {"task.multi-label": True}, lines({**OTHER, "label": f"a|{MARK}"})),
    "no words": (TAGGED, lines({**OTHER, "tokens": [MARK, " "], "ner_tags": ["O", "O"]})),
    "no text or words": (TAGGED, lines({**OTHER, "tokens": None, "ner_tags": ["O"]})),
    "fewer tags": (TAGGED, lines({**OTHER, "tokens": [MARK, MARK], "ner_tags": [MARK]})),
    "no list of tags": (TAGGED, lines({**OTHER, "tokens": [MARK, MARK], "ner_tags": MARK})),
    "another tag": (TAGGED, lines({**OTHER, "tokens": [MARK, MARK], "ner_tags": ["O", f"B-{MARK}"]})),
    "a number for a tag": (TAGGED, lines({**OTHER, "tokens": [MARK], "ner_tags": [1931]})),
    "tags of a scheme": (TAGGED, lines({**OTHER, "tokens": [MARK, MARK], "ner_tags": ["O", "I-a"]})),
    "no word before the cut": (
        SPANS | {"task.max-tokens": 8},
        lines({**OTHER, "note": "\t\n " * 40 + MARK, "label": []}),
    ),
    "no list of spans": (SPANS, lines({**OTHER, "label": MARK})),
    "a span's name": (SPANS, lines({**OTHER, "label": [[0, 9, MARK]]})),
    "a span in a word": (SPANS, lines({**OTHER, "label": [[1, 9, "a"]]})),
    "a span's own text": (
        SPANS,
        lines({**OTHER, "label": [{"start": 0, "end": 9, "labels": ["a"], "text": MARK + "."}]}),
    ),
    "a scheme of spans": (SPANS | {"task.tag-scheme": "iob1"}, lines({**OTHER, "label": [[0, 9, "a"]]})),
    "CoNLL without tags": (TAGGED, raw(f"{MARK} O\n{MARK}\n".encode(), "conll")),
    "CoNLL with numbers": (TAGGED, raw(f"1 {MARK} O\n2 {MARK} O\n".encode(), "conll")),
    "CoNLL with only numbers": (TAGGED, raw(f"7 {MARK} O\n\n7 {MARK} O\n".encode(), "conll")),
    "CoNLL with another tag": (TAGGED, raw(f"{MARK}\t{MARK}\n".encode(), "conll")),
    "CoNLL without an end": (TAGGED, raw(f"{MARK}\tO\n".encode() * 100_001, "conll")),
    "an annotation twice": (SPANS, exported([{"result": []}, {"result": []}])),
    "a label that is none": (SPANS, exported([{"result": [MARK]}])),
    "a label without a name": (SPANS, exported([{"result": [{"value": {"text": MARK}}]}])),
    "too many kinds of labels": (
        SPANS,
        exported([{"result": [{"from_name": f"k{i}", "value": {"text": MARK}} for i in range(101)]}]),
    ),
    "a label and a column": (SPANS, exported([{"result": [{"from_name": "born", "value": {"text": MARK}}]}])),
    "no rejected answer": (PAIR, lines({**OTHER, "label": MARK, "rejected": None})),
    "no pair of answers": (PAIR | {"task.empty-texts": "drop"}, lines({**OTHER, "label": MARK, "rejected": " "})),
    "caption": (CAPTION, seen(1, caption=None)),
    "open question": (OPEN, seen(1, question=[MARK], caption=MARK)),
    "captions": (CAPTION, seen(1, caption=[MARK, " "])),
    "caption image": (CAPTION, seen(1, MARK.encode(), caption=MARK)),
    "question": (CHOICE, seen(1, question=None, choices=[MARK], answer=0, hint=MARK)),
    "choices": (CHOICE, seen(1, question=MARK, choices=MARK, answer=0, hint=MARK)),
    "choice": (CHOICE, seen(1, question=MARK, choices=[MARK, None], answer=0, hint=MARK)),
    "answer": (CHOICE, seen(1, question=MARK, choices=["a", MARK], answer=MARK, hint=MARK)),
    "hint": (CHOICE, seen(1, question=MARK, choices=["a", MARK], answer=1, hint=[MARK])),
    "long prompt": (CHOICE, seen(1, question=MARK * 90, choices=["a", MARK], answer=1, hint=MARK)),
    **{f"DICOM: {name}": (CLASS | {"task.class-names": "a,b,c"}, scans(data)) for name, (data, _) in REFUSED.items()},
    **{
        f"NIfTI: {name}": (CLASS | {"task.class-names": "a,b,c"}, scans(data, "1.nii"))
        for name, (data, _) in test_nifti_images.REFUSED.items()
    },
    **{f"Excel: {name}": (TEXT, raw(data, "xlsx")) for name, (data, _) in test_excel_files.REFUSED.items()},
}


def take_part(keys: dict[str, object], folder: Path, shelf: Path) -> None:
    """What a site and a server do with the rows."""
    keys = dict(keys)
    shares, second = keys.pop("shares", 1), keys.pop("second", False)
    name = METHOD.get(str(keys["task.name"]), "fedavg")
    config = run_config.parse({"method.name": name, "train.batch-size": 2, "task.from-scratch": True, **keys})
    task = tasks.load_task(config, strategies.create_method(name, config.method.params).adapter, "cpu")
    if config.task.messages_column:
        task.base.tokenizer.chat_template = CHAT  # type: ignore[attr-defined]
    share = DatasetShard(0, int(str(shares))) if shares != 1 else None
    if second:  # examples of another data set come first
        (folder / "second").mkdir()
        seen(f"{MARK} senior")(folder / "second")
        task.encode(task.examples(folder / "second", "train"))
    rows = task.prepare(folder, "train", share, shelf).rows
    task.collate(list(rows))  # type: ignore[attr-defined]
    examples = task.examples(folder, "test")
    task.evaluate(task.initial(rng.initial_stream(0, "weights")), examples, False)


def places_of_errors() -> dict[tuple[str, int, int], str]:
    """Each place that builds an error about data: its file, its lines, and the first words of its text."""
    places = {}
    for file in [*(ROOT / "tasks").glob("*.py"), *(ROOT / "data").glob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "TaskError":
                text = "".join(c.value for c in ast.walk(node) if isinstance(c, ast.Constant) and type(c.value) is str)
                if any(key in text for key in ("task.data:", "task.partition")):
                    places[str(file.resolve()), node.lineno, node.end_lineno or node.lineno] = text
    return places


@pytest.mark.long
def test_no_error_log_message_or_file_has_a_value_of_a_row(tmp_path, monkeypatch, capfd):
    built: set[tuple[str, int]] = set()
    plain = TaskError.__init__

    def init(self, *args):
        frame = sys._getframe(1)
        built.add((str(Path(frame.f_code.co_filename).resolve()), frame.f_lineno))
        plain(self, *args)

    monkeypatch.setattr(TaskError, "__init__", init, raising=False)
    monkeypatch.setenv(failure_reason.VARIABLE, "")
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    loggers = [logging.getLogger(), logging.getLogger("flwr")]
    for logger in loggers:
        logger.addHandler(handler)
    level = loggers[0].level
    loggers[0].setLevel(logging.DEBUG)
    left: dict[str, str] = {}
    accepted: list[str] = []
    try:
        for number, (name, (keys, write)) in enumerate(CASES.items()):
            folder, shelf = tmp_path / str(number), tmp_path / f"{number} state"
            folder.mkdir()
            shelf.mkdir(mode=0o700)
            write(folder)

            def takes(message, context, keys=keys, folder=folder, shelf=shelf):
                take_part(keys, folder, shelf)
                return []  # an upload: the test's rows were accepted

            monkeypatch.setattr(client, "_take_part", takes)
            reply = client.train_app(Message(RecordDict(), 7, MessageType.TRAIN), Context(1, 7, {}, RecordDict(), {}))
            cause = failure_reason.take_failure()
            if not cause:
                accepted.append(name)
            flat = {k: v for k, v in keys.items() if "." in k}
            task = run_config.parse(flat | {"task.data": str(folder), "task.evaluation": str(folder)}).task
            said = [check.text for check in data_checks.check_run_data(task, [])]
            printed = "".join(capfd.readouterr())
            files = "".join(str(p) + p.read_bytes().decode("latin-1") for p in shelf.rglob("*") if p.is_file())
            left[name] = "\n".join([reply.error.reason, cause, *said, printed, files, stream.getvalue()])
            stream.seek(0)
            stream.truncate()
    finally:
        loggers[0].setLevel(level)
        for logger in loggers:
            logger.removeHandler(handler)
    quoted = {name: text[max(0, text.index(MARK) - 300) :][:700] for name, text in left.items() if MARK in text}
    assert not quoted
    assert not accepted
    assert {n for n, text in left.items() if not text.startswith("TaskError")} == {"long prompt"}  # a ConfigError
    missed = [
        (file, first, text)
        for (file, first, last), text in places_of_errors().items()
        if not any(at == file and first <= line <= last for at, line in built)
        and not any(words in text for words in WITHOUT_ROWS)
    ]
    assert not missed


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "no value (null)"), (True, "true or false"), (1931, "an integer"), (1.5, "a number with a fraction"),
        (float("nan"), "no number (NaN or infinite)"), (" \n", "an empty text"), (MARK, "a text of 9 characters"),
        (b"abc", "3 bytes"), ({MARK: 1}, "an object with 1 keys"), ([MARK, 2], "a list of 2 entries"),
        (pytest, "a value of type module"),
    ],
)  # fmt: skip
def test_a_value_is_described_by_type_and_length(value, text):
    assert describe_value(value) == text
