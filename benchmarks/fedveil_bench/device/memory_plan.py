"""Compare the memory that `fedveil doctor` plans for training with the memory that training actually used.

Each row is a client round on examples of exactly task.max-tokens tokens, all of them targets, so that the plan should
be exact rather than just a bound. "compared" is the planned quantity. On a GPU, it is the peak of torch's tensors ("in
use") plus the process's other GPU memory ("CUDA": the context and the libraries' own memory, for which the plan assumes
a size); on a CPU, it is the kernel's peak (VmHWM), including all of Python. "measured" also includes the unused memory
in the GPU allocator's blocks.
"""

from __future__ import annotations

import gc
import multiprocessing
import random
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fedveil import config, rng
from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.adapters.lora import LoraAdapter
from fedveil.attacks.statistics import confidence_intervals
from fedveil.contract.adapter import Adapter
from fedveil.data.batches import TokenExample
from fedveil.models import loading
from fedveil.tasks.text_generation import TextGeneration
from fedveil.testing.planner import plan_memory, read_model_config
from fedveil_bench.common import bases
from fedveil_bench.common.federations import task_of
from fedveil_bench.process_monitor.usage import high_mb
from fedveil_bench.runner import BenchOptions, BenchOutcome

_MB = 1e6
_SEED = 20261126


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return a row per training run: planned and measured MB, their ratio, tokens per second, and parts on a GPU."""
    device = loading.pick_device(options.device)
    if device.type != "cuda":
        settings = settings | settings["cpu"]
    rows, verdicts = [], []
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        # A separate process, so that this process's memory is not counted.
        with context.Pool(1) as pool:
            pool.apply(_save, (scratch, settings["kind"], settings["shape"], str(device)))
        for name, found in _each(context, scratch, settings, device):
            options.say(f"{name}: " + ", ".join(f"{key} {value:,.0f}" for key, value in found.items()))
            found["planned by measured"] = found["planned MB"] / found["compared MB"]
            rows.append({"name": name, "metrics": confidence_intervals([found])})
            verdicts.append(_verdict(name, found, settings["within"]))
    return BenchOutcome(rows, verdicts)


def _each(
    context: Any, folder: str, settings: Mapping[str, Any], device: torch.device
) -> Iterator[tuple[str, dict[str, float]]]:
    """Run each round in its own process on a CPU; on a GPU, whose allocator's count can be reset, use one process."""
    pool = context.Pool(1, maxtasksperchild=None if device.type == "cuda" else 1)
    with pool:
        for name, keys in settings["runs"].items():
            yield name, pool.apply(measure_training, (folder, settings, keys, str(device)))


def _verdict(name: str, found: Mapping[str, float], within: float) -> str:
    held = "held" if abs(found["planned by measured"] - 1) <= within else "NOT HELD"
    return (
        f"{name}: planned {found['planned MB']:,.0f} MB, took {found['compared MB']:,.0f} MB: "
        f"{found['planned by measured']:.2f} (asked: within {within:.0%}, {held})."
    )


def _save(folder: str, kind: str, shape: Mapping[str, Any], device: str) -> None:
    with torch.device(device):
        {"gpt2": bases.random_gpt2, "llama": bases.random_llama}[kind](Path(folder), shape)


def choose_adapter(keys: Mapping[str, Any]) -> tuple[Adapter, dict[str, Any]]:
    """Return the adapter that a row of the preset trains, and the row's run config keys."""
    adapter: Adapter = AllWeightsAdapter() if keys.get("adapter") == "all" else LoraAdapter()
    return adapter, {key: value for key, value in keys.items() if key != "adapter"}


def measure_training(
    folder: str, settings: Mapping[str, Any], keys: Mapping[str, Any], device: str
) -> dict[str, float]:
    """Run one round; return planned and used memory in MB, and tokens per second."""
    adapter, chosen_keys = choose_adapter(keys)
    fixed = {"task.model": folder, "train.max-steps": settings["steps"]}
    run_config = config.parse(fixed | settings["config"] | chosen_keys)
    on_gpu = device != "cpu"
    if on_gpu:
        gc.collect()  # from the previous round
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    plan = plan_memory(read_model_config(Path(folder)), run_config, adapter, on_gpu)
    task = task_of(TextGeneration, run_config, BenchOptions(device=device), adapter)
    draw, length = random.Random(_SEED), run_config.task.max_tokens
    known = range(1, settings["shape"]["vocab_size"])
    rows = [TokenExample(draw.choices(known, k=length), 1) for _ in range(settings["rows"])]
    weights = task.initial(rng.initial_stream(_SEED, "benchmark"))
    report = task.trainer(rows, rng.initial_stream(_SEED, "batches")).train(weights).report
    found = {"planned MB": plan.needed / _MB, "tokens a second": report["tokens"] / report["train_seconds"]}
    if not on_gpu:
        return found | {"compared MB": high_mb()}
    free, total = torch.cuda.mem_get_info()
    in_use, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    beside = total - free - torch.cuda.memory_reserved()
    return found | {
        "CUDA MB": beside / _MB,
        "in use MB": in_use / _MB,
        "measured MB": (reserved + beside) / _MB,
        "compared MB": (in_use + beside) / _MB,
    }
