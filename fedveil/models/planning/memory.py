"""Memory of the process that trains at a site, by part, before anything is loaded.

    base        entries x 4, or x 2 if it is only read, under train.precision = bf16; quantised layers: `base.Layer`
    adapter     fp32: 4 bytes an entry; its gradient as much; AdamW's two moments 8 bytes, adamw-8bit's 2 and 8 / 256
    kept        what a forward pass keeps for the backward pass: counted, see `activations`
    gradients   of what one layer keeps, at most as much again
    logits      12 bytes for a row, a token and an entry of the vocabulary: logits, those of the targets, and their
                logarithms in fp32; in the backward pass their gradients take the same room
    working     two tensors of the size of the largest trained one: the two gradients of a tied embedding, and on a CPU
                AdamW's sqrt and quotient; and one layer of a quantised base, made whole

A process goes through phases, and needs the most of them. Rows are taken as all of task.max-tokens, so it is a bound
where they are shorter. What the GPU's allocator leaves unused between blocks is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fedveil.config import RunConfig, TrainConfig
from fedveil.contract.adapter import Adapter
from fedveil.contract.spec import Spec, movable
from fedveil.errors import ConfigError
from fedveil.models.planning import activations, base
from fedveil.models.planning.base import Base
from fedveil.models.planning.settings import Settings

LIBRARIES = 660_000_000  # peak of a turn on the tiny base: Python 3.11, torch 2.13 (CPU), transformers 5.23, peft 0.21
CONTEXT = 1_000_000_000  # of a GPU, for CUDA and its libraries: assumed, not measured
_LOGITS = 12  # bytes, see above
_IN_MEMORY = 16 << 20  # bytes; a longer message lies in a file while the worker trains (wire/parked.py)
_SMALLEST, _SCALED = 4096, 256  # entries with states of 8 bits, and those with one scale (training/optimisers.py)


@dataclass(frozen=True)
class Part:
    """Bytes of one part, and what divides them where several GPUs share a base."""

    name: str
    nbytes: int
    is_split: bool = False


@dataclass(frozen=True)
class Plan:
    """What one worker needs.

    Attributes:
        phases: the parts by phase: of the memory where the model lies.
        host: of a model on a GPU: the parts in main memory.
        layer: bytes of one layer of the base, as it lies in memory.
    """

    phases: Mapping[str, tuple[Part, ...]]
    host: tuple[Part, ...]
    layer: int

    @property
    def peak(self) -> str:
        """The phase that needs the most."""
        return max(self.phases, key=self.needs)

    @property
    def needed(self) -> int:
        """Bytes of that phase."""
        return self.needs(self.peak)

    def needs(self, phase: str) -> int:
        """Bytes of a phase."""
        return sum(part.nbytes for part in self.phases[phase])

    def on(self, gpus: int, is_split: bool) -> int:
        """Bytes a GPU where `gpus` of them train on train.batch-size rows each. On paper: FedVeil does neither yet.

        With the base whole on each (DDP), the summed gradients lie beside a GPU's own. With the base split (FSDP), each
        has its share of base, adapter, gradients and states, and two layers whole: one in use, one on its way.
        """
        if gpus == 1:
            return self.needed
        if is_split:
            return max(
                sum(-(-p.nbytes // gpus) if p.is_split else p.nbytes for p in parts) + 2 * self.layer
                for parts in self.phases.values()
            )
        summed = sum(p.nbytes for p in self.phases["training"] if p.name == _GRADIENTS)
        return max(self.needs(phase) + (summed if phase == "training" else 0) for phase in self.phases)


_GRADIENTS = "gradients of what is trained"


def plan(
    settings: Settings,
    config: RunConfig,
    adapter: Adapter,
    on_gpu: bool,
    stored: int = 0,
    messages: tuple[int, int] = (0, 0),
) -> Plan:
    """The plan of a run on a base.

    Args:
        settings: of the base.
        config: the run's task and train sections are read.
        adapter: the method's.
        on_gpu: whether the model lies on a GPU.
        stored: bytes of its weights' files, which are mapped while they are read; 0 = as config.json has the dtype.
        messages: bytes down and up, in main memory.

    Raises:
        ConfigError: an adapter or a training that is not planned, or more tokens than the base has positions for.
        TaskError: settings of which transformers makes no model.
    """
    _require_planned(settings, config, adapter)
    train, shape = config.train, base.of(settings)
    is_half = train.precision == "bf16" and not adapter.trains_base
    itemsize = 2 if is_half else 4
    weights = shape.nbytes(train.quantized_base, itemsize)
    spec = base.spec(settings, adapter)
    moved = {name: spec[name] for name in movable(spec)}
    trained, biggest = sum(map(_entries, moved.values())), max(map(_entries, moved.values()))
    sent = sum(map(_entries, spec.values()))
    whole = max((layer.entries for layer in shape.small), default=0) * itemsize
    working = 2 * 4 * biggest + (whole if train.quantized_base != "none" else 0)
    held = [Part(f"base, {_words(train.quantized_base, itemsize)}", weights, True)]
    held += [] if adapter.trains_base else [Part("adapter, fp32", 4 * sent, True)]
    under = [Part("CUDA and its libraries (assumed)", CONTEXT)] if on_gpu else _under(messages[0])
    kept = activations.count(settings, adapter, train.batch_size, config.task.max_tokens, train.precision == "bf16")
    vocabulary = config.task.max_tokens * int(settings.values["vocab_size"]) * _LOGITS
    phases = {
        "training": (
            *under, *held,
            Part(_GRADIENTS, 4 * trained, True),
            Part(f"states of {train.optimiser}", _states(moved, train), True),
            Part("kept for the backward pass", kept.of(settings.layers, train.checkpointing)),
            Part("gradients of one layer's", kept.layer),
            Part("logits", train.batch_size * vocabulary),
            Part("working space", working),
        )
    }  # fmt: skip
    if train.score_rows:
        rows = min(2 * train.batch_size, train.score_rows)
        one = Part("one layer", -(-rows * kept.layer // train.batch_size))
        phases["scoring"] = (*under, *held, one, Part("logits", rows * vocabulary))
    file = Part("the base's files, mapped", stored or shape.parameters * settings.stored)
    if not on_gpu:
        phases["loading"] = (*under, held[0], file)
        if adapter.trains_base:
            phases["first turn"] = (*under, held[0], Part("a copy of the base, to compare", weights))
    host = (*_under(messages[0]), Part("trained weights", 4 * sent), Part("upload", messages[1])) if on_gpu else ()
    return Plan(phases, host, _of_a_layer(shape, settings, train, itemsize))


def _of_a_layer(shape: Base, settings: Settings, train: TrainConfig, itemsize: int) -> int:
    outside = sum(shape.parts.get(part, 0) for part in ("embeddings", "head")) * itemsize
    return max(0, shape.nbytes(train.quantized_base, itemsize) - shape.buffers - outside) // settings.layers


def _under(received: int) -> list[Part]:
    message = [Part("message received", received)] if 0 < received < _IN_MEMORY else []
    return [Part("Python and libraries", LIBRARIES), *message]


def _states(spec: Spec, train: TrainConfig) -> int:
    if train.optimiser == "adamw":
        return 8 * sum(map(_entries, spec.values()))
    sizes = map(_entries, spec.values())
    return sum(2 * n + 8 * -(-n // _SCALED) if n >= _SMALLEST else 8 * n for n in sizes)


def _entries(tensor: object) -> int:
    return math.prod(tensor.shape)  # type: ignore[attr-defined]


def _words(bits: str, itemsize: int) -> str:
    rest = "bf16" if itemsize == 2 else "fp32"
    return rest if bits == "none" else f"{'NF4' if bits == '4bit' else 'int8'}, the rest {rest}"


def _require_planned(settings: Settings, config: RunConfig, adapter: Adapter) -> None:
    if adapter.mount != "layers":
        raise ConfigError(
            f'adapter.kind: expected "lora", "hadamard-lora" or "all", found "{adapter.kind}", not planned'
        )
    if config.dp.clip:
        raise ConfigError("dp.clip: expected 0, found a gradient for each row, which is not planned; plan without it")
    if config.train.compile:
        raise ConfigError("train.compile: expected false, found true, which is not planned; plan without it")
    if settings.context and config.task.max_tokens > settings.context:
        raise ConfigError(
            f"task.max-tokens: expected at most {settings.context}, the base's positions, found "
            f"{config.task.max_tokens}; lower it"
        )
