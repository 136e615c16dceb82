"""Preview a run's examples as they will be trained, for `fedveil doctor` at a site: three full examples, and counts.

Only the base's tokenizer and settings are loaded, from a folder or the cache, never its weights. Nothing is written.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedveil import strategies, tasks
from fedveil.config import RunConfig
from fedveil.console.doctor.checks import CheckResult
from fedveil.contract.task import Example, ExampleOrigin, Examples, Rows
from fedveil.data import columnar_files, file_probe, images, tables, token_limits
from fedveil.data.row_values import filled_text
from fedveil.data.source_template import SourceTemplate
from fedveil.data.split_files import split_files
from fedveil.errors import TaskError
from fedveil.models import loading, sequence_classifier
from fedveil.models.loaded_model import LoadedModel
from fedveil.sanitize import sanitize
from fedveil.tasks.text_classification import TextClassification
from fedveil.tasks.text_generation import TextGeneration
from fedveil.tasks.token_classification import NO_TAG, TaggedText, TokenClassification, require_token_offsets
from fedveil.tasks.vision_language import VisionLanguage

_TASKS = ("text-classification", "text-generation", "token-classification", "vision-language")
_MOST_TEXTS, _MOST_IMAGES = 1000, 50  # rows to prepare; an image takes much longer
_SHOWN = 3
_MOST_SHOWN = 1500  # characters of a prompt or an answer

TextTask = TextClassification | TextGeneration | TokenClassification | VisionLanguage


@dataclass(frozen=True)
class ExamplePreview:
    """The first rows of a split, prepared as for training.

    Attributes:
        result: the verdict on them, with any problems.
        lines: the first three examples, shown in full.
        longest: the number of tokens of the longest prepared example; 0 if there is none.
    """

    result: CheckResult
    lines: list[str]
    longest: int = 0


def preview_examples(name: str, config: RunConfig, data: Path, split: str) -> ExamplePreview | None:
    """Return the examples in `data` as a run prepares them; None if the task has no texts or the base is not local.

    Raises ConfigError or TaskError if a run would refuse the base or the run config.
    """
    _, is_folder = loading.find_model(config.task.model, tasks.task_info(config.task.name).tiny())
    if config.task.name not in _TASKS or not is_folder:
        return None
    method = strategies.create_method(config.method.name, config.method.params)
    task = tasks.load_task(config, method.adapter, "cpu")
    if not isinstance(task, TextTask):
        return None
    task.base = _base_of(task)
    most = _MOST_IMAGES if isinstance(task, VisionLanguage) else _MOST_TEXTS
    examples = _first_examples(task, data, split, most)
    with _silent("fedveil.data"):
        kept, refused, empty = _sort_out(task, examples)
        rows, problem = _encoded(task, [example for example, _ in kept])
    cut, count = int(np.sum(task.find_cut(rows))), len(examples)
    parts = [
        f"of the first {count:,} rows, {empty:,} are empty and {len(refused):,} are refused",
        f"{cut:,} of {len(rows):,} examples are truncated ({100 * cut / max(1, len(rows)):.1f} %)",
    ]
    longest = max((row.length for row in rows), default=0)
    parts += [f"the longest has {longest:,} tokens"] if longest else []
    parts += [*([problem] if problem else []), *refused[:1]]
    is_bad = bool(problem or refused or not rows)
    much = cut > token_limits.MAX_CUT * len(rows)
    result = CheckResult(f"{name} as trained", "fail" if is_bad else "warn" if much else "ok", "; ".join(parts))
    origins = [example for example, count in kept for _ in range(count)]
    shown = enumerate(zip(origins, rows[:_SHOWN], strict=False), 1)
    lines = [line for number, (example, row) in shown for line in _shown(task, example, number, row)]
    return ExamplePreview(result, lines, longest)


def _base_of(task: TextTask) -> LoadedModel:
    """Return the base without its weights."""
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoProcessor,
        AutoTokenizer,
    )

    config, tiny = task.config, tasks.task_info(task.config.task.name).tiny()
    match task:
        case TextGeneration():
            return loading.load_without_weights(config, task.adapter, tiny, AutoModelForCausalLM, AutoTokenizer)
        case VisionLanguage():
            return loading.load_without_weights(config, task.adapter, tiny, AutoModelForImageTextToText, AutoProcessor)
    kind = sequence_classifier.OF_TOKENS if isinstance(task, TokenClassification) else sequence_classifier.OF_TEXTS
    base = loading.load_without_weights(config, task.adapter, tiny, kind.loader, AutoTokenizer)
    if isinstance(task, TokenClassification):
        require_token_offsets(base.tokenizer, config.task.model)
    return replace(base, context=sequence_classifier.context_of(base.model, base.tokenizer, config))


def _first_examples(task: TextTask, data: Path, split: str, most: int) -> list[Example]:
    """Return the first rows of a split. Only the beginning of a large file is read."""
    config = task.config
    info = tasks.task_info(config.task.name)
    columns, files = info.columns(config.task), split_files(data, split)
    if file_probe.is_small(files):
        every = _all_examples(task, data, split)
        return list(every[: min(most, len(every))])
    file = files[0]
    names = _stored_names(task, file)
    most = min(most, file_probe.probe_files(files[:1], columns).rows)
    values = [[value for value, _ in file_probe.first_rows(file, column, most)] for column in columns]
    return [
        Example(dict(zip(columns, row, strict=True)), ExampleOrigin(str(file), number), str(file.parent), names)
        for number, row in enumerate(zip(*values, strict=True), 1)
    ]


def _all_examples(task: TextTask, data: Path, split: str) -> Examples:
    """Return the examples of small files, also those without a text, which other tasks than these two may drop."""
    if isinstance(task, TextClassification | TokenClassification):
        return task.examples(data, split)
    section = task.config.task
    info = tasks.task_info(section.name)
    table = tables.read_for_task(data, split, info, section)
    if section.image_column in info.columns(section):
        table = images.locate_pictures(table, section.image_column)
    return table.examples(split, None, task.config)


def _stored_names(task: TextTask, file: Path) -> tuple[str, ...]:
    """Return the names of classes or tags that a file stores, as a run reads them."""
    if not isinstance(task, TextClassification | TokenClassification) or not columnar_files.is_columnar(file):
        return ()
    column = task.config.task.target_column
    features = tables.features_of(columnar_files.read_schema(file), file, [column])
    return task.stored_names(features.get(column), str(file.parent))


def _sort_out(task: TextTask, rows: Sequence[Example]) -> tuple[list[tuple[Example, int]], list[str], int]:
    """Return the rows that can be prepared (each with its number of examples), the reasons for refusing others, and
    the number of rows without a text.
    """
    texts, source = (
        tasks.task_info(task.config.task.name).texts(task.config.task),
        SourceTemplate.from_task(task.config.task),
    )
    others = [column for column in texts if column not in source.columns]
    kept, refused, empty = list[tuple[Example, int]](), list[str](), 0
    for example in rows:
        if isinstance(task, TextGeneration):
            lacks = task.lacks_text(example)
        elif isinstance(task, TokenClassification):
            lacks = not example.values.get(task.config.task.source_column)
        else:
            lacks = any(filled_text(example.values.get(column)) is None for column in others)
            lacks |= len(others) < len(texts) and source.fill(example.values) is None
        empty += lacks
        if lacks and task.config.task.empty_texts == "drop":
            continue
        try:
            kept.append((example, len(task.encode([example]))))
        except TaskError as error:
            refused.append(str(error))
    return kept, refused, empty


def _encoded(task: TextTask, examples: Sequence[Example]) -> tuple[Rows, str]:
    """Return the prepared examples, and the reason why a run would refuse them together, or ""."""
    try:
        return task.encode(examples) if examples else [], ""
    except TaskError as error:
        return [], str(error)


def _shown(task: TextTask, example: Example, number: int, row: Any) -> Iterator[str]:
    """Yield an example as it is trained, and, for comparison, the prompt that the base's chat template would give."""
    tokenizer = task.base.tokenizer
    if isinstance(task, TextClassification):
        label = (
            [name for name, is_one in zip(task.names, row.label, strict=True) if is_one]
            if isinstance(row.label, tuple)
            else [task.names[row.label]]
        )
        yield f"example {number}, {example.where}: {row.length:,} tokens"
        yield f"  text    {_decoded(tokenizer, row.ids)}"
        yield f"  classes {', '.join(label) or 'none'}"
        return
    if isinstance(task, TokenClassification):
        learned = sum(tag != NO_TAG for tag in row.tags)
        yield f"example {number}, {example.where}: {row.length:,} tokens, of which {learned:,} begin a word"
        yield f"  words   {_printable(_tagged(task, row))}"
        return
    if row.gaps:
        yield f"example {number}, {example.where}: {row.length:,} tokens, of which {len(row.targets()):,} are learned"
        bounds = [0, row.start, *(bound for gap in row.gaps for bound in gap), row.length]
        for at, (start, end) in enumerate(itertools.pairwise(bounds)):
            yield f"  {'answer' if at % 2 else 'prompt'}  {_decoded(tokenizer, row.ids[start:end])}"
        return
    image = task.base.image_token
    prompt, answer = ([i for i in part if i != image] for part in (row.ids[: row.start], row.ids[row.start :]))
    yield f"example {number}, {example.where}: {row.length:,} tokens, of which {len(row.ids) - row.start:,} are learned"
    yield f"  prompt  {_decoded(tokenizer, prompt)}"
    yield f"  answer  {_decoded(tokenizer, answer)}"
    if isinstance(task, TextGeneration) and tokenizer.chat_template and not task.config.task.messages_column:
        yield f"  the base's own chat template would give this prompt: {_own_prompt(task, example)}"


