"""Text classification: a language model learns the class of a text, or with task.multi-label all its classes.

Base: any sequence classification model in transformers that reads one text: an encoder (BERT) or a decoder (Llama,
which pools the last token before the padding). Texts are padded on the right and, if too long, truncated at the end
(see `token_limits`); the log says how many are truncated. A base without a head gets a head drawn from the run's seed;
see `models.sequence_classifier`. LoRA also adds a pair to each linear layer in the head, and the exported files contain
the whole head.

| in task.target-column | one class | task.multi-label |
|---|---|---|
| a name in task.class-names | that class | only that label |
| several names separated by task.label-separator | refused | those labels |
| an integer from 0, also as text, unless a class name is an integer | the class with that number | only that label |
| a list of names or integers | refused | those labels; no label for an empty list |
| empty text | refused | no label |
| a missing value | refused | refused |

Loss: the mean cross entropy over texts or, with several labels, the mean binary cross entropy over labels and texts.
"""

from __future__ import annotations

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
from typing_extensions import override

from fedveil.config import RunConfig
from fedveil.contract.adapter import Adapter
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import (
    DatasetShard,
    Example,
    ExamplePrediction,
    Examples,
    Rows,
    Task,
    TaskInfo,
)
from fedveil.data import class_labels, tables, token_limits
from fedveil.data.class_names import ClassNumbering
from fedveil.data.source_template import SourceTemplate
from fedveil.errors import TaskError
from fedveil.models import base_files, bundled, loading, sequence_classifier
from fedveil.models.library_logging import quiet_libraries
from fedveil.models.loaded_model import LoadedModel
from fedveil.training import class_scores, classifier_inputs
from fedveil.training.adapter_task import AdaptedTask, check_task_config
from fedveil.training.scored_examples import draw_scored

__all__ = ["TextClassification", "class_names_of"]

_AT_ONCE = 1000  # examples tokenized together
log = logging.getLogger("fedveil.data")


INFO = TaskInfo(
    mounts=("layers",),
    columns=lambda task: (*SourceTemplate.from_task(task).columns, task.target_column),
    texts=lambda task: SourceTemplate.from_task(task).columns,
    templates=True,
    tiny=lambda: bundled.bundled_folder("text-classification"),
    metrics=class_scores.metrics_of,
    labels=True,
)


def create(config: RunConfig, adapter: Adapter, device: str) -> Task:
    """Create the task of `config`; the base is loaded on first use.

    Raises:
        ConfigError: class names are missing or invalid, or the task does not support the adapter or a key.
        TaskError: there is no base model at that path.
    """
    check_task_config(config, adapter, INFO)
    return TextClassification(config, adapter, loading.pick_device(device), class_names_of(config))


def class_names_of(config: RunConfig) -> tuple[str, ...]:
    """Return the names in task.class-names, by number.

    Raises ConfigError if there are fewer than two names, or if a name contains the label separator.
    """
    return class_labels.require_class_names(config.task)


@dataclass(frozen=True)
class LabelledText:
    """One encoded text.

    Attributes:
        ids: the token ids, including tokens that the tokenizer adds.
        label: the class or, with several labels, 1.0 or 0.0 for each class.
        types: the token types, if the model reads them.
        whole: the number of tokens before truncation.
    """

    ids: list[int]
    label: int | tuple[float, ...]
    types: list[int] = field(default_factory=list)
    whole: int = 0

    @property
    def length(self) -> int:
        """Return the number of tokens."""
        return len(self.ids)


@dataclass(frozen=True)
class LabelledTextBatch:
    """A batch of texts, padded on the right.

    Attributes:
        ids, mask: the token ids, and a mask that is 1 except at padding.
        labels: the class of each text (int64), or 0 or 1 for each text and class (float32).
        tokens: the number of tokens, without padding.
        types: token types; None if the model does not read them.
    """

    ids: Int[Tensor, "rows length"]
    mask: Int[Tensor, "rows length"]
    labels: Tensor
    tokens: int
    types: Tensor | None = None

    @property
    def terms(self) -> int:
        """Return the number of texts, which is the number of terms in the loss."""
        return len(self.labels)

    def pinned(self) -> LabelledTextBatch:
        """Return the batch in page-locked memory, whose copy to a GPU is asynchronous."""
        return self._each(Tensor.pin_memory)

    def to(self, device: torch.device) -> LabelledTextBatch:
        """Return the batch on `device`; pinned memory is copied asynchronously."""
        return self._each(lambda t: t.to(device, non_blocking=True))

    def _each(self, change: Callable[[Tensor], Tensor]) -> LabelledTextBatch:
        ids, mask, labels = map(change, (self.ids, self.mask, self.labels))
        return replace(
            self, ids=ids, mask=mask, labels=labels, types=None if self.types is None else change(self.types)
        )


