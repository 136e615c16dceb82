"""Your own model: one file with `model()`, `loss(model, batch)` and `dataset(folder, split)` instead of a task.

`task.module` names the file (`fedveil.models.own_module`); docs/tasks/own-model.md describes it. The loss in the
file is the mean over a batch's rows. FedVeil calls it for training, for scoring in eval mode and, under dp.*, for
single rows.

Under dp.*, each row is collated separately; otherwise padding or a mean over a batch would let other rows affect its
gradient. Rows with equal shapes are differentiated together by vmap. Rows with different shapes, and rows for models
that vmap does not support, are differentiated one by one.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from logging import getLogger
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate
from typing_extensions import override

from fedveil.adapters import export
from fedveil.config import RunConfig
from fedveil.contract.adapter import Adapter, AttachedModel
from fedveil.contract.param_spec import Weights, movable_names
from fedveil.contract.task import (
    DatasetShard,
    ExampleOrigin,
    ExamplePrediction,
    Examples,
    Rows,
    Task,
    TaskInfo,
    Watch,
    ignore_progress,
)
from fedveil.contract.trainer import PerExampleGradients, Trainer, TrainingResult
from fedveil.contract.trainer_wrappers import TrainerWrapper
from fedveil.data.own_rows import OwnBatch, OwnExample, OwnRow, OwnRows, describe_batch, map_tensors
from fedveil.data.partition import partition_indices
from fedveil.errors import ConfigError, FedVeilError, TaskError
from fedveil.models import loading, own_module
from fedveil.models.loaded_model import LoadedModel
from fedveil.models.own_module import OwnModule
from fedveil.models.own_network import load_network, norm_layers, seeded_generators, untracked_buffers
from fedveil.rng import RandomStream
from fedveil.training import own_export
from fedveil.training.adapter_task import AdaptedTask, check_task_config
from fedveil.training.scored_examples import draw_scored

__all__ = ["OwnModel"]

INFO = TaskInfo(
    mounts=("layers",),
    columns=lambda task: (),
    tiny=lambda: None,
    metrics=lambda task: own_module.score_directions(task.module),
)
_UNUSED = (  # keys for columns, and for features that FedVeil cannot apply to an unknown network
    "task.source-column", "task.source-template", "task.target-column", "task.image-column", "task.image-window",
    "task.choices-column", "task.hint-column", "task.label-column", "task.label-pattern", "task.num-classes",
    "task.class-names", "task.from-scratch", "task.partition", "train.quantized-base", "train.gradient-checkpointing",
    "train.compile", "dp.unit-column",
)  # fmt: skip

log = getLogger("fedveil.task")


def create(config: RunConfig, adapter: Adapter, device: str) -> Task:
    """Create the task of `config` and run the model file.

    Raises ConfigError for a key that own models do not support, and TaskError for a mistake in the file.
    """
    given, plain = config.flat(), RunConfig().flat()
    for key in _UNUSED:
        if given[key] != plain[key]:
            raise ConfigError(
                f'{key}: the task "own-model" supports only {plain[key]!r}, found {given[key]!r}; leave it out'
            )
    module = own_module.load_module(config)
    uses_base = module.needs_base("model")
    checked = config if uses_base else config.model_copy(update={"task": RunConfig().task})
    if uses_base and config.task.model == "tiny":
        raise ConfigError(f"task.model: set it to the folder or Hub id that model(base) in {module.name}.py loads")
    check_task_config(checked, adapter, INFO)
    return OwnModel(config, adapter, loading.pick_device(device), module)


@final
class OwnModel(AdaptedTask):
    """The network, loss and data set from one file."""

    def __init__(self, config: RunConfig, adapter: Adapter, device: torch.device, module: OwnModule) -> None:
        super().__init__(config, adapter, device)
        self.module = module
        self._said_one_by_one = False
        if config.dp.is_noisy:
            self._require_single_rows()

    @override
    def _load(self) -> LoadedModel:
        loaded = load_network(self.module, self.config, self.adapter, self.device)
        self._untouched = [(buffer, buffer.clone()) for buffer in untracked_buffers(loaded)]
        return loaded

    @property
    def _network(self) -> nn.Module:
        """Return the network as the file's functions expect it: without the parent that LoRA adds to a single layer."""
        model: nn.Module = self.base.model
        return model["model"] if isinstance(model, nn.ModuleDict) and list(model) == ["model"] else model

    @property
    def _file(self) -> str:
        return f"{self.module.name}.py"

    @property
    def _averages_norms(self) -> bool:
        """Return whether batch normalization uses batch statistics in training steps."""
        return self.adapter.trains_base and self.config.task.buffers == "averaged"

    @property
    @override
    def attached(self) -> AttachedModel:
        """Return the network; files saved from it name the model and the digest of the model file."""
        return AttachedModel(self.base.model, self._own_names, f"own model {self.module.name} ({self.module.digest})")

    @override
    def examples(self, data: Path, split: str, share: DatasetShard | None = None) -> Examples:
        """Return the rows of the file's dataset(). Raises TaskError if dataset() fails or returns no indexable rows."""
        from datasets import Dataset

        if not data.exists():
            raise TaskError(f'task.data: there is no folder or file at "{data}"; correct the path')
        arguments = {"base": self.config.task.model} if self.module.needs_base("dataset") else {}
        try:
            with seeded_generators(self.config.run.seed):
                rows = self.module.functions["dataset"](data, split, **arguments)
        except Exception as error:
            advice = f'correct it, or the data of the split "{split}" below "{data}"'
            raise own_module.explain_error(error, self._file, "dataset()", advice) from error
        if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
            raise TaskError(
                "task.module: dataset() must return rows that support len() and indexing, but returned "
                f"{type(rows).__name__}; a list, a torch.utils.data.Dataset or a datasets.Dataset supports both, "
                "an iterable or a loader does not"
            )
        chosen: Sequence[int] = range(len(rows))
        if share is not None:
            table = Dataset.from_dict({"row": list(chosen)})
            chosen = partition_indices(table, share, self.config.task, self.config.run.seed)
        most = self.config.task.examples_per_site
        if split == "train" and 0 < most < len(chosen):
            chosen = [chosen[i] for i in sorted(random.Random(self.config.run.seed).sample(range(len(chosen)), most))]
        file = str(data if data.is_file() else data / split)
        return [OwnExample({"row": i}, ExampleOrigin(file, i + 1), str(data), dataset=rows) for i in chosen]

    @override
    def encode(self, examples: Examples) -> OwnRows:
        """Return the rows; an item is read when a batch needs it."""
        return OwnRows(examples)

    @override
    def trainer(self, rows: Rows, rng: RandomStream, watch: Watch = ignore_progress, round_: int = 0) -> Trainer:
        trainer = super().trainer(rows, rng, watch, round_)
        norms = norm_layers(self._network) if self._averages_norms else []
        if norms and len(rows) % self.config.train.batch_size == 1 % self.config.train.batch_size:
            raise TaskError(
                "task.module: batch normalization needs at least two rows in every batch, but the last batch of "
                "an epoch has one; choose another train.batch-size, or use GroupNorm"
            )
        has_buffers = any(tensor.fixed for tensor in self.spec.values())
        return _WithoutGradient(trainer) if has_buffers else trainer

    @override
    def collate(self, rows: Sequence[OwnRow]) -> OwnBatch:
        """Return one batch, on the CPU. Raises TaskError for an unreadable row and for rows of unequal shape."""
        try:
            items = [row.dataset[row.index] for row in rows]
        except Exception as error:
            advice = "correct dataset(), or the data"
            raise own_module.explain_error(error, self._file, "a row of dataset()", advice) from error
        own = self.module.functions.get("collate")
        arguments = {"base": self.config.task.model} if self.module.needs_base("collate") else {}
        try:
            content = default_collate(items) if own is None else own(items, **arguments)
        except Exception as error:
            if own is not None:
                raise own_module.explain_error(error, self._file, "collate()", "correct it") from error
            first = next((each for each in items if describe_batch(each) != describe_batch(items[0])), items[0])
            raise TaskError(
                f"task.module: without a collate() in {self._file}, all rows must have the same shape, found "
                f"{describe_batch(items[0])} and {describe_batch(first)}; write a collate(rows) that pads them"
            ) from error
        return OwnBatch(map_tensors(content, lambda tensor: tensor), len(rows))

    @contextlib.contextmanager
    @override
    def training(self, rng: RandomStream) -> Iterator[None]:
        """Return a context for the training steps: training mode, with random draws from `rng`."""
        network = self._network
        self._restore_buffers()
        with seeded_generators(rng.torch_generator().initial_seed(), self.device), super().training(rng):
            network.train()
            if not self._averages_norms:
                for name in norm_layers(network):
                    network.get_submodule(name).eval()
            try:
                yield
            finally:
                network.eval()
                self._restore_buffers()

    def _restore_buffers(self) -> None:
        for buffer, value in self._untouched if "base" in vars(self) else ():
            buffer.copy_(value)

    @override
    def loss_sum(self, batch: OwnBatch) -> Tensor:
        """Return the mean loss of the batch times its number of rows."""
        loss = self._loss(self._network, batch.content)
        if not loss.requires_grad:
            raise TaskError(
                "task.module: the loss has no gradient, so it does not depend on the trained weights; leave out "
                ".detach(), .item() and torch.no_grad()"
            )
        return loss * batch.count

    def _loss(self, network: nn.Module, content: Any) -> Tensor:
        """Return the file's loss for a batch after checking it. Raises TaskError for a mistake in loss()."""
        try:
            with self._computing():
                loss = self.module.functions["loss"](network, content)
        except FedVeilError:
            raise
        except Exception as error:
            raise self._explained(error, content) from error
        self._require_scalar(loss)
        return loss.float()  # type: ignore[no-any-return]

    def _require_scalar(self, loss: object) -> None:
        if isinstance(loss, Tensor) and loss.ndim == 0 and loss.is_floating_point():
            return
        shown = type(loss).__name__
        if isinstance(loss, Tensor):
            shown = f"a tensor of shape {tuple(loss.shape)} and type {loss.dtype}"
        raise TaskError(
            "task.module: loss() must return the mean over the rows as one number (a scalar tensor), but returned "
            f"{shown}; end it with .mean(), or return output.loss, without .item()"
        )

    def _explained(self, error: Exception, content: Any) -> TaskError:
        """Return the error for an exception in loss(). The exception's text may quote a row, so it is not shown."""
        text, shapes = str(error), describe_batch(content)
        if isinstance(error, RuntimeError) and ("same device" in text or "on device" in text):
            return TaskError(
                f"task.module: loss() mixes tensors on several devices, but model and batch are on {self.device}; "
                "create new tensors from those of the batch (torch.zeros_like, device=x.device)"
            )
        if isinstance(error, RuntimeError) and any(word in text for word in ("dtype", "scalar type", "data type")):
            return TaskError(
                "task.module: the labels do not have the type that the loss takes (cross entropy: int64; binary "
                f"and MSE: float32): {shapes} ({type(error).__name__}); convert them in dataset()"
            )
        if isinstance(error, TypeError | KeyError | AttributeError | ValueError):
            return TaskError(
                f"task.module: loss() cannot unpack a batch from dataset() and collate(), which is {shapes} "
                f"({own_module.describe_error(error, self._file)}); unpack it accordingly"
            )
        return own_module.explain_error(error, self._file, f"loss() on a batch {shapes}", "correct it")

    @override
    @torch.no_grad()
    def mean_loss(self, encoded: Rows) -> float:
        """Return the mean loss over the rows with the last loaded weights."""
        total = 0.0
        for batch in self._scored_batches(encoded):
            total += float(self._loss(self._network, batch.content)) * batch.count
        return total / len(encoded)

    def _scored_batches(self, rows: Rows) -> Iterator[OwnBatch]:
        for part in self._parts(len(rows)):
            yield self.collate([rows[i] for i in part]).to(self.device)

    @override
    @torch.no_grad()
    def evaluate(self, weights: Weights, examples: Examples, generate: bool) -> dict[str, float]:
        """Return the loss and the scores from the file's metrics() over at most evaluate.eval-examples rows.

        Raises TaskError if there are no rows, or for scores that `better` does not name.
        """
        if not examples:
            raise TaskError("examples: there are none to score; correct task.evaluation")
        self.show(weights)
        rows = self.encode(draw_scored(examples, self.config))
        scores = {"loss": self.mean_loss(rows)}
        own = self.module.functions.get("metrics")
        if own is None:
            return scores
        batches = [batch.content for batch in self._scored_batches(rows)]
        try:
            found = {name: float(value) for name, value in own(self._network, batches).items()}
        except Exception as error:
            raise own_module.explain_error(error, self._file, "metrics()", "return numbers by name") from error
        if set(found) != set(self.module.better):
            raise TaskError(
                f"task.module: `better` lists the scores {', '.join(sorted(self.module.better))}, but metrics() "
                f"returned {', '.join(sorted(found))}; make the two equal"
            )
        return scores | found

    @override
    @torch.no_grad()
    def predict(self, weights: Weights, rows: Rows, generate: bool = False) -> Iterator[ExamplePrediction]:
        """Yield each row's logits and class from the file's predict(). Raises TaskError if there is no predict()."""
        own = self.module.functions.get("predict")
        if own is None:
            raise TaskError(
                f"task.module: {self._file} has no function predict(model, batch); add it, or leave out attacks on "
                "a model's outputs"
            )
        self.show(weights)
        for batch in self._scored_batches(rows):
            logits, wanted = own(self._network, batch.content)
            if logits.ndim != 2 or wanted.shape != (batch.count,) or len(logits) != batch.count:
                raise TaskError(
                    "task.module: predict() must return logits (rows, classes) and classes (rows,), but returned "
                    f"{describe_batch((logits, wanted))} for {batch.count} rows; correct it"
                )
            for i in range(batch.count):
                yield ExamplePrediction({"target": logits[i : i + 1].float().cpu()}, wanted[i : i + 1].cpu())

    def samples(self, rows: Rows) -> tuple[Tensor, ...]:
        """Return each row, collated separately, as tensors; see per_example.PerExampleLoss. Raises TaskError."""
        self._require_single_rows()
        leaves = [pytree.tree_flatten(self.collate([row]).content) for row in rows]
        self._structure = leaves[0][1]
        if any(len(each) != len(leaves[0][0]) or structure != self._structure for each, structure in leaves):
            raise TaskError(
                f"task.module: the rows of {self._file} do not all have the same tensors; make them equal in collate()"
            )
        stacked = []
        for column in zip(*(each for each, _ in leaves), strict=True):
            if not all(isinstance(leaf, Tensor) for leaf in column) or len({leaf.shape for leaf in column}) > 1:
                raise _UnequalRowsError(
                    "task.module: all rows must have the same shape and consist only of tensors; pad the rows to "
                    "one length in collate()"
                )
            stacked.append(torch.stack(column).to(self.device))
        return tuple(stacked)

    def sample_loss(self, weights: Mapping[str, Tensor], *sample: Tensor) -> Tensor:
        """Return the loss of one row as a pure function of the weights."""
        return self._single_loss(weights, pytree.tree_unflatten(list(sample), self._structure))

    def example_gradients(self, rows: Rows, weights: Weights) -> PerExampleGradients:
        """Return the gradient of each row's own loss; see per_example.DifferentiatesRows."""
        there = {name: w.detach().to(self.device) for name, w in weights.items()}
        moved = {name: there.pop(name) for name in movable_names(self.spec)}

        def loss(free: Mapping[str, Tensor], *sample: Any) -> Tensor:
            return self.sample_loss({**there, **free}, *sample)

        reason = "rows of several shapes"
        try:
            samples = self.samples(rows)
            each: Any = torch.func.vmap(
                torch.func.grad_and_value(loss), in_dims=(None, *(0 for _ in samples)), randomness="error"
            )
            gradients, losses = each(moved, *samples)
            return PerExampleGradients({name: g.detach() for name, g in gradients.items()}, losses.detach())
        except _UnequalRowsError:
            pass
        except TaskError as error:
            if error.__cause__ is None:  # raised by our own check, not by the network
                raise
            reason = type(error.__cause__).__name__
        if not self._said_one_by_one:
            self._said_one_by_one = True
            log.info("%s: noisy steps differentiate row by row, because vmap does not apply (%s)", self._file, reason)

        def content_loss(free: Mapping[str, Tensor], content: Any) -> Tensor:
            return self._single_loss({**there, **free}, content)

        one: Any = torch.func.grad_and_value(content_loss)
        found = [one(moved, self.collate([row]).to(self.device).content) for row in rows]
        return PerExampleGradients(
            {name: torch.stack([gradient[name].detach() for gradient, _ in found]) for name in moved},
            torch.stack([value.detach() for _, value in found]),
        )

    def _single_loss(self, weights: Mapping[str, Tensor], content: Any) -> Tensor:
        named = {f"network.{name}": weights[key] for key, name in self._inner_names.items()}
        loss: Tensor = torch.func.functional_call(_LossOfNetwork(self), named, (content,))
        return loss

    @cached_property
    def _inner_names(self) -> Mapping[str, str]:
        """Return the names of the exchanged tensors, including buffers, in the network."""
        inner = [*self._network.named_parameters(), *self._network.named_buffers()]
        known = {id(tensor): name for name, tensor in inner}
        return {name: known[id(tensor)] for name, tensor in self.base.trained.items()}

    def _require_single_rows(self) -> None:
        """Raise TaskError unless checks and the author's declaration say that a row's gradient depends on it alone."""
        if not self.module.independent_rows:
            raise TaskError(
                "task.module: dp.* requires independent_rows = True in the file, which declares that dataset() "
                "builds each row from that row alone (no mean, scale or vocabulary over a site's rows); check "
                "that this is so, and add it"
            )
        if self._averages_norms and (norms := norm_layers(self._network)):
            raise TaskError(
                "task.module: under dp.*, a row's gradient must not depend on other rows, as it does in the batch "
                f'normalization {norms[0]}; use nn.GroupNorm, or set task.buffers = "initial", which keeps the '
                "initial statistics"
            )

    @override
    def save(self, weights: Weights, folder: Path) -> None:
        """Write the network's weights as safetensors, or the LoRA pairs in PEFT format, with the file that ran."""
        self.show(weights)
        try:
            if self.adapter.trains_base:
                export.write_network(folder, self._network)
            else:
                self.adapter.save(folder, self.attached, weights)
            own_export.write_module(folder, self.module, self.config)
        finally:
            self.release()


class _UnequalRowsError(TaskError):
    """Raised for rows that cannot be stacked."""


@final
class _LossOfNetwork(nn.Module):
    """The loss as a network's forward pass, so that `functional_call` replaces the weights throughout loss()."""

    def __init__(self, task: OwnModel) -> None:
        super().__init__()
        self.network = task._network
        self._of = task._loss

    @override
    def forward(self, content: Any) -> Tensor:
        return self._of(self.network, content)


@final
class _WithoutGradient(TrainerWrapper):
    """A trainer for a model with averaged buffers, which have no gradient to send."""

    @override
    def gradient(self, weights: Weights) -> TrainingResult:
        raise TaskError(
            "task.module: the method sends gradients, but averaged buffers have none; use nn.GroupNorm, or set "
            'task.buffers = "initial", which keeps the buffers\' initial values'
        )

    def mean_loss(self, weights: Weights, rows: Rows) -> float:
        """Return the wrapped trainer's mean loss over the rows."""
        return float(self._trainer.mean_loss(weights, rows))  # type: ignore[attr-defined]
