"""Token classification: a language model learns the tag of each word of a text, and so the entities in it.

Base: any token classification model in transformers, encoder (BERT) or decoder (Llama). `data.tagged_words` lists the
formats for words and tags, and `data.entity_tags` lists the tags. A text is encoded as a whole. As in the transformers
example, a word's first token carries its tag, and its other tokens have no tag. A word that begins inside another
word's token has no token of its own: it is not trained on or scored, and the log counts these words. Texts are padded
on the right and, if too long, truncated at the end (see `token_limits`); words in the removed part are not trained on
or scored, and the log says how many texts are truncated.

A base without a head gets a head drawn from the run's seed; see `models.sequence_classifier`. LoRA also adds a pair to
each linear layer in the head, and the exported files contain the whole head.

Loss: the mean cross entropy over words. Under dp.*, it is the mean over one text, whose gradient is clipped as a whole.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from fedveil.config import RunConfig
from fedveil.contract.adapter import Adapter
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import DatasetShard, ExamplePrediction, Examples, Rows, Task, TaskInfo
from fedveil.data import entity_tags, tables, tagged_words, token_limits
from fedveil.data.class_names import ClassNumbering
from fedveil.data.entity_tags import TagSet
from fedveil.data.reading_notes import note
from fedveil.data.tagged_words import TaggedWords, TaggedWordsReader
from fedveil.errors import TaskError
from fedveil.models import base_files, bundled, loading, sequence_classifier
from fedveil.models.library_logging import quiet_libraries
from fedveil.models.loaded_model import LoadedModel
from fedveil.training import classifier_inputs, entity_scores
from fedveil.training.adapter_task import AdaptedTask, check_task_config
from fedveil.training.scored_examples import draw_scored

__all__ = ["TaggedBatch", "TaggedText", "TokenClassification", "require_token_offsets"]

NO_TAG = -100  # for a token that does not begin a word; torch's cross entropy ignores it
_AT_ONCE = 1000  # examples tokenized together
_SPACE_MARKS = ("▁", "Ġ")  # a space in the tokens of SentencePiece, and of byte-level BPE
log = logging.getLogger("fedveil.data")


INFO = TaskInfo(
    mounts=("layers",),
    columns=lambda task: (task.source_column, task.target_column),
    texts=lambda task: (task.source_column, task.target_column),
    tiny=lambda: bundled.bundled_folder("token-classification"),
    metrics=entity_scores.metrics_of,
    tags=True,
)


def create(config: RunConfig, adapter: Adapter, device: str) -> Task:
    """Create the task of `config`; the base is loaded on first use.

    Raises:
        ConfigError: there are no class names, the tags are not valid IOB2 tags, or the task does not support the
            adapter or a key.
        TaskError: there is no base model at that path.
    """
    check_task_config(config, adapter, INFO)
    tags = TagSet.from_names(config.task.class_list)
    return TokenClassification(config, adapter, loading.pick_device(device), tags)


def require_token_offsets(tokenizer: Any, model: str) -> None:
    """Raise TaskError if the tokenizer of the base `model` does not give the positions of its tokens in a text."""
    if not tokenizer.is_fast:
        raise TaskError(
            f'task.model: the tokenizer {type(tokenizer).__name__} in "{model}" does not give the positions of its '
            "tokens in a text; add tokenizer.json to its folder, or use another base"
        )


@dataclass(frozen=True)
class TaggedText:
    """One encoded text.

    Attributes:
        ids: the token ids, including tokens that the tokenizer adds.
        tags: the tag number of the word that each token begins, or NO_TAG.
        types: the token types, if the model reads them.
        whole: the number of tokens before truncation.
    """

    ids: list[int]
    tags: list[int]
    types: list[int] = field(default_factory=list)
    whole: int = 0

    @property
    def length(self) -> int:
        """Return the number of tokens."""
        return len(self.ids)


@dataclass(frozen=True)
class TaggedBatch:
    """A batch of texts, padded on the right.

    Attributes:
        ids, mask: the token ids, and a mask that is 1 except at padding.
        tags: the tag number at the first token of each word, and NO_TAG elsewhere.
        terms: the number of words, which is the number of terms in the loss.
        tokens: the number of tokens, without padding.
        types: token types; None if the model does not read them.
    """

    ids: Int[Tensor, "rows length"]
    mask: Int[Tensor, "rows length"]
    tags: Int[Tensor, "rows length"]
    terms: int
    tokens: int
    types: Tensor | None = None

    def pinned(self) -> TaggedBatch:
        """Return the batch in page-locked memory, whose copy to a GPU is asynchronous."""
        return self._each(Tensor.pin_memory)

    def to(self, device: torch.device) -> TaggedBatch:
        """Return the batch on `device`; pinned memory is copied asynchronously."""
        return self._each(lambda t: t.to(device, non_blocking=True))

    def _each(self, change: Callable[[Tensor], Tensor]) -> TaggedBatch:
        ids, mask, tags = map(change, (self.ids, self.mask, self.tags))
        return replace(self, ids=ids, mask=mask, tags=tags, types=None if self.types is None else change(self.types))


@final
class TokenClassification(AdaptedTask):
    """A language model that tags words."""

    def __init__(self, config: RunConfig, adapter: Adapter, device: torch.device, tags: TagSet) -> None:
        super().__init__(config, adapter, device)
        self.names = tags.tags
        self._numbering = ClassNumbering(config.task.model_copy(update={"class_names": json.dumps(list(tags.tags))}))
        self._reader = TaggedWordsReader(config.task, tags)

    @override
    def _load(self) -> LoadedModel:
        base = sequence_classifier.load_sequence_classifier(
            self.config, self.adapter, self.device, INFO.tiny(), self.names, sequence_classifier.OF_TOKENS
        )
        require_token_offsets(base.tokenizer, self.config.task.model)
        return base

    @override
    def examples(self, data: Path, split: str, share: DatasetShard | None = None) -> Examples:
        """Read the examples as `DatasetTable.examples` does, with any tag names that a Parquet file stores."""
        task = self.config.task
        table = tables.read_for_task(data, split, INFO, task)
        feature = table.rows.features[task.target_column]
        if form := tagged_words.describe_form(feature):
            note(f'"{data}": column "{task.target_column}" is read as {form}')
        table = replace(table, class_names=self.stored_names(feature, table.folder))
        return table.examples(split, share, self.config)

    def stored_names(self, feature: Any, folder: str) -> tuple[str, ...]:
        """Return the names of tags in `feature`, the target column's type of `datasets`; () if it has none.

        They are recorded for `require_shared_classes` as the names of the data in `folder`.
        """
        stored = tuple(getattr(getattr(feature, "feature", None), "names", None) or ())
        if stored:
            self._numbering.note(entity_tags.declared_tags(stored, self.config.task.tag_scheme), folder)
        return stored

    @override
    def require_shared_classes(self) -> None:
        self._numbering.require_shared()

    @override
    def encode(self, examples: Examples) -> list[TaggedText]:
        """Tokenize every example.

        Raises:
            TaskError: an example has no words or has invalid tags, with the file and row; or the tag names stored in
                the file differ from those of the run.
        """
        self.require_shared_classes()
        limit = self.config.task.max_tokens or self._measure_length(examples)
        rows, lost, trimmed = list[TaggedText](), 0, 0
        for start in range(0, len(examples), _AT_ONCE):
            part = list(examples[start : start + _AT_ONCE])
            read = [self._reader.read(example) for example in part]
            for example, row, missed in zip(part, *self._tokenize(read, limit), strict=True):
                if max(row.tags) == NO_TAG:
                    raise TaskError(
                        f"task.data: no word in {example.where} begins a token of the base within the first "
                        f"{limit} tokens (task.max-tokens); correct or drop the row"
                    )
                rows.append(row)
                lost += missed
            trimmed += sum(each.trimmed for each in read)
        if trimmed:
            log.warning("task.data: %s spans begin or end with whitespace, which is ignored", f"{trimmed:,}")
        if lost:
            log.warning(
                "task.data: %s words do not begin a token of the base, so they are neither learned nor scored",
                f"{lost:,}",
            )
        classifier_inputs.report_truncated(
            [row.length for row in rows],
            [row.whole for row in rows],
            self.config.task.max_tokens,
            self.base.context,
            self.config.task.model,
        )
        return rows

    @override
    def find_cut(self, rows: Rows) -> Bool[np.ndarray, " rows"]:
        return np.array([row.length < row.whole for row in rows], bool)

    def _measure_length(self, examples: Examples) -> int:
        """Return the maximum number of tokens in a text, from the lengths of a sample of texts, which it tokenizes."""
        texts = [self._reader.read(examples[i]).text for i in token_limits.spread_indices(len(examples))]
        with quiet_libraries():  # transformers warns about each text that is too long
            ids = self.base.tokenizer(texts, truncation=False)["input_ids"] if texts else []
        return token_limits.length_of([len(each) for each in ids], self.base.context)

    def _tokenize(self, read: Sequence[TaggedWords], limit: int) -> tuple[list[TaggedText], list[int]]:
        """Return the encoded texts, at most `limit` tokens each, and how many words in each do not begin a token."""
        tokenizer, texts = self.base.tokenizer, [each.text for each in read]
        with quiet_libraries():
            wanted = {"return_offsets_mapping": True, "return_token_type_ids": self._has_types}
            short = whole = tokenizer(texts, truncation=False, **wanted)
            if max(map(len, whole["input_ids"])) > limit:
                short = tokenizer(texts, truncation=True, max_length=limit, **wanted)
        base_files.check_tokens(self.config.task.model, map(max, filter(None, short["input_ids"])), self._token_count)
        rows, lost = list[TaggedText](), list[int]()
        for at, words in enumerate(read):
            tags, everywhere = (
                _tag_tokens(words, each["offset_mapping"][at], [i in self._spaces for i in each["input_ids"][at]])
                for each in (short, whole)
            )
            types = list(short["token_type_ids"][at]) if self._has_types else []
            rows.append(TaggedText(list(short["input_ids"][at]), tags, types, len(whole["input_ids"][at])))
            lost.append(len(words.words) - sum(tag != NO_TAG for tag in everywhere))
        return rows, lost

    @cached_property
    def _spaces(self) -> frozenset[int]:
        """Return the tokens that are only a space."""
        ids = self.base.tokenizer.get_vocab()
        return frozenset(ids[mark] for mark in _SPACE_MARKS if mark in ids)

    @cached_property
    def _token_count(self) -> int:
        """Return the base's vocabulary size."""
        return base_files.embedding_rows(self.base.model) or sys.maxsize

    @cached_property
    def _has_types(self) -> bool:
        return "token_type_ids" in sequence_classifier.accepted_inputs(self.base.model, self.base.tokenizer)

    @override
    def _probe_rows(self) -> Rows:
        return [TaggedText([1, 2, 3], [NO_TAG, 0, 0], [0, 0, 0] if self._has_types else [])] * 2

    @override
    def collate(self, rows: Sequence[TaggedText]) -> TaggedBatch:
        """Return one batch, on the CPU."""
        ids = classifier_inputs.pad_right([row.ids for row in rows], self.base.model.config.pad_token_id)
        mask = classifier_inputs.pad_right([[1] * row.length for row in rows], 0)
        tags = classifier_inputs.pad_right([row.tags for row in rows], NO_TAG)
        types = classifier_inputs.pad_right([row.types for row in rows], 0) if self._has_types else None
        terms = sum(tag != NO_TAG for row in rows for tag in row.tags)
        return TaggedBatch(ids, mask, tags, terms, sum(row.length for row in rows), types)

    def _logits(self, batch: TaggedBatch) -> Float[Tensor, "rows length classes"]:
        return self._forward(classifier_inputs.model_inputs(batch.ids, batch.mask, batch.types)).float()

    def samples(self, rows: Sequence[TaggedText]) -> tuple[Tensor, ...]:
        """Return token ids, masks, tags and, if the model reads them, token types; see `PerExampleLoss`.

        Raises TaskError for an encoder with layers that attend only to nearby tokens, such as ModernBERT.
        """
        classifier_inputs.require_whole_attention(self.base, self.config.task.model)
        batch = self.collate(rows).to(self.device)
        return (batch.ids, batch.mask, batch.tags, *(() if batch.types is None else (batch.types,)))

    def sample_loss(self, weights: Mapping[str, Tensor], *sample: Tensor) -> Tensor:
        """Return the mean loss per word of one text."""
        ids, mask, tags, *types = sample
        seen = classifier_inputs.example_mask(self.base, ids, mask)
        inputs = classifier_inputs.model_inputs(ids[None], seen, types[0][None] if types else None)
        counted = tags != NO_TAG
        logits = self._logits_at(weights, inputs)[0].float()
        losses = functional.cross_entropy(logits, tags.clamp(min=0), reduction="none")
        return (losses * counted).sum() / counted.sum()

    @override
    def loss_sum(self, batch: TaggedBatch) -> Tensor:
        """Return the loss summed over the words in `batch`, which is on the device.

        Raises:
            ConfigError: train.compile is set on a machine that does not support it.
        """
        return _loss_sum(self._logits(batch), batch.tags)

    @override
    @torch.no_grad()
    def mean_loss(self, encoded: Sequence[TaggedText]) -> float:
        """Return the mean loss per word with the last loaded weights."""
        loss = words = 0.0
        for logits, batch in self._scored(encoded):
            loss, words = loss + float(_loss_sum(logits, batch.tags)), words + batch.terms
        return loss / words

    def _scored(self, encoded: Sequence[TaggedText]) -> Iterator[tuple[Tensor, TaggedBatch]]:
        """Yield the logits of the texts, in order, with their batches, on the CPU."""
        for part in self._parts(len(encoded)):
            batch = self.collate([encoded[i] for i in part])
            yield self._logits(batch.to(self.device)).cpu(), batch

    @override
    @torch.no_grad()
    def evaluate(self, weights: Weights, examples: Examples, generate: bool) -> dict[str, float]:
        """Return "loss" and the scores of `entity_scores` over evaluate.eval-examples examples; see `draw_scored`.

        Scores that are undefined for these examples are omitted, and the log says so.

        Raises:
            TaskError: there are no examples, the weights do not match the spec, evaluate.metric is a score that does
                not exist, or as in `encode`.
        """
        if not examples:
            raise TaskError("examples: there are none to score; correct task.evaluation")
        self.show(weights)
        loss, words = 0.0, 0
        predicted, wanted = list[list[str]](), list[list[str]]()
        for logits, batch in self._scored(self.encode(draw_scored(examples, self.config))):
            loss, words = loss + float(_loss_sum(logits, batch.tags)), words + batch.terms
            for best, tags in zip(logits.argmax(-1), batch.tags, strict=True):
                learned = tags != NO_TAG
                predicted.append([self.names[number] for number in best[learned].tolist()])
                wanted.append([self.names[number] for number in tags[learned].tolist()])
        scores = entity_scores.score_sentences(predicted, wanted, self.config.evaluate.metric)
        return {"loss": loss / words, **scores}

    @override
    @torch.no_grad()
    def predict(
        self, weights: Weights, rows: Sequence[TaggedText], generate: bool = False
    ) -> Iterator[ExamplePrediction]:
        """Yield only the slice "target", with one position per word that predicts the word's tag."""
        self.show(weights)
        for logits, batch in self._scored(rows):
            for each, tags in zip(logits, batch.tags, strict=True):
                learned = tags != NO_TAG
                yield ExamplePrediction({"target": each[learned]}, tags[learned].long())


def _loss_sum(logits: Float[Tensor, "rows length classes"], tags: Int[Tensor, "rows length"]) -> Tensor:
    """Return the cross entropy summed over words."""
    return functional.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=NO_TAG, reduction="sum")


def _tag_tokens(words: TaggedWords, offsets: Sequence[tuple[int, int]], spaces: Sequence[bool]) -> list[int]:
    """Return, for each token, the tag of the word that the token begins, or NO_TAG.

    A word begins at the first token that contains one of its characters and does not begin an earlier word.

    Args:
        offsets: the position of each token in the text, as [start, end); empty for tokens that represent no text.
        spaces: whether each token is only a space. If the tokenizer adds such a token before a word, its offsets are
            those of the word's first character, which also belongs to the next token.
    """
    tags, at = [NO_TAG] * len(offsets), 0
    for number, (start, end) in enumerate(offsets):
        if spaces[number] and number + 1 < len(offsets) and offsets[number + 1][0] == start:
            continue
        while start < end and words.text[start].isspace():
            start += 1
        while at < len(words.words) and words.words[at][1] <= start:
            at += 1
        if start < end and at < len(words.words) and words.words[at][0] <= start:
            tags[number] = words.tags[at]
            at += 1
    return tags
