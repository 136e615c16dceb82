"""What every task around one model with an adapter shares: weights in and out, how it computes, local training."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedveil.adapters import factors, prefix_layers, prompts
from fedveil.adapters.all_weights import AllWeights
from fedveil.adapters.kinds import Adapter, trains_base
from fedveil.adapters.prefix import Prefix
from fedveil.adapters.prompt import Prompt
from fedveil.config import RunConfig
from fedveil.contract.spec import Spec, TensorSpec, Weights
from fedveil.contract.task import Rows, Task, Watch, unwatched
from fedveil.errors import ConfigError
from fedveil.models import attach, library, loading, memory
from fedveil.rng import Stream
from fedveil.rows.batches import AnyBatch
from fedveil.training.local_training import LocalTraining

PROMPTED = "clip-prompt"  # the one task that trains a prompt
_NOTHING = contextlib.nullcontext()


def check(config: RunConfig, adapter: Adapter) -> None:
    """What can be said before a model is loaded.

    Raises:
        ConfigError: a quantised base under an adapter that would train it, train.compile where it does not go, or a
            prompt for a task that has none.
        TaskError: no base model at that path.
    """
    if isinstance(adapter, Prompt) != (config.task.name == PROMPTED):
        wanted = "a prompt" if config.task.name == PROMPTED else "LoRA pairs or all weights"
        raise ConfigError(
            f'adapter.kind: expected {wanted} for the task "{config.task.name}", found "{adapter.kind}"; set the adapter '
            "in method.fields, or take a method that has such a one"
        )
    if isinstance(adapter, Prefix):
        if config.task.name != "text-generation":
            raise ConfigError(
                f'adapter.kind: expected "lora" or "all" for the task "{config.task.name}", found "prefix"; a prefix goes with '
                'task.name = "text-generation"'
            )
        if (
            config.train.checkpointing or config.train.compile
        ):  # recomputed layers ignore the cache that a prefix lies in
            raise ConfigError(
                'train.checkpointing, train.compile: expected false with an adapter of kind "prefix", found true; set false'
            )
    if config.train.quantized_base != "none" and trains_base(adapter):
        raise ConfigError(
            f'train.quantized-base: expected "none" with an adapter of kind "{adapter.kind}", which trains the base, '
            f'found "{config.train.quantized_base}"; use an adapter of kind "lora"'
        )
    memory.check(config)
    loading.find(config.task.model, config.task.name)


class AdaptedTask(Task):
    """A model with its adapter. Weights come back on the device that they were given on.

    Nothing is dropped out and batches come in the order that the client's stream draws; with run.deterministic one
    thread trains, so that two processes on one machine end bit-identically.
    """

    def __init__(self, config: RunConfig, adapter: Adapter, device: torch.device) -> None:
        self.config = config
        self.adapter = adapter
        self.device = device

    @abstractmethod
    def _load(self) -> loading.Base:
        """The base with its adapter."""

    @cached_property
    def base(self) -> loading.Base:
        """The base with its adapter. Its trained tensors hold whatever was put in last."""
        return self._load()

    @cached_property
    def _base_weights(self) -> Weights:
        if not trains_base(self.adapter):
            return {}
        return {name: p.detach().to("cpu", copy=True) for name, p in self.base.trained.items()}

    @property
    def trained(self) -> Mapping[str, Tensor]:
        """The parameters behind the spec; they hold whatever was put in last."""
        return self.base.trained

    @property
    def spec(self) -> Spec:
        """Names in the order of the model's layers; fp32."""
        places = self.base.places
        return {name: TensorSpec(tuple(p.shape), p.dtype, places.get(name)) for name, p in self.base.trained.items()}

    def initial(self, rng: Stream) -> Weights:
        """LoRA: A uniform within 1/sqrt(d_in), B zero; a prompt: normal; all weights: the base's own, or drawn. On the CPU."""
        if isinstance(self.adapter, AllWeights):
            if self.base.draw is not None:
                return self.base.draw(rng)
            return {name: w.clone() for name, w in self._base_weights.items()}
        shapes = {name: spec.shape for name, spec in self.spec.items()}
        if isinstance(self.adapter, Prefix):
            return {**self._base_weights, prefix_layers.NAME: prefix_layers.draw(shapes[prefix_layers.NAME], rng)}
        if isinstance(self.adapter, Prompt):
            return prompts.draw(self.adapter, shapes, rng)
        return factors.draw(self.adapter, shapes, rng)

    def trainer(self, rows: Rows, rng: Stream, watch: Watch = unwatched) -> LocalTraining:
        """Training on `rows`. Raises TaskError where there are none."""
        return LocalTraining(self, rows, rng, watch)

    @abstractmethod
    def collate(self, rows: Rows) -> AnyBatch:
        """One batch, on the CPU."""

    @abstractmethod
    def loss_sum(self, batch: Any) -> Tensor:
        """Summed loss of a batch of `collate`, which lies on the device."""

    @abstractmethod
    def mean_loss(self, encoded: Rows) -> float:
        """Mean loss of the rows with the weights put in last."""

    def put(self, weights: Weights) -> None:
        """Puts weights into the model. Raises TaskError where they are not the spec's."""
        if trains_base(self.adapter):
            self._base_weights  # noqa: B018  # kept before they are overwritten
        attach.put(weights, self.base.trained)

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
        return memory.compiled(self.base.model, self.device)

    def training(self) -> contextlib.AbstractContextManager[None]:
        """Around the training steps: layers are recomputed under train.checkpointing.

        Raises:
            ConfigError: the model has no layers that can be.
        """
        if not self.config.train.checkpointing:
            return _NOTHING
        return memory.recomputing(self.base.model, self.config.task.model)

    def _forward(self, inputs: Mapping[str, Any]) -> Tensor:
        """The model's logits. Raises ConfigError for train.compile on a machine that cannot."""
        # Scoring would be compiled a second time, for a few batches.
        model = self._compiled if self.config.train.compile and torch.is_grad_enabled() else self.base.model
        with self._computing():
            logits: Tensor = model(**inputs).logits
        return logits

    @cached_property
    def _own_names(self) -> Mapping[str, str]:
        """The names of the trained tensors, in the model as it is built here."""
        known = {id(p): name for name, p in self.base.model.named_parameters()}
        return {name: known[id(p)] for name, p in self.base.trained.items()}

    def _logits_at(self, weights: Mapping[str, Tensor], inputs: Mapping[str, Any]) -> Tensor:
        """The model's logits as a pure function of the trained weights: what torch.func differentiates."""
        named = {self._own_names[name]: w for name, w in weights.items()}
        with self._computing(), sdpa_kernel(SDPBackend.MATH):  # the others have no rule for many samples at once
            logits: Tensor = torch.func.functional_call(self.base.model, named, (), dict(inputs)).logits
        return logits

    def _parts(self, count: int) -> Iterator[range]:
        """Indices of the batches of a scoring."""
        size = 2 * self.config.train.batch_size
        return (range(i, min(i + size, count)) for i in range(0, count, size))
