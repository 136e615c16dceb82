"""The plan of a run that `fedveil doctor` prints: memory by part, seconds, bytes on the wire; nothing is loaded.

| line | is |
|---|---|
| memory | computed from config.json by `fedveil.models.planning.memory`, for rows of task.max-tokens |
| seconds | arithmetic over a speed: an estimate of the training, without the rest of a round |
| bytes | exact, from the methods' layouts; without the envelope: a header with the fields' names |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil import strategies, tasks
from fedveil.config import RunConfig, parse
from fedveil.console.provisioning.checks import Check
from fedveil.contract.adapter import Adapter
from fedveil.errors import ConfigError
from fedveil.federation.exchange import Exchange
from fedveil.foreign import shown
from fedveil.models import loading
from fedveil.models.planning import base, memory, settings, work
from fedveil.records import process
from fedveil.training import adapted
from fedveil.training.ranks import shards

_GB = 1e9
_TASK = "text-generation"
_ROWS = 1000  # of a site, where nothing says how many
# What may be lowered, in the order in which it costs least: keys of the run config, and values.
_REMEDIES: tuple[tuple[str, Any], ...] = (
    ("train.precision", "bf16"), ("train.checkpointing", True), ("train.batch-size", 1),
    ("train.quantized-base", "4bit"), ("train.optimiser", "adamw-8bit"), ("task.max-tokens", 32),
)  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """What is planned for.

    Attributes:
        capacity: bytes of a GPU, or of main memory.
        on_gpu: whether the model lies on a GPU.
        where: in words.
        ranks: the site's processes, a GPU each.
        flops: operations a second of one; 0 where nobody has said or measured it.
        speed: where that number comes from.
    """

    capacity: int
    on_gpu: bool
    where: str
    ranks: memory.Ranks = memory.Ranks()
    flops: float = 0.0
    speed: str = ""


def machine(gpu_gb: float, ranks: memory.Ranks, tflops: float, bf16: bool) -> Machine:
    """The one that the options describe, else this one: its GPU's free memory, else what is free of its main memory.

    Raises:
        ConfigError: an option out of range.
    """
    import psutil
    import torch

    for name, value, most in (("--gpu-gb", gpu_gb, 1e4), ("--gpus", ranks.count, 64), ("--tflops", tflops, 1e6)):
        if not 0 <= value <= most or (name == "--gpus" and value < 1):
            raise ConfigError(f"{name}: expected above 0 and at most {most:g}, found {value:g}; correct it")
    if ranks.is_split and ranks.count == 1:
        raise ConfigError("--shard-base: expected --gpus above 1 beside it, found 1; say how many, or leave it out")
    if ranks.count > 1 and not gpu_gb and (there := torch.cuda.device_count()) < ranks.count:
        raise ConfigError(
            f"--gpus: expected --gpu-gb beside it, or as many as this machine has, found {ranks.count} of {there}; say "
            "how large one is"
        )
    if gpu_gb:
        where = f"a GPU of {gpu_gb:g} GB" if ranks.count == 1 else f"{ranks.count} GPUs of {gpu_gb:g} GB each"
        return Machine(int(gpu_gb * _GB), True, where, ranks, tflops * 1e12, "as given")
    flops, speed = (tflops * 1e12, "as given") if tflops else (work.measured(bf16), "a product of matrices, measured")
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        return Machine(free, True, f"free on {torch.cuda.get_device_name()}", ranks, flops, speed)
    free = min(psutil.virtual_memory().available, process.noted()["limit_mb"] * 1_000_000)
    return Machine(free, False, "free in this machine's main memory", ranks, flops, speed)


@dataclass(frozen=True)
class Planned:
    """A run on a base, as far as its plan needs it."""

    settings: settings.Settings
    config: RunConfig
    adapter: Adapter
    stored: int = 0

    @classmethod
    def of(cls, config: RunConfig) -> Planned:
        """Of a run config.

        Raises:
            ConfigError: a task that is not planned, or what a run would refuse before its base is loaded.
            TaskError: no folder, or one whose config.json cannot be planned.
        """
        if config.task.name != _TASK:
            raise ConfigError(f'task.name: expected "{_TASK}", which alone is planned, found {shown(config.task.name)}')
        info = tasks.info(_TASK)
        method = strategies.create(config.method.name, config.method.fields)
        adapted.check(config, method.adapter, info)
        loading.check_context(config, method.adapter, info.tiny())
        where, is_folder = loading.find(config.task.model, info.tiny())
        if not is_folder or where == "tiny":
            raise ConfigError(
                f"task.model: expected a folder, found {shown(where)}; nothing is asked of a hub, so download it first"
            )
        files = sum(file.stat().st_size for file in Path(where).glob("*.safetensors"))
        return cls(settings.read(Path(where)), config, method.adapter, files)

    def exchange(self, name: str, fields: str = "") -> Exchange | None:
        """Of a method; None for one whose adapter the task does not take."""
        method = strategies.create(name, fields)
        if method.adapter.mount not in tasks.info(_TASK).mounts:
            return None
        return Exchange(method, name, base.spec(self.settings, method.adapter))

    def memory(self, on: Machine, **changed: Any) -> memory.Plan:
        """The plan of rank 0, with some keys of the run config changed.

        Raises:
            ConfigError: a base that is to be divided and cannot be.
        """
        config = parse({**self.config.flat(), **changed}) if changed else self.config
        own = self.exchange(config.method.name, config.method.fields)
        messages = (own.largest("down"), own.largest("up")) if own else (0, 0)
        if on.ranks.is_split:
            shards.check(config, self.adapter)
        return memory.plan(self.settings, config, self.adapter, on.on_gpu, self.stored, messages, on.ranks)

    def remedy(self, on: Machine) -> tuple[dict[str, Any], int]:
        """What to set so that it fits, and the bytes then. Of what was needed on the way, what is not is left out."""
        changed: dict[str, Any] = {}
        needed = self.memory(on).needed
        for key, value in _REMEDIES:
            if needed <= on.capacity:
                break
            before = self.config.flat()[key]
            if before == value or (isinstance(before, int) and not isinstance(before, bool) and before <= value):
                continue
            if key in ("train.quantized-base", "train.precision") and self.adapter.trains_base:
                continue
            if key == "train.quantized-base" and on.ranks.is_split:
                continue
            lower = self.memory(on, **changed, **{key: value}).needed
            if lower < needed:
                changed, needed = {**changed, key: value}, lower
        for key in list(changed) if needed <= on.capacity else ():
            fewer = {name: value for name, value in changed.items() if name != key}
            if (more := self.memory(on, **fewer).needed) <= on.capacity:
                changed, needed = fewer, more
        return changed, needed


def lines(planned: Planned, on: Machine, rows: int, there: int = 0) -> Iterator[str]:
    """The plan in words, a line each, for a site of `rows` rows; 0: as many as its data has, `there`, if known."""
    plan, shape, config = planned.memory(on), base.of(planned.settings), planned.config
    parts = ", ".join(f"{name} {count:,}" for name, count in shape.parts.items())
    yield f"Plan, on paper, from config.json: {planned.settings.kind}, {shape.parameters:,} parameters ({parts})"
    yield f"memory while the worker is {plan.peak}, its most, at rows of {config.task.max_tokens} tokens:"
    for part in plan.phases[plan.peak]:
        yield f"  {part.name:<34}{part.nbytes / _GB:>10.3f} GB"
    yield f"  {'together':<34}{plan.needed / _GB:>10.3f} GB"
    others = ", ".join(f"{phase} {plan.needs(phase) / _GB:.3f} GB" for phase in plan.phases if phase != plan.peak)
    yield f"  in other phases: {others or 'there are none'}"
    if plan.host:
        host = ", ".join(f"{part.name} {part.nbytes / _GB:.3f}" for part in plan.host)
        yield f"  in main memory, GB: {host}"
    if on.ranks.count > 1:
        yield f"  of rank 0, of {on.ranks.count} processes; the others have no states, and score nothing"
    yield from _seconds(planned, on, rows, there)
    yield "bytes a message of a round, down and up (exact; another method's with its default adapter):"
    if config.secure.enabled:
        yield "  in the clear; under secure.enabled an upload is of integers: fedveil explain says how many bytes"
    for name in sorted(strategies.names(), key=lambda name: name != config.method.name):
        own = name == config.method.name
        if exchange := planned.exchange(name, config.method.fields if own else ""):
            down, up = _sizes(exchange.sizes("down")), _sizes(exchange.sizes("up"))
            yield f"  {name + (' (this run)' if own else ''):<22}down {down}; up {up}"


def _sizes(by_variant: Mapping[str, int]) -> str:
    """Of each variant, such as what a client drew; one number where all are of one size."""
    if len(set(by_variant.values())) == 1:
        return f"{next(iter(by_variant.values())):,}"
    return " or ".join(f"{size:,} ({variant})" for variant, size in by_variant.items())


def _seconds(planned: Planned, on: Machine, rows: int, there: int) -> Iterator[str]:
    config = planned.config
    most = config.task.max_examples
    count, source = rows, ""
    if not rows and there:
        count, source = min(there, most or there), " (those of the data; sites that share it have fewer)"
    elif not rows:
        count, source = most or _ROWS, "" if most else " (a guess: give --rows)"
    done = work.of(planned.settings, config, planned.adapter, count)
    total = (done.training + done.scoring) / 1e12
    about = f"training, {done.rows:,} rows a round{source}: {total:,.1f} TFLOP"
    if not on.flops:
        yield f"{about}; seconds: give --tflops, what one GPU sustains"
        return
    seconds = done.seconds(on.flops, on.ranks.count, on.ranks.is_split)
    each = " on each GPU" if on.ranks.count > 1 else ""
    yield f"{about}, {seconds:,.0f} s at {on.flops / 1e12:.3g} TFLOP/s{each} ({on.speed}): an estimate"


def verdict(planned: Planned, on: Machine) -> Check:
    """Whether it fits, and else what would."""
    needed = planned.memory(on).needed
    has = f"{on.capacity / _GB:.1f} GB {on.where}" if not on.on_gpu or "free" in on.where else on.where
    needs = f"needs {needed / _GB:.1f} GB" + (" on each" if on.ranks.count > 1 else "")
    if needed <= on.capacity:
        return Check("memory", "ok", f"fits: {needs}, has {has}")
    changed, then = planned.remedy(on)
    words = ", ".join(f"{key} = {str(value).lower()}" for key, value in changed.items())
    said = f"will not fit: {needs}, has {has}"
    if then > on.capacity:
        return Check("memory", "fail", f"{said}; even with {words or 'less'} {then / _GB:.1f} GB: take a smaller base")
    return Check("memory", "fail", f"{said}; with {words} {then / _GB:.1f} GB, which fits")
