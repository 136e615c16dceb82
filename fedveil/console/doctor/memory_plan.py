"""The plan that `fedveil doctor` prints for a run: memory by part, seconds, bytes on the wire. Nothing is loaded.

| line | source |
|---|---|
| memory | computed from config.json by `fedveil.models.planning.memory`, for rows with task.max-tokens tokens; if 0, as
  many as the longest example in the checked data, or 512 |
| seconds | operations divided by speed: an estimate for training only, without the rest of the round |
| bytes | exact, from the methods' layouts; excludes the envelope, which is a header with the field names |
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil import strategies, tasks
from fedveil.config import RunConfig, parse
from fedveil.console.doctor.checks import CheckResult
from fedveil.contract.adapter import Adapter
from fedveil.errors import ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.models import loading
from fedveil.models.planning import flops as training_flops
from fedveil.models.planning import memory, meta_model, model_config
from fedveil.records import process_exit
from fedveil.sanitize import sanitize
from fedveil.training import adapter_task
from fedveil.training.ranks import sharding

_GB = 1e9
_TASK = "text-generation"
_ROWS = 1000  # examples at a site, if the number is unknown
_TOKENS = 512  # tokens in an example, if its length is unknown
# Run config settings that lower memory, cheapest first.
_REMEDIES: tuple[tuple[str, Any], ...] = (
    ("train.precision", "bf16"), ("train.gradient-checkpointing", True), ("train.batch-size", 1),
    ("train.quantized-base", "4bit"), ("train.optimizer", "adamw-8bit"), ("task.max-tokens", 32),
)  # fmt: skip


@dataclass(frozen=True)
class MachineResources:
    """Resources that a memory plan assumes.

    Attributes:
        capacity: bytes of GPU memory, or of main memory.
        on_gpu: whether the model is on a GPU.
        where: a description of that memory.
        ranks: the site's processes, one GPU each.
        flops: floating-point operations per second of one process; 0 if neither given nor measured.
        speed: source of `flops`.
    """

    capacity: int
    on_gpu: bool
    where: str
    ranks: memory.RankLayout = memory.RankLayout()
    flops: float = 0.0
    speed: str = ""


def read_machine(gpu_gb: float, ranks: memory.RankLayout, tflops: float, bf16: bool) -> MachineResources:
    """Return the machine that the options describe, or this machine with its free GPU memory or main memory.

    Raises:
        ConfigError: an option is out of range.
    """
    import psutil
    import torch

    for name, value, most in (("--gpu-gb", gpu_gb, 1e4), ("--gpus", ranks.count, 64), ("--tflops", tflops, 1e6)):
        if not 0 <= value <= most or (name == "--gpus" and value < 1):
            raise ConfigError(f"{name}: expected a number above 0 and at most {most:g}, found {value:g}")
    if ranks.is_split and ranks.count == 1:
        raise ConfigError("--shard-base: expected --gpus above 1 with it, found 1; set --gpus, or omit --shard-base")
    if ranks.count > 1 and not gpu_gb and (there := torch.cuda.device_count()) < ranks.count:
        raise ConfigError(
            f"--gpus: expected at most {there} (this machine's GPUs), or --gpu-gb with it, found {ranks.count}; "
            "set --gpu-gb to the memory of one GPU"
        )
    if gpu_gb:
        where = f"a GPU of {gpu_gb:g} GB" if ranks.count == 1 else f"{ranks.count} GPUs of {gpu_gb:g} GB each"
        return MachineResources(int(gpu_gb * _GB), True, where, ranks, tflops * 1e12, "as given")
    flops, speed = (
        (tflops * 1e12, "as given") if tflops else (training_flops.measure_flops(bf16), "measured on a matrix product")
    )
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        return MachineResources(free, True, f"free on {torch.cuda.get_device_name()}", ranks, flops, speed)
    free = min(psutil.virtual_memory().available, process_exit.note_memory()["limit_mb"] * 1_000_000)
    return MachineResources(free, False, "free in this machine's main memory", ranks, flops, speed)


@dataclass(frozen=True)
class PlannedRun:
    """A run on a base, reduced to what its plan needs. `is_guess`: the length of its examples is unknown."""

    settings: model_config.ModelConfig
    config: RunConfig
    adapter: Adapter
    stored: int = 0
    is_guess: bool = False

    @classmethod
    def from_config(cls, config: RunConfig, longest: int = 0) -> PlannedRun:
        """Create the plan from a run config.

        Args:
            longest: token count of the longest example in the checked data; 0 if unknown.

        Raises:
            ConfigError: the task cannot be planned, or a run would refuse the config before loading the
                base.
            TaskError: there is no folder, or its config.json cannot be planned.
        """
        if config.task.name != _TASK:
            raise ConfigError(f'task.name: only "{_TASK}" can be planned, found {sanitize(config.task.name)}')
        info = tasks.task_info(_TASK)
        method = strategies.create_method(config.method.name, config.method.params)
        adapter_task.check_task_config(config, method.adapter, info)
        loading.check_context(config, method.adapter, info.tiny())
        where, is_folder = loading.find_model(config.task.model, info.tiny())
        if not is_folder or where == "tiny":
            raise ConfigError(
                f"task.model: expected a folder, found {sanitize(where)}; planning downloads nothing, so download it "
                "first"
            )
        files = sum(file.stat().st_size for file in Path(where).glob("*.safetensors"))
        settings = model_config.read_model_config(Path(where))
        if config.task.max_tokens:
            return cls(settings, config, method.adapter, files)
        tokens = min(longest or _TOKENS, settings.context or sys.maxsize)
        planned = config.model_copy(update={"task": config.task.model_copy(update={"max_tokens": tokens})})
        return cls(settings, planned, method.adapter, files, is_guess=not longest)

    def exchange(self, name: str, fields: str = "") -> MessageExchange | None:
        """Return a method's message exchange; None if the task does not accept its adapter."""
        method = strategies.create_method(name, fields)
        if method.adapter.mount not in tasks.task_info(_TASK).mounts:
            return None
        return MessageExchange(method, name, meta_model.param_specs(self.settings, method.adapter))

    def memory(self, on: MachineResources, **changed: Any) -> memory.MemoryPlan:
        """Return the memory plan for rank 0, with some run config keys changed.

        Raises:
            ConfigError: the base should be sharded but cannot be.
        """
        config = parse({**self.config.flat(), **changed}) if changed else self.config
        own = self.exchange(config.method.name, config.method.params)
        messages = (own.largest("down"), own.largest("up")) if own else (0, 0)
        if on.ranks.is_split:
            sharding.check_shardable(config, self.adapter)
        return memory.plan_memory(self.settings, config, self.adapter, on.on_gpu, self.stored, messages, on.ranks)

    def remedy(self, on: MachineResources) -> tuple[dict[str, Any], int]:
        """Return setting changes that make the run fit, and the bytes it then needs.

        Changes that turn out to be unnecessary are dropped.
        """
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