@final
class TextClassification(AdaptedTask):
    """A language model that classifies texts."""

    def __init__(self, config: RunConfig, adapter: Adapter, device: torch.device, names: tuple[str, ...]) -> None:
        super().__init__(config, adapter, device)
        self.names = names
        self._numbering = ClassNumbering(config.task)

    @override
    def _load(self) -> LoadedModel:
        return sequence_classifier.load_sequence_classifier(
            self.config, self.adapter, self.device, INFO.tiny(), self.names
        )

    @override
    def examples(self, data: Path, split: str, share: DatasetShard | None = None) -> Examples:
        """Read the examples as `DatasetTable.examples` does, with any class names that a Parquet file stores."""
        task = self.config.task
        table = tables.read_for_task(data, split, INFO, task)
        stored = self.stored_names(table.rows.features[task.target_column], table.folder)
        return replace(table, class_names=stored).examples(split, share, self.config)

    def stored_names(self, feature: Any, folder: str) -> tuple[str, ...]:
        """Return the class names in `feature`, the target column's type of `datasets`; () if it has none.

        They are recorded for `require_shared_classes` as the names of the data in `folder`.
        """
        stored = getattr(feature, "names", None) or getattr(getattr(feature, "feature", None), "names", None)
        self._numbering.note(tuple(stored or ()), folder)
        return tuple(stored or ())

    @override
    def require_shared_classes(self) -> None:
        self._numbering.require_shared()

    @override
    def encode(self, examples: Examples) -> list[LabelledText]:
        """Tokenize every example. Raises TaskError, with file and row, for missing text or an invalid label."""
        given, context, model = self.config.task.max_tokens, self.base.context, self.config.task.model
        rows: list[LabelledText] = []
        limit = given or self._measure_length(examples)
        for start in range(0, len(examples), _AT_ONCE):
            part = list(examples[start : start + _AT_ONCE])
            labels = [self._label(example) for example in part]
            encoded = self._tokenize([self._text(example) for example in part], limit)
            rows += [
                LabelledText(ids, label, types, whole)
                for (ids, types, whole), label in zip(encoded, labels, strict=True)
            ]
        classifier_inputs.report_truncated(
            [row.length for row in rows], [row.whole for row in rows], given, context, model
        )
        return rows

    @override
    def find_cut(self, rows: Rows) -> Bool[np.ndarray, " rows"]:
        return np.array([row.length < row.whole for row in rows], bool)

    def _measure_length(self, examples: Examples) -> int:
        """Return the maximum number of tokens in a text, from the lengths of a sample of texts, which it tokenizes."""
        texts = [self._text(examples[i]) for i in token_limits.spread_indices(len(examples))]
        return token_limits.length_of([len(ids) for ids in self._whole(texts)], self.base.context)

    def _whole(self, texts: Sequence[str]) -> list[list[int]]:
        with quiet_libraries():  # transformers warns about each text that is too long
            return list(self.base.tokenizer(list(texts), truncation=False)["input_ids"]) if texts else []

    def _tokenize(self, texts: Sequence[str], limit: int) -> list[tuple[list[int], list[int], int]]:
        """Return for each text at most `limit` tokens, their types, and the number of tokens before truncation."""
        with quiet_libraries():
            shortened = self.base.tokenizer(
                list(texts), truncation=True, max_length=limit, return_token_type_ids=self._has_types
            )
        base_files.check_tokens(self.config.task.model, map(max, filter(None, shortened["input_ids"])), self._rows)
        types = shortened["token_type_ids"] if self._has_types else [[] for _ in texts]
        return [
            (list(ids), list(kinds), len(whole))
            for whole, ids, kinds in zip(self._whole(texts), shortened["input_ids"], types, strict=True)
        ]

    @cached_property
    def _rows(self) -> int:
        """Return the base's vocabulary size."""
        return base_files.embedding_rows(self.base.model) or sys.maxsize

    @cached_property
    def _has_types(self) -> bool:
        return "token_type_ids" in sequence_classifier.accepted_inputs(self.base.model, self.base.tokenizer)

    @cached_property
    def _source(self) -> SourceTemplate:
        return SourceTemplate.from_task(self.config.task)

    def _text(self, example: Example) -> str:
        text = self._source.fill(example.values)
        if text is None:
            raise TaskError(
                f"task.data: expected text in {self._source.describe_columns()} of every row, found "
                f"{self._source.describe_values(example.values)} in {example.where}; correct or drop the row"
            )
        return text

    def _label(self, example: Example) -> int | tuple[float, ...]:
        """Return the class of an example, or 1.0 or 0.0 for each class."""
        task = self.config.task
        if task.multi_label:
            return class_labels.read_labels(example, self._numbering, task)
        number = self._numbering.find(example.values.get(task.target_column), example)
        if number is None:
            raise class_labels.refuse_label(example, task)
        return number

    @override
    def _probe_rows(self) -> Rows:
        label = tuple(0.0 for _ in self.names) if self.config.task.multi_label else 0
        return [LabelledText([1, 2, 3], label, [0, 0, 0] if self._has_types else [])] * 2

    @override
    def collate(self, rows: Sequence[LabelledText]) -> LabelledTextBatch:
        """Return one batch, on the CPU."""
        ids = classifier_inputs.pad_right([row.ids for row in rows], self.base.model.config.pad_token_id)
        mask = classifier_inputs.pad_right([[1] * row.length for row in rows], 0)
        types = classifier_inputs.pad_right([row.types for row in rows], 0) if self._has_types else None
        labels = torch.tensor([row.label for row in rows])
        return LabelledTextBatch(ids, mask, labels, sum(row.length for row in rows), types)

    def _logits(self, batch: LabelledTextBatch) -> Float[Tensor, "rows classes"]:
        return self._forward(classifier_inputs.model_inputs(batch.ids, batch.mask, batch.types)).float()

    def samples(self, rows: Sequence[LabelledText]) -> tuple[Tensor, ...]:
        """Return token ids, masks, labels and, if the model reads them, token types; see `PerExampleLoss`.

        Raises TaskError for an encoder with layers that attend only to nearby tokens, such as ModernBERT.
        """
        classifier_inputs.require_whole_attention(self.base, self.config.task.model)
        batch = self.collate(rows).to(self.device)
        return (batch.ids, batch.mask, batch.labels, *(() if batch.types is None else (batch.types,)))

    def sample_loss(self, weights: Mapping[str, Tensor], *sample: Tensor) -> Tensor:
        """Return the loss of one text."""
        ids, mask, label, *types = sample
        seen = classifier_inputs.example_mask(self.base, ids, mask)
        inputs = classifier_inputs.model_inputs(ids[None], seen, types[0][None] if types else None)
        return class_scores.loss_sum(self._logits_at(weights, inputs).float(), label[None])

    @override
    def loss_sum(self, batch: LabelledTextBatch) -> Tensor:
        """Return the summed loss of the texts in `batch`, which is on the device.

        Raises:
            ConfigError: train.compile is set on a machine that does not support it.
        """
        return class_scores.loss_sum(self._logits(batch), batch.labels)

    @override
    @torch.no_grad()
    def mean_loss(self, encoded: Sequence[LabelledText]) -> float:
        """Return the mean loss per text with the last loaded weights."""
        logits, labels = self._all(encoded)
        return float(class_scores.loss_sum(logits, labels)) / len(encoded)

    def _all(self, encoded: Sequence[LabelledText]) -> tuple[Tensor, Tensor]:
        """Return the logits and labels of all texts, in order, on the CPU."""
        order = sorted(range(len(encoded)), key=lambda i: encoded[i].length)  # similar lengths need little padding
        logits = torch.zeros(len(encoded), len(self.names))
        for part in self._parts(len(order)):
            chosen = [order[i] for i in part]
            logits[chosen] = self._logits(self.collate([encoded[i] for i in chosen]).to(self.device)).cpu()
        return logits, torch.tensor([row.label for row in encoded])

    @override
    @torch.no_grad()
    def evaluate(self, weights: Weights, examples: Examples, generate: bool) -> dict[str, float]:
        """Return "loss" and the scores of `class_scores` over evaluate.eval-examples examples; see `draw_scored`.

        Scores that are undefined for these examples are omitted, and the log says so.

        Raises:
            TaskError: there are no examples, the weights do not match the spec, evaluate.metric is a score that does
                not exist, or as in `encode`.
        """
        if not examples:
            raise TaskError("examples: there are none to score; correct task.evaluation")
        self.show(weights)
        logits, labels = self._all(self.encode(draw_scored(examples, self.config)))
        return class_scores.score_examples(logits, labels, self.config.evaluate.metric)

    @override
    @torch.no_grad()
    def predict(
        self, weights: Weights, rows: Sequence[LabelledText], generate: bool = False
    ) -> Iterator[ExamplePrediction]:
        """Yield only the slice "target", with one position or, with several labels, a two-class position per label."""
        self.show(weights)
        for part in self._parts(len(rows)):
            chosen = [rows[i] for i in part]
            batch = self.collate(chosen)
            logits = self._logits(batch.to(self.device)).cpu()
            for row, label in zip(logits, batch.labels, strict=True):
                yield ExamplePrediction({"target": class_scores.positions_of(row, label)}, label.reshape(-1).long())
