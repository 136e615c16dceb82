"""Preference tuning by DPO: a causal language model learns to prefer a chosen answer over a rejected one.

An example is a prompt with two answers. Its loss (Rafailov et al. 2023) is

    -log sigmoid(beta * ((log p(chosen) - log p(rejected)) - (log p0(chosen) - log p0(rejected))))

where log p sums over an answer's tokens, including the end token, and p0 is the base without the adapter, which every
site has. p0 is computed once, when the examples are prepared. Texts, chat templates and lengths work as in text
generation; the two answers in a pair have the same prompt, even if it is truncated. All counts treat a row as one pair,
and under dp.* the gradient of a pair is clipped as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import final

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import override

from fedveil.config import RunConfig, TaskConfig
from fedveil.contract.adapter import Adapter
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import (
    DatasetShard,
    Example,
    ExamplePrediction,
    Examples,
    Metrics,
    PreparedData,
    Rows,
    Task,
    TaskInfo,
    TaskMetric,
)
from fedveil.data import tables
from fedveil.data.batches import TokenBatch, TokenExample
from fedveil.data.source_template import SourceTemplate
from fedveil.errors import ConfigError, TaskError
from fedveil.models import bundled, loading
from fedveil.models.loaded_model import LoadedModel
from fedveil.tasks.text_generation import TextGeneration
from fedveil.training import adapter_task
from fedveil.training.scored_examples import draw_scored
from fedveil.training.threads import limit_threads

__all__ = ["PreferenceBatch", "PreferenceExample", "PreferenceTuning"]

log = logging.getLogger("fedveil.data")


def _columns(task: TaskConfig) -> tuple[str, ...]:
    return (*SourceTemplate.from_task(task).columns, task.target_column, task.rejected_column)


def _metrics(task: TaskConfig) -> Metrics:
    higher = TaskMetric("higher")
    return {"loss": TaskMetric("lower"), "preference_accuracy": higher, "reward_margin": higher}


INFO = TaskInfo(
    mounts=("layers",),
    columns=_columns,
    texts=_columns,
    tiny=lambda: bundled.bundled_folder("text-generation"),
    train_keys=("preference-beta",),
    metrics=_metrics,
    chats=True,
    drops=True,
    templates=True,
    divisible=False,
)


@dataclass(frozen=True)
class PreferenceExample:
    """One pair: the prompt with each answer, and the base's log p0(chosen) - log p0(rejected)."""

    chosen: TokenExample
    rejected: TokenExample
    reference: float

    @property
    def length(self) -> int:
        """Return the total number of tokens in both examples."""
        return self.chosen.length + self.rejected.length


@dataclass(frozen=True)
class PreferenceBatch:
    """A batch of pairs.

    Attributes:
        answers: the chosen examples of all pairs, followed by the rejected examples.
        reference: log p0(chosen) - log p0(rejected) for each pair.
    """

    answers: TokenBatch
    reference: Float[Tensor, " pairs"]

    @property
    def terms(self) -> int:
        """Return the number of pairs, which is the number of terms in the loss."""
        return len(self.reference)

    @property
    def tokens(self) -> int:
        """Return the number of tokens in all answers with their prompts, without padding."""
        return self.answers.tokens

    def pinned(self) -> PreferenceBatch:
        """Return the batch in page-locked memory."""
        return PreferenceBatch(self.answers.pinned(), self.reference.pin_memory())

    def to(self, device: torch.device) -> PreferenceBatch:
        """Return the batch on `device`."""
        return PreferenceBatch(self.answers.to(device), self.reference.to(device, non_blocking=True))


def create(config: RunConfig, adapter: Adapter, device: str) -> Task:
    """Create the task of `config`; the base is loaded on first use.

    Raises:
        ConfigError: as in text generation; also for an adapter whose removal does not restore the base, for whole
            conversations, and for one column with both answers.
        TaskError: there is no base model at that path.
    """
    task = config.task
    if task.messages_column:
        raise ConfigError(
            'task.messages-column: the task "preference" reads a prompt and two answers, not conversations; leave '
            f'"{task.messages_column}" out'
        )
    if task.rejected_column == task.target_column:
        raise ConfigError(
            f'task.rejected-column: this is "{task.rejected_column}", the same as task.target-column; name the '
            "column with the rejected answers"
        )
    if adapter.kind != "lora":
        raise ConfigError(
            'adapter.kind: the task "preference" requires "lora", because its loss compares the model with the '
            f'base without the adapter; found "{adapter.kind}"; choose a method or method.params with LoRA pairs'
        )
    adapter_task.check_task_config(config, adapter, INFO)
    loading.check_context(config, adapter, INFO.tiny())
    return PreferenceTuning(config, adapter, loading.pick_device(device))