def plan_lines(planned: PlannedRun, on: MachineResources, rows: int, there: int = 0) -> Iterator[str]:
    """Yield the plan's lines for a site with `rows` examples, or if that is 0, with `there`, as in its data."""
    plan, shape, config = planned.memory(on), meta_model.build_meta_model(planned.settings), planned.config
    parts = ", ".join(f"{name} {count:,}" for name, count in shape.parts.items())
    yield f"Plan computed from config.json: {planned.settings.kind}, {shape.parameters:,} parameters ({parts})"
    guess = " (a guess: set task.max-tokens, or task.data)" if planned.is_guess else ""
    yield f"peak memory, while the worker is {plan.peak}, with {config.task.max_tokens}-token examples{guess}:"
    for part in plan.phases[plan.peak]:
        yield f"  {part.name:<34}{part.nbytes / _GB:>10.3f} GB"
    yield f"  {'total':<34}{plan.needed / _GB:>10.3f} GB"
    others = ", ".join(f"{phase} {plan.needs(phase) / _GB:.3f} GB" for phase in plan.phases if phase != plan.peak)
    yield f"  in other phases: {others or 'none'}"
    if plan.host:
        host = ", ".join(f"{part.name} {part.nbytes / _GB:.3f}" for part in plan.host)
        yield f"  in main memory, GB: {host}"
    if on.ranks.count > 1:
        yield f"  of rank 0 of {on.ranks.count} processes; the other ranks keep no optimizer states and do not score"
    yield from _seconds(planned, on, rows, there)
    yield "bytes per message, down and up (exact; other methods with their default adapters):"
    if config.secure.enabled:
        yield "  unmasked; with secure.enabled an upload holds integers, and fedveil explain prints its size"
    for name in sorted(strategies.list_methods(), key=lambda name: name != config.method.name):
        own = name == config.method.name
        if exchange := planned.exchange(name, config.method.params if own else ""):
            down, up = _sizes(exchange.sizes("down")), _sizes(exchange.sizes("up"))
            yield f"  {name + (' (this run)' if own else ''):<22}down {down}; up {up}"


def _sizes(by_variant: Mapping[str, int]) -> str:
    """Format the size of each variant, such as a client's draw; a single number if all sizes are equal."""
    if len(set(by_variant.values())) == 1:
        return f"{next(iter(by_variant.values())):,}"
    return " or ".join(f"{size:,} ({variant})" for variant, size in by_variant.items())


def _seconds(planned: PlannedRun, on: MachineResources, rows: int, there: int) -> Iterator[str]:
    config = planned.config
    most = config.task.examples_per_site
    count, source = rows, ""
    if not rows and there:
        count, source = min(there, most or there), " (all of the data; if sites share it, each has fewer)"
    elif not rows:
        count, source = most or _ROWS, "" if most else " (a guess: set --rows)"
    done = training_flops.training_flops(planned.settings, config, planned.adapter, count)
    total = (done.training + done.scoring) / 1e12
    about = f"training, {done.rows:,} examples per round{source}: {total:,.1f} TFLOP"
    if not on.flops:
        yield f"{about}; to get seconds, set --tflops to one GPU's sustained throughput"
        return
    seconds = done.seconds(on.flops, on.ranks.count, on.ranks.is_split)
    each = " on each GPU" if on.ranks.count > 1 else ""
    yield f"{about}, {seconds:,.0f} s at {on.flops / 1e12:.3g} TFLOP/s{each} ({on.speed}): an estimate"


def plan_verdict(planned: PlannedRun, on: MachineResources) -> CheckResult:
    """Check whether the run fits in memory; if not, suggest settings that would make it fit."""
    needed = planned.memory(on).needed
    has = f"{on.capacity / _GB:.1f} GB {on.where}" if not on.on_gpu or "free" in on.where else on.where
    needs = f"needs {needed / _GB:.1f} GB" + (" on each" if on.ranks.count > 1 else "")
    if needed <= on.capacity:
        return CheckResult("memory", "ok", f"fits: {needs}, has {has}")
    changed, then = planned.remedy(on)
    words = ", ".join(f"{key} = {str(value).lower()}" for key, value in changed.items())
    shortfall = f"does not fit: {needs}, has {has}"
    if then > on.capacity:
        return CheckResult(
            "memory",
            "fail",
            f"{shortfall}; even with {words or 'less'}, it needs {then / _GB:.1f} GB: use a smaller base",
        )
    return CheckResult("memory", "fail", f"{shortfall}; with {words}, it needs {then / _GB:.1f} GB, which fits")
