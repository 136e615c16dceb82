"""The common base class of tasks with one model and an adapter: weights, devices, local training."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from typing_extensions import override

from fedveil.config import RunConfig, TaskConfig, config_key
from fedveil.contract.adapter import Adapter, AttachedModel, Mount
from fedveil.contract.param_spec import ParamSpec, Spec, Weights
from fedveil.contract.task import Rows, Task, TaskInfo, Watch, ignore_progress
from fedveil.contract.trainer import Trainer
from fedveil.data.batches import ExampleBatch
from fedveil.errors import ConfigError
from fedveil.models import base_files, library_logging, loading, published_name, training_modes
from fedveil.models.loaded_model import LoadedModel
from fedveil.rng import RandomStream
from fedveil.training import per_example
from fedveil.training.gradient_backend import GradientBackend
from fedveil.training.local_training import LocalTraining
from fedveil.training.threads import limit_threads

_NOTHING = contextlib.nullcontext()
_OF_SOME: Mapping[str, Any] = {
    "loss-mask": "targets",
    "packing": False,
    "preference-beta": 0.1,
}  # keys that a task may not support, with their defaults
_OFFERED: Mapping[Mount, str] = {"layers": "LoRA pairs or all weights", "cache": "a prefix", "texts": "a prompt"}


def check_task_config(config: RunConfig, adapter: Adapter, info: TaskInfo) -> None:
    """Check the run config as far as possible before a model is loaded.

    Raises:
        ConfigError: an adapter that the task's models do not support, a quantized base with an adapter that would
            train it, train.compile where it is not supported, or a train key or chat template that the task does not
            support.
        TaskError: there is no base model at that path.
    """
    if adapter.mount not in info.mounts:
        raise ConfigError(
            f'adapter.kind: the task "{config.task.name}" supports '
            f'{" or ".join(_OFFERED[mount] for mount in info.mounts)}, found "{adapter.kind}"; set the adapter in '
            "method.params, or choose a method with such an adapter"
        )
    adapter.check(config.train)
    if config.train.quantized_base != "none" and adapter.trains_base:
        raise ConfigError(
            f'train.quantized-base: an adapter of kind "{adapter.kind}" trains the base, which therefore cannot be '
            f'"{config.train.quantized_base}"; use an adapter of kind "lora"'
        )
    given = config.train.model_dump(by_alias=True)
    for key, default in _OF_SOME.items():
        if key not in info.train_keys and given[key] != default:
            raise ConfigError(
                f'train.{key}: the task "{config.task.name}" supports only {default!r}, found {given[key]!r}; '
                "leave it out"
            )
    if config.task.chat_template and not info.chats:
        raise ConfigError(f'task.chat-template: the task "{config.task.name}" does not support it; leave it out')
    if config.task.empty_texts != "refuse" and not info.drops:
        raise ConfigError(
            f'task.empty-texts: the task "{config.task.name}" does not support "{config.task.empty_texts}"; leave '
            "it out"
        )
    if config.task.multi_label and not info.labels:
        raise ConfigError(f'task.multi-label: the task "{config.task.name}" does not support it; leave it out')
    if config.task.tag_scheme != "iob2" and not info.tags:
        raise ConfigError(
            f'task.tag-scheme: the task "{config.task.name}" does not support "{config.task.tag_scheme}"; leave it out'
        )
    _check_columns(config.task, info)
    if config.task.image_window and config.task.image_column not in info.columns(config.task):
        raise ConfigError(
            f'task.image-window: the task "{config.task.name}" reads no images, so "{config.task.image_window}" '
            "has no effect; leave it out"
        )
    _check_source(config.task, info)
    training_modes.check_compile(config)
    where, is_folder = loading.find_model(config.task.model, info.tiny())
    if is_folder and where != "tiny":
        base_files.check_base_files(config.task.model, Path(where), adapter.trains_base)


def _check_columns(task: TaskConfig, info: TaskInfo) -> None:
    """Raise ConfigError for a column key that only other tasks read."""
    fields, columns = type(task).model_fields, info.columns(task)
    # image-column is exempt: a site's node config may name it for all runs, and apply_site_columns then sets it in each
    # run.
    for name in ("choices_column", "hint_column", "rejected_column"):
        value, default = getattr(task, name), fields[name].default
        if value != default and value not in columns:
            raise ConfigError(
                f'task.{config_key(name)}: the task "{task.name}" reads no such column, so only "{default}" is '
                f'allowed, found "{value}"; leave it out'
            )


def _check_source(task: TaskConfig, info: TaskInfo) -> None:
    """Raise ConfigError for a template that the task does not read, or that would make it ignore a column."""
    if task.messages_column:
        _check_messages(task, info)
    if not task.source_template:
        return
    if not info.templates:
        raise ConfigError(f'task.source-template: the task "{task.name}" does not support it; leave it out')
    if task.source_column != type(task).model_fields["source_column"].default:
        raise ConfigError(
            f'task.source-column: "{task.source_column}" has no effect with task.source-template; leave one of them out'
        )


def _check_messages(task: TaskConfig, info: TaskInfo) -> None:
    """Raise ConfigError for a conversations column without a chat template, or with a column that it replaces."""
    if not info.chats:
        raise ConfigError(
            f'task.messages-column: the task "{task.name}" does not support "{task.messages_column}"; leave it out'
        )
    fields = type(task).model_fields
    for name in ("source_template", "source_column", "target_column"):
        if (value := getattr(task, name)) != fields[name].default:
            raise ConfigError(
                f'task.{config_key(name)}: "{value}" has no effect with task.messages-column; leave one of them out'
            )
    if not task.chat_template:
        raise ConfigError(
            "task.chat-template: task.messages-column requires true, because the base's chat template determines "
            "how the turns of a conversation are joined; set it to true"
        )


def count_adapter_weights(task: Task) -> dict[str, object] | None:
    """Return the adapter's kind, its number of weights and the model's; None if they cannot be counted.

    They cannot be counted for a quantized base, which packs several weights into one number.
    """
    if not isinstance(task, AdaptedTask) or task.config.train.quantized_base != "none":
        return None
    count, own = sum(p.numel() for p in task.trained.values()), set(map(id, task.trained.values()))
    of_base = sum(p.numel() for p in task.base.model.parameters() if id(p) not in own)
    return {"kind": task.adapter.kind, "weights": count, "of": of_base + (count if task.adapter.trains_base else 0)}


class AdaptedTask(Task):
    """A model with its adapter. It returns weights on the device it received them on.

    Dropout is off unless the adapter uses it, and the client's random stream determines the batch order. With
    run.deterministic, training uses one thread, so that two processes on one machine give bit-identical results.
    """

    def __init__(self, config: RunConfig, adapter: Adapter, device: torch.device) -> None:
        self.config = config
        self.adapter = adapter
        self.device = device
        self.by: GradientBackend | None = None  # None: this process computes everything
        self._overwritten = False  # whether the model's own base weights were overwritten

    @abstractmethod
    def _load(self) -> LoadedModel:
        """Load the base with its adapter."""

    @cached_property
    def base(self) -> LoadedModel:
        """Return the base with its adapter. Its trained tensors hold the most recently loaded values."""
        return self._load()

    def _unchanged(self) -> LoadedModel:
        """Return the base with the weights that are on disk.

        If the adapter trains the base, and other weights have been loaded since, the base is read from disk again:
        keeping a copy of all weights in every site's memory would cost more.
        """
        return self._load() if self.adapter.trains_base and self._overwritten else self.base

    @property
    def trained(self) -> Mapping[str, Tensor]:
        """Return the parameters in the spec; they hold the most recently loaded values."""
        return self.base.trained

    @property
    @override
    def spec(self) -> Spec:
        """Return the names in the order of the model's layers; fp32."""
        places = self.base.places
        return {
            name: ParamSpec(tuple(p.shape), p.dtype, places.get(name), fixed=not p.requires_grad)
            for name, p in self.base.trained.items()
        }

    @property
    @override
    def accelerator(self) -> torch.device | None:
        return None if self.device.type == "cpu" else self.device

    @override
    def initial(self, rng: RandomStream) -> Weights:
        base: dict[str, Tensor] = {}
        if self.adapter.trains_base and self.base.draw is not None:
            base = dict(self.base.draw(rng))
        else:
            loaded_model = self._unchanged()
            if self.adapter.trains_base:
                base = {name: p.detach().cpu() for name, p in loaded_model.trained.items()}
            with limit_threads(self.config):
                base |= self.adapter.read(loaded_model.model, rng)
        drawn = self.adapter.draw({name: spec.shape for name, spec in self.spec.items()}, rng, base)
        if self.config.dp.is_noisy and isinstance(self, per_example.PerExampleLoss) and (rows := self._probe_rows()):
            with limit_threads(self.config):  # so that an error appears before the first round, not during it
                per_example.per_example_gradients(self, self.spec, rows, drawn)
        self.release()
        return drawn

    def _probe_rows(self) -> Rows:
        """Return rows to test whether the model supports per-example gradients; no rows if it certainly does."""
        return ()

    @override
    def trainer(self, rows: Rows, rng: RandomStream, watch: Watch = ignore_progress, round_: int = 0) -> Trainer:
        return LocalTraining(self, rows, rng, watch, round_, self.by)

    @abstractmethod
    def collate(self, rows: Rows) -> ExampleBatch:
        """Return one batch, on the CPU."""

    def training_batch(self, rows: Rows) -> ExampleBatch:
        """Return one batch of a training step, on the CPU."""
        return self.collate(rows)

    @abstractmethod
    def loss_sum(self, batch: Any) -> Tensor:
        """Return the summed loss of a batch from `collate` on the device."""

    @abstractmethod
    def mean_loss(self, encoded: Rows) -> float:
        """Return the mean loss of the examples with the most recently loaded weights."""

    def put(self, weights: Weights) -> None:
        """Copy the weights into the model. Raises TaskError if they do not match the spec."""
        self._overwritten = True
        self.base.put(weights)

    def show(self, weights: Weights) -> None:
        """Load read-only weights, without copying them if possible.

        They must not change until other weights are loaded. Raises TaskError if they do not match the spec.
        """
        if not self._can_release:
            self.put(weights)
            return
        self._overwritten = True
        self.base.lend(weights)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Return the tokens that end generated text; none for a task without generation."""
        return self.base.end_tokens

    @property
    def attached(self) -> AttachedModel:
        """Return the model with its adapter, for code that writes it to files."""
        base = self.base
        name = published_name.published_name(self.config.task.model, self.config.task.name)
        return AttachedModel(
            base.model, self._own_names, name, base.processor or base.tokenizer, self.end_tokens, base.heads
        )

    @override
    def save(self, weights: Weights, folder: Path) -> None:
        self.show(weights)
        try:
            with library_logging.quiet_libraries():
                self.adapter.save(folder, self.attached, weights)
        finally:
            self.release()

    def taken(self, weights: Weights) -> Weights:
        """Return the trained values, owned by the caller, on the device of `weights`, which are already loaded."""
        # This also applies to weights that are already on a GPU, which has no room for a second copy of the model
        # either.
        is_own = self.adapter.trains_base and not self.config.train.compile
        if is_own and next(iter(weights.values())).device == next(iter(self.trained.values())).device:
            return self.base.take()
        return {name: p.detach().to(weights[name].device, copy=True) for name, p in self.trained.items()}

    @override
    def release(self) -> None:
        if self._can_release:
            self._overwritten = True
            self.base.drop()

    @property
    def _can_release(self) -> bool:
        """Return whether the model's own tensors are trained, which makes it worthwhile to avoid a full copy in memory.

        A compiled model keeps the tensors it was compiled with.
        """
        return self.adapter.trains_base and self.device.type == "cpu" and not self.config.train.compile

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """Enable autocast under `train.precision = bf16`, and silence the 8-bit kernels' warnings about casts."""
        with (
            torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.train.precision == "bf16"),
            library_logging.quiet_libraries() if self.config.train.quantized_base != "none" else _NOTHING,
        ):
            yield

    @cached_property
    def _compiled(self) -> Any:
        return training_modes.compile_model(self.base.model, self.device)

    @contextlib.contextmanager
    def training(self, rng: RandomStream) -> Iterator[None]:
        """Return a context for the training steps, which recomputes layers under train.gradient-checkpointing.

        Dropout is drawn from `rng`.

        Raises:
            ConfigError: the model has no layers that can be recomputed.
        """
        model, drops = self.base.model, self.adapter.drops
        with contextlib.ExitStack() as around:
            if drops:
                around.enter_context(training_modes.enable_dropout(model, self.device, rng.torch_generator()))
            if self.config.train.gradient_checkpointing:
                around.enter_context(training_modes.recompute_activations(model, self.config.task.model, drops))
            yield

    def _forward(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the model's logits. Raises ConfigError if the machine does not support train.compile."""
        # Scoring uses the plain model: it would need a second compilation, for only a few batches.
        model = self._compiled if self.config.train.compile and torch.is_grad_enabled() else self.base.model
        with self._computing():
            logits: Tensor = model(**inputs).logits
        return logits

    @cached_property
    def _own_names(self) -> Mapping[str, str]:
        """Return the names of the trained tensors in this task's model."""
        known = {id(p): name for name, p in self.base.model.named_parameters()}
        return {name: known[id(p)] for name, p in self.base.trained.items() if id(p) in known}

    def _logits_at(self, weights: Mapping[str, Tensor], inputs: Mapping[str, Any]) -> Tensor:
        """Return the model's logits as a pure function of the trained weights, for torch.func to differentiate."""
        named = {self._own_names[name]: w for name, w in weights.items()}
        with self._computing(), _plain_attention():
            logits: Tensor = torch.func.functional_call(self.base.model, named, (), dict(inputs)).logits
        return logits

    def _parts(self, count: int) -> Iterator[range]:
        """Yield the indices of the batches for scoring."""
        size = 2 * self.config.train.batch_size
        return (range(i, min(i + size, count)) for i in range(0, count, size))


@contextlib.contextmanager
def _plain_attention() -> Iterator[None]:
    """Use the math attention kernel, the only one that supports vmap, and keep it in bf16.

    Otherwise torch would cast to fp32, and autocast would cast back in only one of the two passes.
    """
    reduced = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)  # on the CPU too
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(reduced)
