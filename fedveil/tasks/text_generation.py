"""Text generation: a causal language model learns to continue a source with its target.

A row is `source + "\\n" + target + end`, at most task.max-tokens tokens: the source loses its end first, then the
target. The loss is the mean over target tokens (the end among them). Nothing is dropped out and batches come in the
order that the client's stream draws; with run.deterministic one thread trains, so that two processes on one machine end
bit-identically.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Int
from torch import Tensor

from fedveil.adapters import Adapter, Lora
from fedveil.config import RunConfig
from fedveil.errors import ConfigError, TaskError
from fedveil.method import Spec, TensorSpec, Trained, Weights
from fedveil.rng import Stream
from fedveil.tasks import models, partition, rows
from fedveil.tasks.base import Examples, Share, Task

SEPARATOR = "\n"
RECEIVED_ROWS = 64  # rows of the site behind "loss_received"
_IGNORED = -100  # a label without loss
_TEXT_TYPES = (str, int, float, bool)


def create(config: RunConfig, adapter: Adapter, device: str) -> Task:
    """The task of `config`; the base itself is loaded at the first need.

    Raises:
        ConfigError: a quantised base under an adapter that would train it, or a device that is not there.
        TaskError: no base model at that path.
    """
    if config.train.quantized_base != "none" and not isinstance(adapter, Lora):
        raise ConfigError(
            f'train.quantized-base: expected "none" with an adapter of kind "{adapter.kind}", which trains the base, '
            f'found "{config.train.quantized_base}"; use an adapter of kind "lora"'
        )
    models.find(config.task.model)
    return TextGeneration(config, adapter, models.pick_device(device))


@dataclass(frozen=True)
class _Row:
    """One encoded row: `ids` with the target from position `start` on."""

    ids: list[int]
    start: int


@final
class TextGeneration(Task):
    """A causal language model, its adapter and its rows. Weights come back on the device that they were given on."""

    def __init__(self, config: RunConfig, adapter: Adapter, device: torch.device) -> None:
        self.config = config
        self.adapter = adapter
        self.device = device

    @cached_property
    def base(self) -> models.Base:
        """The base with its adapter. Its trained tensors hold whatever was put in last."""
        return models.load_causal(self.config, self.adapter, self.device)

    @cached_property
    def _base_weights(self) -> Weights:
        if isinstance(self.adapter, Lora):
            return {}
        return {name: p.detach().to("cpu", copy=True) for name, p in self.base.trained.items()}

    @property
    def spec(self) -> Spec:
        """Names in the order of the model's layers; fp32."""
        return {name: TensorSpec(tuple(p.shape), p.dtype) for name, p in self.base.trained.items()}

    def initial(self, rng: Stream) -> Weights:
        """LoRA: A uniform within 1/sqrt(d_in), B zero; all weights: the base's own. On the CPU."""
        if isinstance(self.adapter, Lora):
            return models.draw_lora({name: spec.shape for name, spec in self.spec.items()}, rng)
        return {name: w.clone() for name, w in self._base_weights.items()}

    def examples(self, data: Path, split: str, share: Share | None = None) -> Examples:
        """Rows of `split`, all columns; of the split "train" at most task.max-examples, a seeded choice in file order."""
        task, seed = self.config.task, self.config.run.seed
        table = rows.read(rows.split_file(Path(data), split), (task.source_column, task.target_column))
        if share is not None:
            table = partition.cut(table, share, task, seed)
        if split == "train" and 0 < task.max_examples < len(table):
            table = table.select(sorted(random.Random(seed).sample(range(len(table)), task.max_examples)))
        found: list[Mapping[str, Any]] = table.to_list()
        return found

    def local(self, examples: Examples, rng: Stream) -> LocalTraining:
        """Training on `examples`. Raises TaskError where there are none."""
        return LocalTraining(self, examples, rng)

    def evaluate(self, weights: Weights, examples: Examples, generate: bool) -> dict[str, float]:
        """ "loss" over the rows of the first evaluate.max-examples distinct sources; with `generate` also
        bleu, rouge_l, nist, meteor and cider (see text_metrics) of one text for each of those sources.

        Raises:
            TaskError: no examples, or weights that are not the spec's.
        """
        references = self._references(examples)
        self._put(weights)
        encoded = [self._encode(source, target) for source, refs in references.items() for target in refs]
        scores = {"loss": self._mean_loss(encoded)}
        if generate:
            from fedveil.tasks import text_metrics

            scores |= text_metrics.score(self._generate(list(references)), list(references.values()))
        return scores

    def generate(self, weights: Weights, sources: Sequence[str]) -> list[str]:
        """The text that the model with `weights` writes for each source: greedy, or evaluate.beams beams."""
        self._put(weights)
        return self._generate(sources)

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

    def _texts(self, example: Mapping[str, Any]) -> tuple[str, str]:
        """(source, target) of a row. Raises TaskError naming the column that is missing or holds no text."""
        task = self.config.task
        for column in (task.source_column, task.target_column):
            if not isinstance(example.get(column), _TEXT_TYPES):
                raise TaskError(
                    f'task.data: expected text in column "{column}" of every row, found '
                    f"{example.get(column)!r} in a row with {', '.join(example)}; correct or drop the row"
                )
        return str(example[task.source_column]), str(example[task.target_column])

    def _put(self, weights: Weights) -> None:
        if not isinstance(self.adapter, Lora):
            self._base_weights  # noqa: B018  # kept before they are overwritten
        models.put(weights, self.base.trained)

    @cached_property
    def _fixed_ids(self) -> tuple[list[int], list[int], int]:
        """Tokens before the source (a begin token, where the tokenizer puts one), the separator, the end token."""
        tokenizer = self.base.tokenizer
        first = tokenizer("")["input_ids"][:1]
        begin = [int(i) for i in first if i == tokenizer.bos_token_id and i != tokenizer.eos_token_id]
        return begin, tokenizer.encode(SEPARATOR, add_special_tokens=False), tokenizer.eos_token_id

    def _prompt(self, source: str, limit: int) -> list[int]:
        """Tokens of source and separator, at most `limit`: the source loses its end."""
        begin, separator, _ = self._fixed_ids
        ids = self.base.tokenizer.encode(source, add_special_tokens=False)
        return [*begin, *ids[: max(0, limit - len(begin) - len(separator))], *separator][-max(1, limit) :]

    def _encode(self, source: str, target: str) -> _Row:
        begin, separator, end = self._fixed_ids
        room = self.config.task.max_tokens
        least = len(begin) + len(separator)
        answer = [*self.base.tokenizer.encode(target, add_special_tokens=False), end][: room - least]
        prompt = self._prompt(source, room - len(answer))
        return _Row(prompt + answer, len(prompt))

    def _encode_all(self, examples: Examples) -> list[_Row]:
        return [self._encode(*self._texts(example)) for example in examples]

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """Autocast under `train.precision = bf16`, and silence of the 8-bit kernels about their casts."""
        with (
            torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.train.precision == "bf16"),
            models.quiet() if self.config.train.quantized_base != "none" else contextlib.nullcontext(),
        ):
            yield

    def _loss_sum(self, batch: Sequence[_Row]) -> tuple[Tensor, int]:
        """Summed loss of the target tokens of `batch`, and their number."""
        ids, mask, labels = (t.to(self.device) for t in _collate(batch, self.base.tokenizer.eos_token_id))
        with self._computing():
            logits = self.base.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        counted = labels[:, 1:] != _IGNORED
        wanted = labels[:, 1:][counted]
        loss = torch.nn.functional.cross_entropy(logits[:, :-1][counted].float(), wanted, reduction="sum")
        return loss, len(wanted)

    @torch.no_grad()
    def _mean_loss(self, encoded: Sequence[_Row]) -> float:
        """Mean loss a target token with the weights put in last."""
        ordered = sorted(encoded, key=lambda row: len(row.ids))  # rows of like length waste no padding
        size = 2 * self.config.train.batch_size
        parts = [self._loss_sum(ordered[i : i + size]) for i in range(0, len(ordered), size)]
        return sum(float(loss) for loss, _ in parts) / sum(count for _, count in parts)

    @torch.no_grad()
    def _generate(self, sources: Sequence[str]) -> list[str]:
        from transformers import GenerationConfig

        new, context, end = self.config.evaluate.max_new_tokens, self.base.context, self._fixed_ids[2]
        limit = self.config.task.max_tokens if context is None else min(self.config.task.max_tokens, context - new)
        if limit < 1:
            raise ConfigError(
                f"evaluate.max-new-tokens: expected less than {context}, the context of {self.config.task.model}, "
                f"found {new}; lower it"
            )
        how = GenerationConfig(
            max_new_tokens=new,
            num_beams=self.config.evaluate.beams,
            do_sample=False,
            eos_token_id=end,
            pad_token_id=end,
        )
        prompts = [self._prompt(source, limit) for source in sources]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        size = 2 * self.config.train.batch_size
        texts = [""] * len(prompts)
        for chosen in (order[i : i + size] for i in range(0, len(order), size)):
            width = max(len(prompts[i]) for i in chosen)
            ids = torch.tensor([[end] * (width - len(prompts[i])) + prompts[i] for i in chosen])
            mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in chosen])
            with self._computing():
                out = self.base.model.generate(
                    input_ids=ids.to(self.device), attention_mask=mask.to(self.device), generation_config=how
                )
            written = self.base.tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
            for i, text in zip(chosen, written, strict=True):
                texts[i] = text.strip()
        return texts


