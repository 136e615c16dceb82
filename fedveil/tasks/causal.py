"""What every task around a causal language model shares: weights in and out, its loss, scoring, generation."""

from __future__ import annotations

import contextlib
import random
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedveil import lora
from fedveil.adapters import Adapter, AllWeights
from fedveil.config import RunConfig
from fedveil.errors import ConfigError
from fedveil.method import Spec, TensorSpec, Weights
from fedveil.rng import Stream
from fedveil.tasks import adapting, batches, library, models, partition, rows, speed
from fedveil.tasks.base import Examples, Prediction, Share, Task, Watch, unwatched
from fedveil.tasks.batches import Batch, Row
from fedveil.tasks.training import LocalTraining

WHERE = "fedveil row"  # the column that says where an example came from, for messages
_NOTHING = contextlib.nullcontext()


def check(config: RunConfig, adapter: Adapter) -> None:
    """What can be said before a model is loaded.

    Raises:
        ConfigError: a quantised base under an adapter that would train it, or train.compile where it does not go.
        TaskError: no base model at that path.
    """
    if config.train.quantized_base != "none" and isinstance(adapter, AllWeights):
        raise ConfigError(
            f'train.quantized-base: expected "none" with an adapter of kind "{adapter.kind}", which trains the base, '
            f'found "{config.train.quantized_base}"; use an adapter of kind "lora"'
        )
    speed.check(config)
    models.find(config.task.model, config.task.name)


def where(example: Mapping[str, Any]) -> str:
    """The row of an example, for a message."""
    return str(example.get(WHERE) or f"a row with {', '.join(example)}")


