"""Plan the memory of a site's training process, by part, before anything is loaded.

    base        4 bytes per entry; 2 if it is frozen and train.precision = bf16; quantized layers: `QuantizedLayer`
    adapter     fp32: 4 bytes per entry, and as much for its gradient; AdamW's two moments take 8 bytes per entry,
                those of adamw-8bit 2 + 8 / 256
    kept        activations that a forward pass keeps for the backward pass, counted by `activations`. On a GPU in fp32
                with grouped-query attention, add 4 bytes for each example, head, pair of tokens and layer: torch has
                no kernel for this case that avoids the matrix, unless no example is padded
    gradients   of activations: at most as much again as one layer keeps. Of trained weights: 4 bytes per entry, minus
                the activations kept by the other layers, which are freed as these gradients appear; nothing is
                subtracted with train.gradient-accumulation-steps, which keeps the gradients across batches
    logits      12 bytes for each example, token and vocabulary entry: logits, logits of the targets, and their
                logarithms in fp32; in the backward pass, their gradients reuse this memory. 8 bytes in scoring
    working     two tensors as large as the largest trained one: the two gradients of a tied embedding, and on a CPU
                AdamW's square root and quotient; and one dequantized layer of a quantized base

With `site.processes`, the plan is for rank 0, which needs the most: the other ranks have no optimizer states and do not
score.

    kept, logits    for ceil(batch / processes) examples. In scoring, for all examples, because rank 0 scores alone
                    unless the base is sharded (training/ranks/coordinator.py)
    sums            gradients are sent to rank 0 in pieces of 32 MB, or of one tensor if it is larger
    shard-base      a rank's shard of the base, and unsharded: two layers (one in use, one being received) and the
                    parts outside the layers (training/ranks/sharding.py)

A process goes through phases, and its peak is the largest phase. All examples are assumed to have task.max-tokens
tokens, so shorter ones need less. Unused memory in the GPU allocator's blocks (fragmentation) is not included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fedveil.config import RunConfig, TrainConfig
from fedveil.contract.adapter import Adapter
from fedveil.contract.param_spec import Spec, movable_names
from fedveil.errors import ConfigError
from fedveil.models.planning import activations, meta_model
from fedveil.models.planning.meta_model import MetaModel
from fedveil.models.planning.model_config import ModelConfig

LIBRARIES = 660_000_000  # peak of a round on the tiny base: Python 3.11, torch 2.13 (CPU), transformers 5.23, peft 0.21
CONTEXT = 1_000_000_000  # GPU memory for CUDA and its libraries: assumed; 0.8e9 on an H200, torch 2.11 and CUDA 13.0
_LOGITS, _SCORED = 12, 8  # bytes, see above
_PIECE = 32 << 20  # bytes (training/ranks/process_group.py)
_IN_MEMORY = 16 << 20  # bytes; a larger message is kept in a file while the worker trains (wire/mmap_tensors.py)
_SMALLEST, _SCALED = 4096, 256  # minimum entries for 8-bit states, and entries per scale (training/optimizers.py)


@dataclass(frozen=True)
class MemoryPart:
    """One part of the memory, in bytes."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class RankLayout:
    """A site's processes, with one device each; with `is_split`, they shard a frozen base (shard-base)."""

    count: int = 1
    is_split: bool = False

    def share(self, rows: int) -> int:
        """Return the largest number of a batch's examples that one rank gets."""
        return -(-rows // self.count)


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that one worker needs.

    Attributes:
        phases: for each phase, the parts in the memory of the model's device.
        host: for a model on a GPU, the parts in main memory.
    """

    phases: Mapping[str, tuple[MemoryPart, ...]]
    host: tuple[MemoryPart, ...]

    @property
    def peak(self) -> str:
        """Return the phase that needs the most."""
        return max(self.phases, key=self.needs)

    @property
    def needed(self) -> int:
        """Return the bytes needed at the peak."""
        return self.needs(self.peak)

    def needs(self, phase: str) -> int:
        """Return the bytes needed in a phase."""
        return sum(part.nbytes for part in self.phases[phase])


def plan_memory(
    settings: ModelConfig,
    config: RunConfig,
    adapter: Adapter,
    on_gpu: bool,
    stored: int = 0,
    messages: tuple[int, int] = (0, 0),
    ranks: RankLayout = RankLayout(),
) -> MemoryPlan:
    """Plan the memory of a run on a base.

    Args:
        settings: settings of the base.
        config: the run config; only its task and train sections are read.
        adapter: the method's adapter.
        on_gpu: whether the model is on a GPU.
        stored: bytes of its weight files, which are memory-mapped during loading; 0 = derived from the dtype in
            config.json.
        messages: bytes of the broadcast and of the upload, in main memory.
        ranks: the site's processes.

    Raises:
        ConfigError: the planner does not support the adapter or the kind of training, or the base has too few
            positions for the tokens.
        TaskError: transformers cannot build a model from the settings.
    """
    _require_planned(settings, config, adapter)
    train, shape = config.train, meta_model.build_meta_model(settings)
    itemsize = 2 if train.precision == "bf16" and not adapter.trains_base else 4
    weights = shape.nbytes(train.quantized_base, itemsize)
    spec = meta_model.param_specs(settings, adapter)
    moved, sent = {name: spec[name] for name in movable_names(spec)}, sum(map(_entries, spec.values()))
    is_split = ranks.is_split and ranks.count > 1
    loaded = MemoryPart(f"base, {_words(train.quantized_base, itemsize)}", weights)
    model_parts = _split(loaded, shape, settings, itemsize, ranks) if is_split else [loaded]
    model_parts += [] if adapter.trains_base else [MemoryPart("adapter, fp32", 4 * sent)]
    under = [MemoryPart("CUDA and its libraries (assumed)", CONTEXT)] if on_gpu else _under(messages[0])
    file = MemoryPart("base files, memory-mapped", stored or shape.parameters * settings.stored)
    own = ranks.share(train.batch_size)
    activation_bytes = _kept(settings, config, adapter, own, on_gpu)
    all_kept = activation_bytes.total_bytes(settings.layers, train.gradient_checkpointing)
    vocabulary = config.task.max_tokens * int(settings.values["vocab_size"])
    phases = {
        "training": (
            *under, *model_parts, *_stepped(moved, train, ranks, all_kept - activation_bytes.layer),
            MemoryPart("kept for the backward pass", all_kept),
            MemoryPart("gradients of one layer's activations", activation_bytes.layer),
            MemoryPart("logits", own * vocabulary * _LOGITS),
            _working(moved, shape, train, itemsize),
        )
    }  # fmt: skip
    if train.received_loss_examples:
        rows = min(2 * train.batch_size, train.received_loss_examples)
        rows = ranks.share(rows) if is_split else rows
        one = MemoryPart("one layer", -(-rows * activation_bytes.layer // own))
        phases["scoring"] = (*under, *model_parts, one, MemoryPart("logits", rows * vocabulary * _SCORED))
    if not on_gpu:
        phases |= _before(under, loaded, file, adapter)
    host = [*_under(messages[0]), MemoryPart("trained weights", 4 * sent), MemoryPart("upload", messages[1])]
    host += [MemoryPart("unsharded base of each process, while loading", weights)] if is_split else []
    return MemoryPlan(phases, tuple(host) if on_gpu else ())


def _kept(
    settings: ModelConfig, config: RunConfig, adapter: Adapter, rows: int, on_gpu: bool
) -> activations.ActivationBytes:
    tokens, is_half = config.task.max_tokens, config.train.precision == "bf16"
    activation_bytes = activations.count_activations(settings, adapter, rows, tokens, is_half)
    matrix = on_gpu and settings.shares_keys and not is_half
    return (
        replace(activation_bytes, layer=activation_bytes.layer + 4 * rows * settings.heads * tokens**2)
        if matrix
        else activation_bytes
    )


def _working(spec: Spec, shape: MetaModel, train: TrainConfig, itemsize: int) -> MemoryPart:
    whole = max((layer.entries for layer in shape.small), default=0) * itemsize
    return MemoryPart(
        "working space", 8 * max(map(_entries, spec.values())) + (whole if train.quantized_base != "none" else 0)
    )


def _before(
    under: list[MemoryPart], loaded: MemoryPart, file: MemoryPart, adapter: Adapter
) -> dict[str, tuple[MemoryPart, ...]]:
    phases: dict[str, tuple[MemoryPart, ...]] = {"loading": (*under, loaded, file)}
    if adapter.trains_base:
        phases["first client round"] = (*under, loaded, MemoryPart("copy of the base, for comparison", loaded.nbytes))
    return phases


def _stepped(spec: Spec, train: TrainConfig, ranks: RankLayout, gone: int) -> list[MemoryPart]:
    sizes = [4 * _entries(tensor) for tensor in spec.values()]
    gradients = MemoryPart("gradients of the trained weights", sum(sizes))
    if train.gradient_accumulation_steps == 1:
        gradients = MemoryPart("gradients beyond the freed activations", max(0, sum(sizes) - gone))
    sums = [MemoryPart("gradient sums, one chunk", min(sum(sizes), max(_PIECE, *sizes)))] if ranks.count > 1 else []
    states = MemoryPart(f"states of {train.optimizer}", _states(spec, train))
    return [gradients, *sums, states]


def _split(
    base_: MemoryPart, shape: MetaModel, settings: ModelConfig, itemsize: int, ranks: RankLayout
) -> list[MemoryPart]:
    """Return a rank's shard of the base, and the part of the base that is temporarily unsharded."""
    outside = sum(shape.parts.get(part, 0) for part in ("embeddings", "head")) * itemsize
    layer = max(0, base_.nbytes - shape.buffers - outside) // settings.layers
    return [
        MemoryPart(f"{base_.name}, one of {ranks.count} shards", ranks.share(base_.nbytes)),
        MemoryPart("two layers, embeddings and head, unsharded", 2 * layer + outside),
    ]


def _under(received: int) -> list[MemoryPart]:
    message = [MemoryPart("message received", received)] if 0 < received < _IN_MEMORY else []
    return [MemoryPart("Python and libraries", LIBRARIES), *message]


def _states(spec: Spec, train: TrainConfig) -> int:
    if train.optimizer == "adamw":
        return 8 * sum(map(_entries, spec.values()))
    sizes = map(_entries, spec.values())
    return sum(2 * n + 8 * -(-n // _SCALED) if n >= _SMALLEST else 8 * n for n in sizes)


def _entries(tensor: object) -> int:
    return math.prod(tensor.shape)  # type: ignore[attr-defined]


def _words(bits: str, itemsize: int) -> str:
    rest = "bf16" if itemsize == 2 else "fp32"
    return rest if bits == "none" else f"{'NF4' if bits == '4bit' else 'int8'}, the rest {rest}"


def _require_planned(settings: ModelConfig, config: RunConfig, adapter: Adapter) -> None:
    if adapter.mount != "layers":
        raise ConfigError(
            f'adapter.kind: memory planning supports only "lora", "hadamard-lora" and "all", found "{adapter.kind}"'
        )
    if config.dp.clip_norm:
        raise ConfigError("dp.clip-norm: memory planning does not support per-example gradients; plan without dp.*")
    if config.train.compile:
        raise ConfigError("train.compile: memory planning does not support it; plan without it")
    if not config.task.max_tokens:
        raise ConfigError("task.max-tokens: set it to the length of the examples to plan for")
    if settings.context and config.task.max_tokens > settings.context:
        raise ConfigError(
            f"task.max-tokens: expected at most {settings.context}, the base's context length, found "
            f"{config.task.max_tokens}; lower it"
        )