@final
class LocalTraining:
    """One client's training: AdamW anew at each call, a constant learning rate, every row once an epoch."""

    def __init__(self, task: TextGeneration, examples: Examples, rng: Stream) -> None:
        if not examples:
            raise TaskError("task.data: expected at least one row to train on, found none; add rows")
        self._task = task
        self._examples = examples
        self._rng = rng

    @property
    def num_examples(self) -> int:
        """Rows of this client."""
        return len(self._examples)

    @property
    def spec(self) -> Spec:
        """The task's spec."""
        return self._task.spec

    @cached_property
    def _encoded(self) -> list[_Row]:
        return self._task._encode_all(self._examples)

    def train(self, weights: Weights) -> Trained:
        """Trains from `weights`, which stay as they are; without a step they come back bit for bit.

        The report has loss_received (of `weights`, on the site's first RECEIVED_ROWS rows), loss_trained (mean over the
        steps; without one, loss_received), steps, tokens (all that the steps read, padding apart) and train_seconds.

        Raises:
            TaskError: weights that are not the spec's, or a loss that is no longer finite.
        """
        started = time.perf_counter()
        task = self._task
        task._put(weights)
        with _threads(1 if task.config.run.deterministic else torch.get_num_threads()):
            received = task._mean_loss(self._encoded[:RECEIVED_ROWS])
            losses, tokens = self._steps()
        if losses:
            after = {name: p.detach().to(weights[name].device, copy=True) for name, p in task.base.trained.items()}
        else:
            after = {name: weights[name].clone() for name in task.base.trained}
        report = {
            "loss_received": received,
            "loss_trained": sum(losses) / len(losses) if losses else received,
            "steps": float(len(losses)),
            "tokens": float(tokens),
            "train_seconds": time.perf_counter() - started,
        }
        return Trained(after, report)

    def _steps(self) -> tuple[list[float], int]:
        """The loss of each step, and the tokens that all of them read."""
        train, task = self._task.config.train, self._task
        parameters = list(task.base.trained.values())
        optimiser = torch.optim.AdamW(parameters, lr=train.learning_rate, weight_decay=train.weight_decay)
        losses: list[float] = []
        tokens = 0
        for batch in self._batches():
            loss_sum, count = task._loss_sum(batch)
            loss = loss_sum / count
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            optimiser.zero_grad()
            losses.append(float(loss.detach()))
            tokens += sum(len(row.ids) for row in batch)
            if not math.isfinite(losses[-1]):
                raise TaskError(
                    f"train.learning-rate: expected a finite loss, found {losses[-1]} at step {len(losses)} with "
                    f"{train.learning_rate:g}; lower it"
                )
        return losses, tokens

    def _batches(self) -> Iterator[list[_Row]]:
        """Batches of every epoch, each epoch in an order of its own; at most train.max-steps where that is set."""
        train = self._task.config.train
        generator = self._rng.torch_generator()
        n = len(self._encoded)
        steps = train.epochs * math.ceil(n / train.batch_size)
        left = min(steps, train.max_steps) if train.max_steps else steps
        for _ in range(train.epochs):
            order = torch.randperm(n, generator=generator).tolist()
            for i in range(0, n, train.batch_size):
                if left == 0:
                    return
                left -= 1
                yield [self._encoded[j] for j in order[i : i + train.batch_size]]


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """`count` threads inside: how a sum is split over threads shows in its last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _collate(
    batch: Sequence[_Row], padding: int
) -> tuple[Int[Tensor, "rows length"], Int[Tensor, "rows length"], Int[Tensor, "rows length"]]:
    """Token ids, attention mask and labels of `batch`, padded on the right; labels are -100 off the target."""
    width = max(len(row.ids) for row in batch)
    ids = [row.ids + [padding] * (width - len(row.ids)) for row in batch]
    mask = [[1] * len(row.ids) + [0] * (width - len(row.ids)) for row in batch]
    labels = [[_IGNORED] * row.start + row.ids[row.start :] + [_IGNORED] * (width - len(row.ids)) for row in batch]
    return torch.tensor(ids), torch.tensor(mask), torch.tensor(labels)