class CausalTask(Task):
    """A causal language model with its adapter. Weights come back on the device that they were given on.

    The loss is the mean over target tokens (the end among them). Nothing is dropped out and batches come in the order
    that the client's stream draws; with run.deterministic one thread trains, so that two processes on one machine end
    bit-identically.
    """

    def __init__(self, config: RunConfig, adapter: Adapter, device: torch.device) -> None:
        self.config = config
        self.adapter = adapter
        self.device = device

    @abstractmethod
    def _load(self) -> models.Base:
        """The base with its adapter."""

    @cached_property
    def base(self) -> models.Base:
        """The base with its adapter. Its trained tensors hold whatever was put in last."""
        return self._load()

    @cached_property
    def _base_weights(self) -> Weights:
        if not isinstance(self.adapter, AllWeights):
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
        if isinstance(self.adapter, AllWeights):
            return {name: w.clone() for name, w in self._base_weights.items()}
        return lora.draw(self.adapter, {name: spec.shape for name, spec in self.spec.items()}, rng)

    def _read(self, data: Path, split: str, columns: tuple[str, ...], share: Share | None) -> Examples:
        """Rows of `split`, all columns; of the split "train" at most task.max-examples, a seeded choice in file order.

        Each row has its file and number under WHERE.
        """
        task, seed = self.config.task, self.config.run.seed
        file = rows.split_file(Path(data), split)
        table = rows.read(file, columns)
        table = table.remove_columns([WHERE] if WHERE in table.column_names else [])
        table = table.add_column(WHERE, [f"row {i + 1} of {file}" for i in range(len(table))])
        if share is not None:
            table = partition.cut(table, share, task, seed)
        if split == "train" and 0 < task.max_examples < len(table):
            table = table.select(sorted(random.Random(seed).sample(range(len(table)), task.max_examples)))
        found: list[Mapping[str, Any]] = table.to_list()
        return found

    def local(self, rows: Sequence[Row], rng: Stream, watch: Watch = unwatched) -> LocalTraining:
        """Training on `rows`. Raises TaskError where there are none."""
        return LocalTraining(self, rows, rng, watch)

    def put(self, weights: Weights) -> None:
        """Puts weights into the model. Raises TaskError where they are not the spec's."""
        if isinstance(self.adapter, AllWeights):
            self._base_weights  # noqa: B018  # kept before they are overwritten
        adapting.put(weights, self.base.trained)

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """Autocast under `train.precision = bf16`, and silence of the 8-bit kernels about their casts."""
        with (
            torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.train.precision == "bf16"),
            library.quiet() if self.config.train.quantized_base != "none" else _NOTHING,
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

    def _logits(self, batch: Batch) -> Tensor:
        # Scoring would be compiled a second time, for a few batches.
        model = self._compiled if self.config.train.compile and torch.is_grad_enabled() else self.base.model
        with self._computing():
            logits: Tensor = model(
                input_ids=batch.ids, attention_mask=batch.mask, use_cache=False, **batch.inputs
            ).logits
        return logits

    def loss_sum(self, batch: Batch) -> Tensor:
        """Summed loss of the target tokens of `batch`, which lies on the device.

        Raises:
            ConfigError: train.compile on a machine that cannot.
        """
        counted = self._logits(batch).flatten(0, 1)[batch.positions].float()
        return torch.nn.functional.cross_entropy(counted, batch.wanted, reduction="sum")

    def _parts(self, count: int) -> Iterator[range]:
        """Indices of the batches of a scoring."""
        size = 2 * self.config.train.batch_size
        return (range(i, min(i + size, count)) for i in range(0, count, size))

    @torch.no_grad()
    def mean_loss(self, encoded: Sequence[Row]) -> float:
        """Mean loss a target token with the weights put in last."""
        ordered = sorted(encoded, key=lambda row: len(row.ids))  # rows of like length waste no padding
        total = terms = 0.0
        for part in self._parts(len(ordered)):
            batch = self.collate([ordered[i] for i in part])
            total += float(self.loss_sum(batch.to(self.device)))
            terms += batch.terms
        return total / terms

    @torch.no_grad()
    def predict(self, weights: Weights, rows: Sequence[Row], generate: bool = False) -> Iterator[Prediction]:
        """See Task.predict. The slice "image" is there where the model has image tokens."""
        self.put(weights)
        image = self.base.image_token
        for part in self._parts(len(rows)):
            chosen = [rows[i] for i in part]
            logits = self._logits(self.collate(chosen).to(self.device)).float().cpu()
            written = self._written(chosen) if generate else []
            for i, row in enumerate(chosen):
                slices = {"target": logits[i, max(1, row.start) - 1 : len(row.ids) - 1]}
                if image is not None:
                    slices["image"] = logits[i, [at for at, token in enumerate(row.ids) if token == image]]
                if generate:
                    slices["generated"] = written[i][1]
                yield Prediction(slices, torch.tensor(row.ids[max(1, row.start) :]))

    @torch.no_grad()
    def _texts_of(self, prompts: Sequence[Row]) -> list[str]:
        """The text that the model writes behind each prompt: greedy, or evaluate.beams beams."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
        texts = [""] * len(prompts)
        for part in self._parts(len(prompts)):
            chosen = [order[i] for i in part]
            for i, (ids, _) in zip(chosen, self._written([prompts[i] for i in chosen]), strict=True):
                texts[i] = self.base.tokenizer.decode(ids, skip_special_tokens=True).strip()
        return texts

    @property
    def _prompt_limit(self) -> int:
        """Longest prompt that leaves room for evaluate.max-new-tokens. Raises ConfigError where there is none."""
        new, context, longest = self.config.evaluate.max_new_tokens, self.base.context, self.config.task.max_tokens
        limit = longest if context is None else min(longest, context - new)
        if limit < 1:
            raise ConfigError(
                f"evaluate.max-new-tokens: expected less than {context}, the context of {self.config.task.model}, "
                f"found {new}; lower it"
            )
        return limit

    def _written(self, rows: Sequence[Row]) -> list[tuple[Tensor, Tensor]]:
        """What the model writes behind the prompt of each row, as one batch: tokens, and the logits behind each of them."""
        from transformers import GenerationConfig

        end = self.base.tokenizer.eos_token_id
        how = GenerationConfig(
            max_new_tokens=self.config.evaluate.max_new_tokens,
            num_beams=self.config.evaluate.beams,
            do_sample=False,
            eos_token_id=end,
            pad_token_id=end,
            return_dict_in_generate=True,
            output_logits=True,
        )
        prompts = [_prompt(row) for row in rows]
        width = max(len(row.ids) for row in prompts)
        batch = self.collate([_padded(row, width, end) for row in prompts]).to(self.device)
        mask = torch.tensor([[0] * (width - len(row.ids)) + [1] * len(row.ids) for row in prompts], device=self.device)
        # Unpadded prompts need no mask; transformers then takes a generated end token for padding, and says so.
        with self._computing(), library.quiet():
            out = self.base.model.generate(
                input_ids=batch.ids, attention_mask=mask, generation_config=how, **batch.inputs
            )
        found = []
        logits = torch.stack(out.logits, 1).float().cpu() if self.config.evaluate.beams == 1 else None
        for i, ids in enumerate(out.sequences[:, width:].cpu()):
            ends = (ids == end).nonzero()
            length = int(ends[0]) + 1 if len(ends) else len(ids)
            found.append((ids[:length], torch.empty(0) if logits is None else logits[i, :length]))
        return found


def _prompt(row: Row) -> Row:
    return replace(row, ids=row.ids[: row.start])


def _padded(row: Row, width: int, token: int) -> Row:
    """The row with `token` before it, up to that width."""
    return replace(row, ids=[token] * (width - len(row.ids)) + row.ids, start=width)