@final
class PreferenceTuning(adapter_task.AdaptedTask):
    """A language model that learns from pairs of answers."""

    _dropped = 0  # rows dropped from the last read split; see task.empty-texts

    @override
    def _load(self) -> LoadedModel:
        return self._of_chosen.base

    @cached_property
    def _of_chosen(self) -> TextGeneration:
        """Return the task that reads prompts with their chosen answers, tokenizes them and loads the base."""
        return TextGeneration(self.config, self.adapter, self.device)

    @cached_property
    def _of_rejected(self) -> TextGeneration:
        """Return the task that reads prompts with their rejected answers, without loading a base."""
        task = self.config.task.model_copy(update={"target_column": self.config.task.rejected_column})
        return TextGeneration(self.config.model_copy(update={"task": task}), self.adapter, self.device)

    @property
    @override
    def end_tokens(self) -> tuple[int, ...]:
        """Return the tokens that end an answer."""
        return self._of_chosen.end_tokens

    @override
    def examples(self, data: Path, split: str, share: DatasetShard | None = None) -> Examples:
        table = tables.read_for_task(data, split, INFO, self.config.task)
        chosen = table.examples(split, share, self.config)
        if self.config.task.empty_texts == "refuse":
            return chosen
        left = chosen.without(self._lacks_text)
        self._dropped = len(chosen) - len(left)
        if self._dropped:
            log.warning(
                'task.empty-texts = "drop": %d of %d rows of the split "%s" are dropped, because their prompt or an '
                "answer is missing or empty", self._dropped, len(chosen), split,
            )  # fmt: skip
        if not len(left):
            raise TaskError(
                f'task.data: none of the {len(chosen)} rows of the split "{split}" has a prompt and two answers; '
                "correct the data, or the columns in the run config"
            )
        return left

    def _lacks_text(self, example: Example) -> bool:
        return self._of_chosen.lacks_text(example) or self._of_rejected.lacks_text(example)

    @override
    def prepare(
        self, data: Path, split: str, share: DatasetShard | None = None, shelf: Path | None = None
    ) -> PreparedData:
        """Prepare like `encode`.

        Nothing is cached on disk, because the references depend on this base in this precision.
        """
        return replace(super().prepare(data, split, share), dropped=self._dropped)

    @override
    def encode(self, examples: Examples) -> list[PreferenceExample]:
        """Tokenize each pair and compute its reference with the base. Raises TaskError for a row with missing text."""
        triples = []
        for example in examples:
            source, chosen = self._of_chosen.read_texts(example)
            triples.append((source, chosen, self._of_rejected.read_texts(example)[1]))
        if not triples:
            return []
        pairs = self._of_chosen.encode_pairs(triples)
        self.put({name: torch.zeros(spec.shape) for name, spec in self.spec.items()})  # W_0 + 0 is the base itself
        with torch.no_grad(), limit_threads(self.config):
            references = self._log_ratios(pairs).tolist()
        return [PreferenceExample(*pair, value) for pair, value in zip(pairs, references, strict=True)]

    @override
    def _probe_rows(self) -> Rows:
        answer = TokenExample([1, 2, 3], 1)
        return [PreferenceExample(answer, answer, 0.0)] * 2

    @override
    def find_cut(self, rows: Rows) -> Bool[np.ndarray, " rows"]:
        return np.array([max(row.chosen.cut, row.rejected.cut) > 0 for row in rows], bool)

    @override
    def collate(self, rows: Rows) -> PreferenceBatch:
        """Return one batch of pairs, on the CPU."""
        answers = self._of_chosen.collate([*(row.chosen for row in rows), *(row.rejected for row in rows)])
        return PreferenceBatch(answers, torch.tensor([row.reference for row in rows]))

    def _log_ratio(self, batch: TokenBatch) -> Float[Tensor, " pairs"]:
        """Return log p(chosen) - log p(rejected) for each pair with the last loaded weights."""
        given = {"input_ids": batch.ids, "attention_mask": batch.mask, "use_cache": False}
        counted = self._forward(given).flatten(0, 1)[batch.positions].float()
        log_likelihoods = -torch.nn.functional.cross_entropy(counted, batch.wanted, reduction="none")
        count, length = batch.ids.shape
        # By position, because index_add adds in arbitrary order on CUDA.
        spread = torch.zeros(count * length, device=counted.device).index_put((batch.positions,), log_likelihoods)
        chosen, rejected = spread.view(count, length).sum(1).chunk(2)
        return chosen - rejected

    def _log_ratios(self, pairs: Sequence[tuple[TokenExample, TokenExample]]) -> Float[Tensor, " pairs"]:
        """Return `_log_ratio` for all pairs, on the CPU; equal pairs in equal order give bit-identical results."""
        order = sorted(range(len(pairs)), key=lambda i: max(each.length for each in pairs[i]))
        ratios = torch.zeros(len(pairs))
        for part in self._parts(len(pairs)):
            chosen = [pairs[order[i]] for i in part]
            batch = self._of_chosen.collate([*(pair[0] for pair in chosen), *(pair[1] for pair in chosen)])
            ratios[[order[i] for i in part]] = self._log_ratio(batch.to(self.device)).float().cpu()
        return ratios

    @torch.no_grad()
    def _margins(self, rows: Sequence[PreferenceExample]) -> Float[Tensor, " rows"]:
        """Return how much more strongly than the base the model prefers each chosen answer, in nats."""
        return self._log_ratios([(row.chosen, row.rejected) for row in rows]) - torch.tensor(
            [row.reference for row in rows]
        )

    def _loss(self, margins: Tensor) -> Tensor:
        """Return -log sigmoid(beta * margin) for each margin."""
        return torch.nn.functional.softplus(-self.config.train.preference_beta * margins)

    @override
    def loss_sum(self, batch: PreferenceBatch) -> Tensor:
        """Return the summed loss of the pairs in `batch`, which is on the device."""
        return self._loss(self._log_ratio(batch.answers) - batch.reference).sum()

    @override
    def mean_loss(self, encoded: Rows) -> float:
        """Return the mean loss per pair with the last loaded weights."""
        return float(self._loss(self._margins(encoded)).mean())

    @override
    def evaluate(self, weights: Weights, examples: Examples, generate: bool) -> dict[str, float]:
        """Return "loss", "preference_accuracy" and "reward_margin" over evaluate.eval-examples pairs.

        The accuracy is the fraction of pairs for which the model prefers the chosen answer more strongly than the base
        does. A pair with the same preference counts half, so the base has accuracy 0.5. The margin is beta times the
        mean preference.

        Raises:
            TaskError: there are no examples, the weights do not match the spec, or as in `encode`.
        """
        if not examples:
            raise TaskError("examples: there are none to score; correct task.evaluation")
        rows = self.encode(draw_scored(examples, self.config))
        self.show(weights)
        margins = self._margins(rows)
        return {
            "loss": float(self._loss(margins).mean()),
            "preference_accuracy": float(((margins > 0).float() + (margins == 0).float() / 2).mean()),
            "reward_margin": self.config.train.preference_beta * float(margins.mean()),
        }

    @override
    def predict(self, weights: Weights, rows: Rows, generate: bool = False) -> Iterator[ExamplePrediction]:
        """Yield the predictions for the chosen answers."""
        yield from self._of_chosen.predict(weights, [row.chosen for row in rows], generate)

    def samples(self, rows: Rows) -> tuple[Tensor, ...]:
        """Return token ids, targets and counted positions (pairs, 2, length), and references; see `PerExampleLoss`."""
        batch = self.collate(rows)
        answers, shape = batch.answers, (2, len(rows), -1)
        wanted, counted = torch.zeros_like(answers.ids).flatten(), torch.zeros(answers.ids.numel())
        wanted[answers.positions], counted[answers.positions] = answers.wanted, 1.0
        three = (each.view(shape).transpose(0, 1).to(self.device) for each in (answers.ids, wanted, counted))
        return (*three, batch.reference.to(self.device))

    def sample_loss(self, weights: Mapping[str, Tensor], *sample: Tensor) -> Tensor:
        """Return the loss of one pair. Padding needs no mask, because it follows all targets."""
        ids, wanted, counted, reference = sample
        # Created outside vmap, because transformers reads its values.
        everything = torch.ones(ids.shape, dtype=torch.long, device=ids.device)
        given = {"input_ids": ids, "attention_mask": everything, "use_cache": False}
        logits = self._logits_at(weights, given).float()
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
        rejected_more = (losses.view(ids.shape) * counted).sum(1)
        return self._loss(rejected_more[1] - rejected_more[0] - reference)

    def write(self, weights: Weights, prompts: Sequence[str], images: Sequence[tuple[str, bytes]]) -> list[str]:
        """Return the generated text for each prompt. Raises ConfigError if there are images or no prompts."""
        return self._of_chosen.write(weights, prompts, images)
