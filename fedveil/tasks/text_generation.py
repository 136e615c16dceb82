"""Text generation: a causal language model learns to continue a source with its target.

A row is `source + "\\n" + target + end`, at most task.max-tokens tokens: the source loses its end first, then the
target. The loss is the mean over target tokens (the end among them). Nothing is dropped out and batches come in the
order that the client's stream draws; with run.deterministic one thread trains, so that two processes on one machine end
bit-identically.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from fedveil.adapters import Adapter, Lora
from fedveil.config import RunConfig
from fedveil.errors import ConfigError, TaskError
from fedveil.method import Spec, TensorSpec, Weights
from fedveil.rng import Stream
from fedveil.tasks import batches, models, partition, rows, speed
from fedveil.tasks.base import Examples, Share, Task, Watch, unwatched
from fedveil.tasks.batches import Batch, Row
from fedveil.tasks.training import LocalTraining

SEPARATOR = "\n"
_NOTHING = contextlib.nullcontext()
_TEXT_TYPES = (str, int, float, bool)


def create(config: RunConfig, adapter: Adapter, device: str) -> Task:
    """The task of `config`; the base itself is loaded at the first need.

    Raises:
        ConfigError: a quantised base under an adapter that would train it, train.compile where it does not go with
            the rest, or a device that is not there.
        TaskError: no base model at that path.
    """
    if config.train.quantized_base != "none" and not isinstance(adapter, Lora):
        raise ConfigError(
            f'train.quantized-base: expected "none" with an adapter of kind "{adapter.kind}", which trains the base, '
            f'found "{config.train.quantized_base}"; use an adapter of kind "lora"'
        )
    speed.check(config)
    models.find(config.task.model)
    return TextGeneration(config, adapter, models.pick_device(device))


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
    def trained(self) -> Mapping[str, Tensor]:
        """The parameters behind the spec; they hold whatever was put in last."""
        return self.base.trained

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

    def prepare(self, examples: Examples) -> list[Row]:
        """Every row tokenised. Raises TaskError for a row without text in one of the two columns."""
        return [self._encode(*self._texts(example)) for example in examples]

    def local(self, rows: Sequence[Row], rng: Stream, watch: Watch = unwatched) -> LocalTraining:
        """Training on `rows`. Raises TaskError where there are none."""
        return LocalTraining(self, rows, rng, watch)

    def evaluate(self, weights: Weights, examples: Examples, generate: bool) -> dict[str, float]:
        """ "loss" over the rows of the first evaluate.max-examples distinct sources; with `generate` also
        bleu, rouge_l, nist, meteor and cider (see text_metrics) of one text for each of those sources.

        Raises:
            TaskError: no examples, or weights that are not the spec's.
        """
        references = self._references(examples)
        self.put(weights)
        encoded = [self._encode(source, target) for source, refs in references.items() for target in refs]
        scores = {"loss": self.mean_loss(encoded)}
        if generate:
            from fedveil.tasks import text_metrics

            scores |= text_metrics.score(self._generate(list(references)), list(references.values()))
        return scores

    def generate(self, weights: Weights, sources: Sequence[str]) -> list[str]:
        """The text that the model with `weights` writes for each source: greedy, or evaluate.beams beams."""
        self.put(weights)
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

    def put(self, weights: Weights) -> None:
        """Puts weights into the model. Raises TaskError where they are not the spec's."""
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

    def _encode(self, source: str, target: str) -> Row:
        begin, separator, end = self._fixed_ids
        room = self.config.task.max_tokens
        least = len(begin) + len(separator)
        answer = [*self.base.tokenizer.encode(target, add_special_tokens=False), end][: room - least]
        prompt = self._prompt(source, room - len(answer))
        return Row(prompt + answer, len(prompt))

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """Autocast under `train.precision = bf16`, and silence of the 8-bit kernels about their casts."""
        with (
            torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.train.precision == "bf16"),
            models.quiet() if self.config.train.quantized_base != "none" else _NOTHING,
        ):
            yield

    @cached_property
    def _compiled(self) -> Any:
        return speed.compiled(self.base.model, self.device)

    def training(self) -> contextlib.AbstractContextManager[None]:
        """Around the training steps: layers are recomputed under train.checkpointing.

        Raises:
            ConfigError: the model has no layers that can be.
        """
        if not self.config.train.checkpointing:
            return _NOTHING
        return speed.recomputing(self.base.model, self.config.task.model)

    def collate(self, rows: Sequence[Row]) -> Batch:
        """One batch, on the CPU."""
        return batches.collate(rows, self.base.tokenizer.eos_token_id)

    def loss_sum(self, batch: Batch) -> Tensor:
        """Summed loss of the target tokens of `batch`, which lies on the device.

        Raises:
            ConfigError: train.compile on a machine that cannot.
        """
        # Scoring would be compiled a second time, for a few batches.
        model = self._compiled if self.config.train.compile and torch.is_grad_enabled() else self.base.model
        with self._computing():
            logits = model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False).logits
        counted = logits.flatten(0, 1)[batch.positions].float()
        return torch.nn.functional.cross_entropy(counted, batch.wanted, reduction="sum")

    @torch.no_grad()
    def mean_loss(self, encoded: Sequence[Row]) -> float:
        """Mean loss a target token with the weights put in last."""
        ordered = sorted(encoded, key=lambda row: len(row.ids))  # rows of like length waste no padding
        size = 2 * self.config.train.batch_size
        parts = [self.collate(ordered[i : i + size]) for i in range(0, len(ordered), size)]
        losses = [self.loss_sum(batch.to(self.device)) for batch in parts]
        return sum(float(loss) for loss in losses) / sum(batch.terms for batch in parts)

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
            # Unpadded prompts need no mask; transformers then takes a generated end token for padding, and says so.
            with self._computing(), models.quiet():
                out = self.base.model.generate(
                    input_ids=ids.to(self.device), attention_mask=mask.to(self.device), generation_config=how
                )
            written = self.base.tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
            for i, text in zip(chosen, written, strict=True):
                texts[i] = text.strip()
        return texts
