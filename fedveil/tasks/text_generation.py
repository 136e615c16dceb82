"""Text generation: a causal language model learns to continue a source with its target.

A row is `source + "\\n" + target + end`, or both in the words of the base's chat template (task.chat-template), at most
task.max-tokens tokens: the source loses its end first, then the target, and the log says how many did. What it shares
with other tasks is in `causal`.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from fedveil.config import RunConfig
from fedveil.contract.adapter import Adapter
from fedveil.contract.spec import Weights
from fedveil.contract.task import Example, Examples, Origin, Prepared, Share, Task, TaskInfo, of_loss
from fedveil.errors import ConfigError, TaskError
from fedveil.models import loading, tiny
from fedveil.models.loaded_model import LoadedModel
from fedveil.rows import batches, framing, packing, reading, shelves, token_rows
from fedveil.rows.batches import TokenBatch, TokenRow
from fedveil.rows.token_rows import TokenRows
from fedveil.rows.tokens import Tokens
from fedveil.training import adapted, causal, text_metrics

INFO = TaskInfo(
    mounts=("layers", "cache"),
    columns=lambda task: (task.source_column, task.target_column),
    tiny=lambda: tiny.folder("text-generation"),
    train_keys=("loss-on", "packing"),
    metrics=lambda task: of_loss(task, text_metrics.SCORES),
    chats=True,
)
_TEXT_TYPES = (str, int, float, bool)
_AT_ONCE = 1000  # rows that are tokenised together

log = logging.getLogger("fedveil.rows")


def create(config: RunConfig, adapter: Adapter, device: str) -> Task:
    """The task of `config`; the base itself is loaded at the first need.

    Raises:
        ConfigError: a quantised base under an adapter that would train it, train.compile where it does not go with
            the rest, rows longer than a local base's context, or a device that is not there.
        TaskError: no base model at that path.
    """
    adapted.check(config, adapter, INFO)
    loading.check_context(config, adapter, INFO.tiny())
    return TextGeneration(config, adapter, loading.pick_device(device))


@final
class TextGeneration(causal.CausalTask):
    """A language model that continues a source."""

    @override
    def _load(self) -> LoadedModel:
        found = loading.load_causal(self.config, self.adapter, self.device, INFO.tiny())
        if self.config.train.packing:
            packing.check(found.model.config.model_type, self.config.task.model)
        return found

    @override
    def examples(self, data: Path, split: str, share: Share | None = None) -> Examples:
        return reading.table(data, split, INFO.columns(self.config.task)).examples(split, share, self.config)

    @override
    def encode(self, examples: Examples) -> TokenRows:
        """Every row tokenised. Raises TaskError for a row without text in one of the two columns."""
        return self._told(TokenRows(token_rows.joined(self._parts_of(examples))))

    @override
    def prepare(self, data: Path, split: str, share: Share | None = None, shelf: Path | None = None) -> Prepared:
        """As `encode`; where it has a shelf, the rows are mapped from there, and prepared only where they are not."""
        file, print_ = reading.split_file(data, split), self._tokens.fingerprint if shelf else ""
        content = reading.digest(file) if print_ else ""

        def parts() -> Iterator[token_rows.Part]:
            table = reading.table(data, split, INFO.columns(self.config.task), shelf)
            yield from self._parts_of(table.examples(split, share, self.config))
            if content and reading.digest(file) != content:
                raise TaskError(f'task.data: expected "{file}" to stay while it is read, found a change; start again')

        if shelf is None or not content:
            rows = TokenRows(token_rows.joined(parts()))
        else:
            frame = dataclasses.asdict(self._frame)
            key = {"rows": content, "tokenizer": [print_, frame], **shelves.key(self.config, split, share)}
            kept = shelves.Shelf(shelf, token_rows.KINDS)
            rows = TokenRows(kept.find(key) or kept.put(key, parts()))
        return Prepared(self._told(rows), lambda: (Origin(str(file), int(number)) for number in rows.numbers))

    def _parts_of(self, examples: Examples) -> Iterator[token_rows.Part]:
        """The rows of some examples at a time; the next ones are tokenised meanwhile."""

        def tokenised(part: list[Example]) -> tuple[list[Example], list[list[int]], list[list[int]]]:
            texts = [self._texts(example) for example in part]
            return part, self._tokens.of([source for source, _ in texts]), self._tokens.of([to for _, to in texts])

        self._tokens  # noqa: B018  # the base is loaded here, not in a thread
        every = iter(examples)
        batched = iter(lambda: list(itertools.islice(every, _AT_ONCE)), [])
        for part, sources, targets in batches.ahead(batched, tokenised):
            rows = [self._row(source, target) for source, target in zip(sources, targets, strict=True)]
            yield token_rows.part_of(rows, [example.origin.row if example.origin else 0 for example in part])

    @override
    def evaluate(self, weights: Weights, examples: Examples, generate: bool) -> dict[str, float]:
        """ "loss" over the rows of the first evaluate.max-examples distinct sources; with `generate` also
        bleu, rouge_l, nist, meteor and cider (see text_metrics) of one text for each of those sources.

        Raises:
            TaskError: no examples, or weights that are not the spec's.
        """
        references = self._references(examples)
        self.show(weights)
        encoded = self.encode(
            [
                Example({self.config.task.source_column: source, self.config.task.target_column: target})
                for source, refs in references.items()
                for target in refs
            ]
        )
        scores = {"loss": self.mean_loss(encoded)}
        if generate:
            scores |= text_metrics.score(self._generate(list(references)), list(references.values()))
        return scores

    @override
    def training_batch(self, rows: Sequence[TokenRow]) -> TokenBatch:
        task, train, end = self.config.task, self.config.train, self.base.tokenizer.eos_token_id
        if train.packing:
            return packing.collate(rows, end, task.max_tokens, train.loss_on == "all")
        return batches.collate(rows, end, train.loss_on == "all")

    def samples(self, rows: Sequence[TokenRow]) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids, the tokens that each position predicts, and 1 where the loss counts it; see `SampleLoss`."""
        batch = self.training_batch(rows)
        wanted, counted = torch.zeros_like(batch.ids).flatten(), torch.zeros(batch.ids.numel())
        wanted[batch.positions], counted[batch.positions] = batch.wanted, 1.0
        shape = batch.ids.shape
        return tuple(t.to(self.device) for t in (batch.ids, wanted.view(shape), counted.view(shape)))  # type: ignore[return-value]

    def sample_loss(self, weights: Mapping[str, Tensor], *sample: Tensor) -> Tensor:
        """Mean loss of one row, a token that counts. Padding needs no mask: it comes after all that the targets see."""
        ids, wanted, counted = sample
        everything = torch.ones(1, len(ids), dtype=torch.long, device=ids.device)  # transformers would look for padding
        given = {"input_ids": ids[None], "attention_mask": everything, "use_cache": False}
        logits = self._logits_at(weights, given)[0]
        losses = torch.nn.functional.cross_entropy(logits.float(), wanted, reduction="none")
        return (losses * counted).sum() / counted.sum()

    def generate(self, weights: Weights, sources: Sequence[str]) -> list[str]:
        """The text that the model with `weights` writes for each source: greedy, or evaluate.beams beams."""
        self.show(weights)
        return self._generate(sources)

    def write(self, weights: Weights, prompts: Sequence[str], images: Sequence[tuple[str, bytes]]) -> list[str]:
        """The text behind each prompt, which is a source. Raises ConfigError for images, and without a prompt."""
        if images or not prompts:
            raise ConfigError(
                f"--prompt: expected at least one and no --image, as this run's model reads texts alone, found "
                f"{len(prompts)} and {len(images)} images; give a prompt"
            )
        return self.generate(weights, prompts)

    def _generate(self, sources: Sequence[str]) -> list[str]:
        prompts = [self._prompt(ids, self._prompt_limit) for ids in self._tokens.of(sources)]
        return self._texts_of([TokenRow(ids, len(ids)) for ids in prompts])

    def _references(self, examples: Examples) -> dict[str, list[str]]:
        """Targets by source, sources in order of appearance, at most evaluate.max-examples of them."""
        if not examples:
            raise TaskError("examples: expected at least one row to score, found none; correct task.evaluation")
        grouped: dict[str, list[str]] = {}
        for example in examples:
            source, target = self._texts(example)
            if source in grouped or len(grouped) < self.config.evaluate.max_examples:
                grouped.setdefault(source, []).append(target)
        return grouped

    def _texts(self, example: Example) -> tuple[str, str]:
        """(source, target) of a row. Raises TaskError naming the column that is missing or holds no text."""
        task = self.config.task
        for column in (task.source_column, task.target_column):
            if not isinstance(example.values.get(column), _TEXT_TYPES):
                raise TaskError(
                    f'task.data: expected text in column "{column}" of every row, found {example.values.get(column)!r} '
                    f"in {example.where}; correct or drop the row"
                )
        return str(example.values[task.source_column]), str(example.values[task.target_column])

    def _told(self, rows: TokenRows) -> TokenRows:
        """The rows, of which the log says how many are too long."""
        sources, targets = int((rows.cuts > 0).sum()), int((rows.cuts > 1).sum())
        if sources:
            now, most = self.config.task.max_tokens, self.base.context
            todo = "raise it" if most is None else f"raise it, to at most {most}"
            if now == most:
                todo = f"shorten the rows: {self.config.task.model} has room for no more"
            log.warning(
                "task.max-tokens = %d: %d of %d rows lose the end of their source, %d of these that of their target; "
                "%s", now, sources, len(rows), targets, todo,
            )  # fmt: skip
        return rows

    @cached_property
    def _frame(self) -> framing.Frame:
        tokenizer, task = self.base.tokenizer, self.config.task
        if not task.chat_template:
            return framing.plain(tokenizer)
        found = framing.of_template(tokenizer, task.model)
        if (needed := found.length + len(found.end) + 2) > task.max_tokens:
            raise ConfigError(
                f"task.max-tokens: expected at least {needed}, of which the base's chat template has {needed - 2} for "
                f"itself, found {task.max_tokens}; raise it"
            )
        return found

    @cached_property
    def _tokens(self) -> Tokens:
        return Tokens(self.base.tokenizer)

    def _prompt(self, ids: list[int], limit: int) -> list[int]:
        """A source's tokens and what stands around it, at most `limit`: the source loses its end."""
        frame = self._frame
        return [*frame.before, *ids[: max(0, limit - frame.length)], *frame.between][-max(1, limit) :]

    def _row(self, source: list[int], target: list[int]) -> TokenRow:
        """The row of a source's and a target's tokens."""
        frame, room = self._frame, self.config.task.max_tokens
        whole = [*target, *frame.end]
        answer = whole[: room - frame.length]
        prompt = self._prompt(source, room - len(answer))
        cut = 2 if len(answer) < len(whole) else int(len(prompt) < frame.length + len(source))
        return TokenRow(prompt + answer, len(prompt), cut=cut)
