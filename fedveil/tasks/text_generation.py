"""Text generation: a causal language model learns to continue a source with its target.

An example is `source + "\\n" + target + end`, or both in the base's chat template (task.chat-template), or a
conversation in that template, with all answers trained on (task.messages-column). The text of an example is tokenized
as a whole (see `tokenization`) and limited to a number of tokens (see `token_limits`): a conversation's oldest
exchanges are left out first, then the source is truncated at its end, then the target. The log reports how many
examples were truncated. The code shared with other tasks is in `causal_lm`.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import final

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor
from typing_extensions import override

from fedveil.config import RunConfig, TaskConfig
from fedveil.contract.adapter import Adapter
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import (
    DatasetShard,
    Example,
    Examples,
    PreparedData,
    Rows,
    Task,
    TaskInfo,
    loss_metric,
)
from fedveil.data import (
    batches,
    dataset_cache,
    packing,
    prompt_template,
    split_files,
    tables,
    token_limits,
    tokenized_dataset,
)
from fedveil.data.batches import TokenBatch, TokenExample
from fedveil.data.conversation_frame import ConversationFrame, conversation_frame
from fedveil.data.conversations import Conversation, ConversationError, EmptyTurnError, read_conversation
from fedveil.data.row_values import describe_value, filled_text
from fedveil.data.source_template import SourceTemplate
from fedveil.data.tokenization import MarkedText, MarkedTokens
from fedveil.data.tokenized_dataset import TokenizedDataset
from fedveil.errors import ConfigError, TaskError
from fedveil.models import bundled, loading
from fedveil.models.loaded_model import LoadedModel
from fedveil.sanitize import sanitize
from fedveil.training import adapter_task, causal_lm, text_metrics
from fedveil.training.scored_examples import draw_scored, draw_spread

__all__ = ["Source", "TextGeneration"]

Source = str | Conversation  # the content before a target


def _columns(task: TaskConfig) -> tuple[str, ...]:
    if task.messages_column:
        return (task.messages_column,)
    return (*SourceTemplate.from_task(task).columns, task.target_column)


INFO = TaskInfo(
    mounts=("layers", "cache"),
    columns=lambda task: _columns(task),
    texts=lambda task: _columns(task),
    tiny=lambda: bundled.bundled_folder("text-generation"),
    train_keys=("loss-mask", "packing", "pad-to-multiple-of"),
    metrics=lambda task: loss_metric(task, (*text_metrics.SCORES, "exact_match")),
    chats=True,
    drops=True,
    templates=True,
)
_AT_ONCE = 1000  # examples tokenized together
_MOST_TARGETS = 50  # targets per source in scoring
_CUDA_MULTIPLE = 8  # for batch lengths, because a GPU plans its kernels again for each new length

log = logging.getLogger("fedveil.data")


def create(config: RunConfig, adapter: Adapter, device: str) -> Task:
    """Create the task of `config`; the base is loaded on first use.

    Raises:
        ConfigError: the adapter would train a quantized base, train.compile has incompatible settings, the context
            of a local base is too short, or the device does not exist.
        TaskError: there is no base model at that path.
    """
    adapter_task.check_task_config(config, adapter, INFO)
    loading.check_context(config, adapter, INFO.tiny())
    return TextGeneration(config, adapter, loading.pick_device(device))


@final
class TextGeneration(causal_lm.CausalTask):
    """A language model that continues a source."""

    _dropped = 0  # rows dropped from the last read split; see task.empty-texts

    @override
    def _load(self) -> LoadedModel:
        loaded_model = loading.load_causal(self.config, self.adapter, self.device, INFO.tiny())
        if self.config.train.packing:
            packing.check_packing(loaded_model.model.config.model_type, self.config.task.model)
        return loaded_model

    @override
    def examples(self, data: Path, split: str, share: DatasetShard | None = None) -> Examples:
        return self._selected(self._table(data, split), split, share)

    def _selected(self, table: tables.DatasetTable, split: str, share: DatasetShard | None) -> tables.TableSelection:
        """Return the rows of a site; with task.empty-texts = "drop", without rows in which text is missing."""
        chosen = table.examples(split, share, self.config)
        if self.config.task.empty_texts == "refuse":
            return chosen
        left = chosen.without(self.lacks_text)
        if dropped := len(chosen) - len(left):
            log.warning(
                'task.empty-texts = "drop": %d of %d rows of the split "%s" are dropped, because their source or '
                "target is missing or empty", dropped, len(chosen), split,
            )  # fmt: skip
        if not len(left):
            raise TaskError(
                f'task.data: none of the {len(chosen)} rows of the split "{split}" has a source and a target; '
                "correct the data, or set task.source-column and task.target-column"
            )
        self._dropped = len(chosen) - len(left)
        return left

    def _table(self, data: Path, split: str, scratch: Path | None = None) -> tables.DatasetTable:
        return tables.read_for_task(data, split, INFO, self.config.task, scratch)

    @override
    def encode(self, examples: Examples) -> TokenizedDataset:
        """Tokenize every example. Raises TaskError for an example without text in either of the two columns."""
        return self._require_whole(TokenizedDataset(tokenized_dataset.join_parts(self._parts_of(examples))))

    @override
    def prepare(
        self, data: Path, split: str, share: DatasetShard | None = None, shelf: Path | None = None
    ) -> PreparedData:
        """Prepare like `encode`, or map the examples from the `shelf`, if one is given and has them."""
        files, print_ = split_files.split_files(data, split), self._tokens.fingerprint if shelf else ""
        if self.config.task.empty_texts == "drop":
            shelf = None  # a cached set would not say how many rows were dropped
        content = tables.digest_files(files) if print_ else ""

        def parts() -> Iterator[tokenized_dataset.Part]:
            table = self._table(data, split, shelf)
            yield from self._parts_of(self._selected(table, split, share), files)
            if content and tables.digest_files(files) != content:
                raise TaskError(f'task.data: "{files[0].parent}" was changed while it was read; start again')

        if shelf is None or not content:
            rows = TokenizedDataset(tokenized_dataset.join_parts(parts()))
        else:
            frame = dataclasses.asdict(self._frame)
            key = {"rows": content, "tokenizer": [print_, frame], **dataset_cache.cache_key(self.config, split, share)}
            key |= {"context": self.base.context}
            if self.config.task.messages_column:
                key |= {"template": str(self.base.tokenizer.chat_template)}
            cache = dataset_cache.DatasetCache(shelf, tokenized_dataset.KINDS)
            if (stored := cache.find(key)) is not None:
                tables.note_reading(data, split, files)
            rows = TokenizedDataset(stored or cache.put(key, parts()))
        self._require_whole(rows)
        origins = lambda: tokenized_dataset.unpack_origins(rows.numbers, files)  # noqa: E731
        return PreparedData(rows, origins, self._dropped, self.find_cut(rows))

    @override
    def find_cut(self, rows: Rows) -> Bool[np.ndarray, " rows"]:
        return rows.cuts > 0 if isinstance(rows, TokenizedDataset) else super().find_cut(rows)

    def _parts_of(self, examples: Examples, files: Sequence[Path] = ()) -> Iterator[tokenized_dataset.Part]:
        """Yield the encoded examples from these files in parts; the next part is tokenized meanwhile."""

        def tokenised(part: list[Example]) -> tuple[list[Example], list[tuple[Source, str]], list[MarkedTokens]]:
            texts = [self.read_texts(example) for example in part]
            return part, texts, self._conversations(texts)

        self._tokens, self._frame  # noqa: B018  # load the base here, not in a thread
        measured = () if self.config.task.max_tokens else token_limits.spread_indices(len(examples))
        limit = self._limit(self._conversations([self.read_texts(examples[i]) for i in measured]))
        every, forms, unanswered = iter(examples), Counter[str](), 0
        batched = iter(lambda: list(itertools.islice(every, _AT_ONCE)), [])
        for part, texts, conversations in batches.prefetch(batched, tokenised):
            rows = [self._fitted(*pair, each, limit) for pair, each in zip(texts, conversations, strict=True)]
            read = [source for source, _ in texts if isinstance(source, Conversation)]
            forms.update(source.form for source in read)
            unanswered += sum(source.unanswered for source in read)
            yield tokenized_dataset.slice_part(rows, tokenized_dataset.pack_origins(part, files))
        if forms:
            log.warning(
                'task.messages-column = "%s": %s; in %d of them the last turn has no answer and is left out',
                self.config.task.messages_column,
                " and ".join(f"{count:,} conversations in {form}'s form" for form, count in forms.items()), unanswered,
            )  # fmt: skip

    def _conversations(self, texts: Sequence[tuple[Source, str]]) -> list[MarkedTokens]:
        """Return the tokens of each source with its target."""
        return self._tokens.tokenize([self._marked(*pair) for pair in texts])

    def _marked(self, source: Source, target: str) -> MarkedText:
        """Return the text of a source and its target; the last three marks are those from `PromptFrame`."""
        if isinstance(source, str):
            return self._frame.conversation(source, target)
        return self._conversation_frame(len(source.earlier) + 1, bool(source.system)).fill(source, target)

    @cached_property
    def _conversation_frame(self) -> Callable[[int, bool], ConversationFrame]:
        """Return a function from the number of answers and the presence of a system turn to a conversation frame."""

        def refusal(expected: str, found: str) -> TaskError:
            return TaskError(
                f"task.messages-column: expected {expected} in {sanitize(self.config.task.model, 200)}, found "
                f"{found}; use another chat model, or remove such conversations"
            )

        return cache(lambda count, system: conversation_frame(self.base.tokenizer, self._frame, count, system, refusal))

    def _limit(self, some: Sequence[MarkedTokens]) -> int:
        """Return the maximum number of tokens in an example: task.max-tokens, or a length derived from `some`."""
        return self.config.task.max_tokens or token_limits.length_of(
            [self._whole_length(each) for each in some], self.base.context
        )

    def _whole_length(self, conversation: MarkedTokens) -> int:
        return len(self._frame.begin) + len(conversation.ids) + len(self._frame.end)

    def encode_pairs(self, triples: Sequence[tuple[Source, str, str]]) -> list[tuple[TokenExample, TokenExample]]:
        """Return the examples for each source with its first and its second target; a pair shares one prompt.

        A truncated source leaves room for the longer target. A pair counts as truncated if either example is.

        Raises:
            TaskError: too many pairs are truncated; see `token_limits`.
        """
        texts = [(source, target) for source, *targets in triples for target in targets]
        conversations = self._conversations(texts)
        limit = self._limit(conversations)
        pairs = []
        for first, second in zip(conversations[::2], conversations[1::2], strict=True):
            alone = [self._row(each, limit) for each in (first, second)]
            lengths = [row.length - row.start for row in alone]
            one, other = (
                self._row(each, limit - max(lengths) + length)
                for each, length in zip((first, second), lengths, strict=True)
            )
            pairs.append((one, other))
        worse = [max(pair, key=lambda row: (row.cut, row.whole)) for pair in pairs]
        if worse:
            self._require_whole(TokenizedDataset(tokenized_dataset.slice_part(worse, [0] * len(worse))))
        return pairs

    @override
    def evaluate(self, weights: Weights, examples: Examples, generate: bool) -> dict[str, float]:
        """ "loss" over the rows of evaluate.eval-examples distinct sources (see `_references`); with `generate` also
        bleu, rouge_l, nist, meteor and cider, or for short answers exact_match and rouge_l, of one text for each of
        those sources (see text_metrics).

        Raises:
            TaskError: there are no examples, the weights do not match the spec, or evaluate.metric is a score that says
                nothing about the answers.
        """
        references = self._references(examples)
        self.show(weights)
        texts = [(source, target) for source, targets in references.items() for target in targets]
        conversations = self._conversations(texts)
        limit = self._limit(conversations)
        rows = [self._fitted(*pair, each, limit) for pair, each in zip(texts, conversations, strict=True)]
        part = tokenized_dataset.slice_part(rows, [0] * len(rows))
        scores = {"loss": self.mean_loss(self._require_whole(TokenizedDataset(part)))}
        if generate:
            written, targets = self._generate(list(references)), list(references.values())
            scores |= text_metrics.score_texts(written, targets)
            scores["exact_match"] = text_metrics.exact_match(written, targets)
            scores = text_metrics.select_telling(scores, targets, self.config.evaluate.metric)
        return scores

    @override
    def training_batch(self, rows: Sequence[TokenExample]) -> TokenBatch:
        task, train, end = self.config.task, self.config.train, self.base.tokenizer.eos_token_id
        multiple = train.pad_to_multiple_of or (_CUDA_MULTIPLE if self.device.type == "cuda" else 1)
        longest = task.max_tokens or max(row.length for row in rows)
        width = partial(batches.round_up, multiple=multiple, limit=task.max_tokens or self.base.context or sys.maxsize)
        if train.packing:
            return packing.collate_packed(rows, end, longest, train.loss_mask == "all", width)
        return batches.collate_batch(rows, end, train.loss_mask == "all", width)

    def samples(self, rows: Sequence[TokenExample]) -> tuple[Tensor, Tensor, Tensor]:
        """Return token ids, the target token at each position, and 1 where the loss counts it; see `PerExampleLoss`."""
        batch = self.training_batch(rows)
        wanted, counted = torch.zeros_like(batch.ids).flatten(), torch.zeros(batch.ids.numel())
        wanted[batch.positions], counted[batch.positions] = batch.wanted, 1.0
        shape = batch.ids.shape
        return tuple(t.to(self.device) for t in (batch.ids, wanted.view(shape), counted.view(shape)))  # type: ignore[return-value]

    def sample_loss(self, weights: Mapping[str, Tensor], *sample: Tensor) -> Tensor:
        """Return the mean loss per counted token of an example. Padding follows all targets, so it needs no mask."""
        ids, wanted, counted = sample
        # Without it, transformers searches for padding.
        everything = torch.ones(1, len(ids), dtype=torch.long, device=ids.device)
        given = {"input_ids": ids[None], "attention_mask": everything, "use_cache": False}
        logits = self._logits_at(weights, given)[0]
        losses = torch.nn.functional.cross_entropy(logits.float(), wanted, reduction="none")
        return (losses * counted).sum() / counted.sum()

    def generate(self, weights: Weights, sources: Sequence[Source]) -> list[str]:
        """Return the text that the model with `weights` generates for each source, greedily or by beam search."""
        self.show(weights)
        return self._generate(sources)

    def write(self, weights: Weights, prompts: Sequence[str], images: Sequence[tuple[str, bytes]]) -> list[str]:
        """Return the generated text for each prompt, which is a source. Raises ConfigError for images or no prompts."""
        if images or not prompts:
            raise ConfigError(
                "--prompt: this run's model reads only text, so it needs at least one prompt and no --image; "
                f"found {len(prompts)} prompts and {len(images)} images"
            )
        return self.generate(weights, prompts)

    def _generate(self, sources: Sequence[Source]) -> list[str]:
        prompts = self._tokens.tokenize([self._prompt_text(source) for source in sources])
        limit = self._prompt_limit
        rows = [
            self._prompt(self._shortened(source, prompt, self._prompt_text, limit), limit)
            for source, prompt in zip(sources, prompts, strict=True)
        ]
        return self._texts_of([TokenExample(ids, len(ids)) for ids in rows])

    def _prompt_text(self, source: Source) -> MarkedText:
        if isinstance(source, str):
            return self._frame.prompt(source)
        whole = self._marked(source, "")
        start, end, answer = whole.marks[-3:]
        return MarkedText(whole.text[:answer], (start, end))

    def _shortened(
        self, source: Source, tokens: MarkedTokens, text_of: Callable[[Source], MarkedText], limit: int
    ) -> MarkedTokens:
        """Return the tokens of a conversation without the oldest exchanges, as few as needed to fit `limit`."""
        if isinstance(source, str) or self._whole_length(tokens) <= limit:
            return tokens

        def without(count: int) -> MarkedTokens:
            return self._tokens.tokenize([text_of(source.without_oldest(count))])[0]

        counts = range(1, len(source.earlier))
        least = 1 + bisect_left(counts, True, key=lambda count: self._whole_length(without(count)) <= limit)
        return without(least) if source.earlier else tokens

    def _fitted(self, source: Source, target: str, tokens: MarkedTokens, limit: int) -> TokenExample:
        """Return the example for a source and its target, with at most `limit` tokens."""
        shorter = self._shortened(source, tokens, lambda each: self._marked(each, target), limit)
        row = self._row(shorter, limit)
        return row if shorter is tokens else replace(row, cut=max(1, row.cut), whole=self._whole_length(tokens))

    def _references(self, examples: Examples) -> dict[Source, list[str]]:
        """Return the targets by source, for evaluate.eval-examples sources drawn in the same way as in `draw_scored`.

        A source keeps at most _MOST_TARGETS of its targets, or its share of evaluate.eval-examples if that is larger.
        So even if all targets have the same source, such as one instruction, evaluate.eval-examples targets are scored.
        """
        if not examples:
            raise TaskError("examples: there are none to score; correct task.evaluation")
        grouped: dict[Source, list[str]] = {}
        for example in examples:
            source, target = self.read_texts(example)
            grouped.setdefault(source, []).append(target)
        chosen = draw_scored(list(grouped), self.config)
        most = max(_MOST_TARGETS, self.config.evaluate.eval_examples // len(chosen))
        return {source: self._some(grouped[source], most) for source in chosen}

    def _some(self, targets: list[str], most: int) -> list[str]:
        if len(targets) <= most:
            return targets
        return [targets[i] for i in draw_spread(len(targets), most, self.config, "scored targets")]

    @cached_property
    def _source(self) -> SourceTemplate:
        return SourceTemplate.from_task(self.config.task)

    def lacks_text(self, example: Example) -> bool:
        """Return whether a row lacks its source, its target, or a turn's text."""
        if not (column := self.config.task.messages_column):
            return None in self._filled(example)
        try:
            read_conversation(example.values.get(column))
        except EmptyTurnError:
            return True
        except ConversationError:  # refused later
            return False
        return False

    def _filled(self, example: Example) -> tuple[str | None, str | None]:
        """Return (source, target) of a row, with None for a missing one."""
        task = self.config.task
        return self._source.fill(example.values), filled_text(example.values.get(task.target_column))

    def read_texts(self, example: Example) -> tuple[Source, str]:
        """Return (source, target) of a row. Raises TaskError naming the columns that have no text, or the turn that
        cannot be read.
        """
        if self.config.task.messages_column:
            return self._read_conversation(example)
        task, (source, target) = self.config.task, self._filled(example)
        if source is not None and target is not None:
            return source, target
        where, found = self._source.describe_columns(), self._source.describe_values(example.values)
        if source is not None:
            where, found = f'column "{task.target_column}"', describe_value(example.values.get(task.target_column))
        raise TaskError(
            f"task.data: expected text in {where} of every row, found {found} in {example.where}; correct or drop the "
            'row, or set task.empty-texts = "drop" to leave out all rows without a text'
        )

    def _read_conversation(self, example: Example) -> tuple[Conversation, str]:
        column = self.config.task.messages_column
        try:
            source, target = read_conversation(example.values.get(column))
        except ConversationError as error:
            drop = ', or set task.empty-texts = "drop" to leave out all rows without a text'
            raise TaskError(
                f'task.data: column "{column}" of {example.where}: {error}; correct or drop the row'
                f"{drop if isinstance(error, EmptyTurnError) else ''}"
            ) from None
        try:  # build the text here, where the row is known
            self._conversation_frame(len(source.earlier) + 1, bool(source.system))
        except TaskError as error:
            raise TaskError(f"{error} ({example.where})") from None
        return source, target

    def _require_whole(self, rows: TokenizedDataset) -> TokenizedDataset:
        """Log how many examples are too long, and return all. Raises TaskError if too many are; see `token_limits`."""
        given, sources = self.config.task.max_tokens, int((rows.cuts > 0).sum())
        if sources:
            about = given, self.base.context, self.config.task.model
            token_limits.require_whole(sources, rows.wholes, *about)
            log.warning(
                "task.max-tokens = %d: %s examples lose the %s of their source, and %d of these also the end of their "
                "target; %s", given, token_limits.describe_share(sources, len(rows)),
                "oldest turns or the end" if self.config.task.messages_column else "end", int((rows.cuts > 1).sum()),
                token_limits.describe_remedy(rows.wholes, int(rows.lengths.max()), *about),
            )  # fmt: skip
        return rows

    @cached_property
    @override
    def _frame(self) -> prompt_template.PromptFrame:
        tokenizer, task = self.base.tokenizer, self.config.task
        if not task.chat_template:
            return prompt_template.plain_frame(tokenizer)
        frame = prompt_template.template_frame(tokenizer, task.model, self.base.end_tokens)
        (empty,) = self._tokens.tokenize([frame.conversation("", "")])
        room = task.max_tokens or self.base.context
        if room is not None and (needed := len(empty.ids) + len(frame.end) + 2) > room:
            where, todo = ("", "raise it") if task.max_tokens else (", the base's context", "use another base")
            raise ConfigError(
                f"task.max-tokens: the base's chat template takes {needed - 2} tokens, so at least {needed} are "
                f"needed, found {room}{where}; {todo}"
            )
        return frame

    def _prompt(self, prompt: MarkedTokens, limit: int) -> list[int]:
        """Return at most `limit` tokens of a prompt; a long source is truncated at its end."""
        begin, (start, end) = self._frame.begin, prompt.marks[:2]
        over = max(0, len(begin) + len(prompt.ids) - limit)
        kept = max(start, end - over)
        return [*begin, *prompt.ids[:kept], *prompt.ids[max(kept, end) :]][-max(1, limit) :]

    def _row(self, conversation: MarkedTokens, room: int) -> TokenExample:
        """Return an example with at most `room` of a conversation's tokens."""
        frame, ids = self._frame, conversation.ids
        *earlier, start, end, answers = conversation.marks
        whole = [*ids[answers:], *frame.end]
        framing = len(frame.begin) + answers - (end - start)  # the prompt tokens other than the source tokens
        answer = whole[: max(1, room - framing)]
        prompt = self._prompt(MarkedTokens(ids[:answers], (start, end)), room - len(answer))
        cut = 2 if len(answer) < len(whole) else int(len(prompt) < len(frame.begin) + answers)
        bounds = [] if cut else [len(frame.begin) + mark for mark in earlier]  # if truncated, a single exchange
        bounds.append(len(prompt))
        gaps = tuple(zip(bounds[1::2], bounds[2::2], strict=True))
        return TokenExample(prompt + answer, bounds[0], gaps=gaps, cut=cut, whole=self._whole_length(conversation))