def _tagged(task: TokenClassification, row: TaggedText) -> str:
    """Return the words of a text, each with its tag: "Ada/B-PER Lovelace/I-PER wrote/O"."""
    tokenizer, starts = task.base.tokenizer, [at for at, tag in enumerate(row.tags) if tag != NO_TAG]
    special = set(tokenizer.all_special_ids)
    words = []
    for start, end in itertools.pairwise([*starts, row.length]):
        word = tokenizer.decode([i for i in row.ids[start:end] if i not in special]).strip()
        words.append(f"{word}/{task.names[row.tags[start]]}")
    return " ".join(words)


def _own_prompt(task: TextGeneration, example: Example) -> str:
    source = SourceTemplate.from_task(task.config.task).fill(example.values) or ""
    messages = [{"role": "user", "content": source}]
    try:
        text = task.base.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # an untrusted template may raise any error
        return f"(it cannot be rendered: {type(error).__name__})"
    return _printable(str(text))


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    return _printable(tokenizer.decode(ids, skip_special_tokens=False))


def _printable(text: str) -> str:
    """Return a text in quotes on one line, with line breaks written as \\n."""
    cut = text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN // 2]} ... {text[-_MOST_SHOWN // 2 :]}"
    return sanitize(json.dumps(cut, ensure_ascii=False), 2 * _MOST_SHOWN)


@contextmanager
def _silent(name: str) -> Iterator[None]:
    """Silence a logger whose messages the preview counts itself."""
    log = logging.getLogger(name)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
