"""Measure the time and memory of one prompt training step, plain and private, in one process with one thread.

| row | step |
|---|---|
| plain | the gradient of the batch's mean loss, one backward pass |
| texts | DP-FPL's step with clipped = "texts": one backward pass, including noise |
| loop | one backward pass per example, one after another |
| prompt | DP-FPL's step with clipped = "prompt": one backward pass per example, all at once with torch.func |
| opacus | opacus on the same learner (p_G, u, v; r constant): GradSampleModule, DPOptimizer, one joint clip, noise |

`times plain` is the CPU time divided by a plain step's CPU time on the same batch; on a GPU, both use wall-clock time
(`seconds`), which includes waiting for the device. `megabytes` is the growth of the process's peak since a plain step
on one row; on a GPU, it is how far a step's peak exceeds the device memory in use before the step. Methods and batches
run in increasing order of memory, so that each peak is their own.

Opacus runs last, so on a CPU its figure is an upper bound.
"""

from __future__ import annotations

import resource
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fedveil import rng, strategies
from fedveil.attacks.statistics import confidence_interval
from fedveil.contract.layout import Payload
from fedveil.contract.method import RoundContext
from fedveil.contract.param_spec import Weights
from fedveil.contract.privacy import Sampling
from fedveil.contract.trainer import BatchIndices
from fedveil.errors import ConfigError
from fedveil.models import loading
from fedveil.models.clip import EncodedImage
from fedveil.strategies.dp_fpl import PROMPT
from fedveil.tasks.clip_prompt import ClipPrompt
from fedveil.testing.tensor_ops import factorize_matrix
from fedveil.testing.training import LocalTraining
from fedveil_bench.common import seeds
from fedveil_bench.dp_fpl import federated_prompts
from fedveil_bench.dp_fpl.federated_prompts import PromptSites
from fedveil_bench.runner import BenchOptions, BenchOutcome

PACKAGES = ("opacus",)
WAYS = ("plain", "texts", "loop", "prompt", "opacus")


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Measure every method at every batch size, in one process with one thread."""
    found = seeds.run_seeds(__name__, settings | {"seeds": 1}, options)[0]
    rows, batches = [], settings["batches"]
    clock = "seconds" if loading.pick_device(options.device).type == "cuda" else "cpu seconds"
    for way in WAYS:
        for batch in batches:
            seconds, plain = found[way][str(batch)]["seconds"], statistics.median(found["plain"][str(batch)]["seconds"])
            metrics = {
                clock: confidence_interval(seconds),
                "times plain": confidence_interval([s / plain for s in seconds]),
            }
            metrics["megabytes"] = confidence_interval([found[way][str(batch)]["megabytes"]])
            rows.append({"name": f"{way}, batch {batch}", "metrics": metrics})
    said, largest = [], str(batches[-1])
    for way in ("texts", "prompt"):
        ratio = statistics.median(found[way][largest]["seconds"]) / statistics.median(
            found["plain"][largest]["seconds"]
        )
        grown = ", ".join(f"{found[way][str(batch)]['megabytes']:.0f} MB at {batch}" for batch in batches)
        said.append(
            f'clipped = "{way}" costs {ratio:.2f} times the plain step at batch {largest} (asked: at most 2): '
            f"{'held' if ratio <= 2 else 'NOT HELD'}; it grows by {grown}."
        )
    for way in ("texts", "prompt"):
        ratio = statistics.median(found[way][largest]["seconds"]) / statistics.median(
            found["opacus"][largest]["seconds"]
        )
        said.append(f'clipped = "{way}" takes {ratio:.2f} of the time of opacus at batch {largest}.')
    return BenchOutcome(rows, said)


class _Learner(torch.nn.Module):
    """The prompt p_G + u v + r as a module for opacus, without the frozen CLIP model."""

    def __init__(self, task: ClipPrompt, weights: Weights, rank: int) -> None:
        super().__init__()
        p_local = torch.randn_like(weights[PROMPT])
        u, v = factorize_matrix(p_local, torch.randn(p_local.shape[1], rank))
        self.task, self.residual = task, p_local - u @ v
        self.p_global, self.u, self.v = (torch.nn.Parameter(w.clone()) for w in (weights[PROMPT], u, v))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        seen = {PROMPT: self.p_global + self.u @ self.v + self.residual}
        return self.task.logits(self.task.features(seen)[None], points)


def _opacus(task: ClipPrompt, rows: Sequence[EncodedImage], weights: Weights, batch: int) -> Callable[[], object]:
    """Run one step of opacus. Raises ConfigError if it is not installed."""
    try:
        from opacus import GradSampleModule
        from opacus.optimizers import DPOptimizer
    except ImportError as error:
        raise ConfigError(f"opacus: expected the package, found {error}; pip install 'fedveil[test]'") from None

    warnings.filterwarnings("ignore", "Full backward hook is firing|grad and param do not obey", UserWarning)
    learner = GradSampleModule(_Learner(task, weights, rank=8), force_functorch=True)
    optimiser = DPOptimizer(
        torch.optim.SGD(learner.parameters(), lr=1e-4),
        noise_multiplier=1.0,
        max_grad_norm=10.0,
        expected_batch_size=batch,
    )
    points, labels = task.samples(rows[:batch])

    def step() -> None:
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(learner(points), labels).backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    return step


class _First:
    """A trainer whose batches always contain its first rows."""

    def __init__(self, trainer: LocalTraining) -> None:
        rows = trainer.rows
        self.spec, self.num_examples, self.rows = trainer.spec, trainer.num_examples, self
        self.batch_size, self.steps, self.per_sample, self.feature = rows.batch_size, 1, rows.per_sample, rows.feature

    def batches(self, sampling: Sampling, steps: int, rng: Any, skip: int = 0) -> list[BatchIndices]:
        return [BatchIndices(tuple(range(self.batch_size)))]


def of_seed(settings: dict[str, Any], seed: int, options: BenchOptions) -> Any:
    """Return one seed's results for `run_benchmark`."""
    torch.set_num_threads(1)
    sites = federated_prompts.load_sites(settings, seed, options)
    rows = [row for of_site in sites.rows.values() for row in of_site]
    found: dict[str, dict[str, Any]] = {}
    is_cuda = loading.pick_device(options.device).type == "cuda"
    now = _clock if is_cuda else time.process_time
    _step(sites, rows, "plain", 1)()
    before = _peak()
    for way in WAYS:
        for batch in settings["batches"]:
            step, seconds = _step(sites, rows, way, batch), []
            if is_cuda:
                before = torch.cuda.memory_allocated() / 2**20
                torch.cuda.reset_peak_memory_stats()
            step()
            grown = (torch.cuda.max_memory_allocated() / 2**20 if is_cuda else _peak()) - before
            for _ in range(settings["repeats"]):
                started = now()
                step()
                seconds.append(now() - started)
            found.setdefault(way, {})[str(batch)] = {"seconds": seconds, "megabytes": grown}
            options.say(f"{way}, batch {batch}: {statistics.median(seconds) * 1e3:.1f} ms, {grown:.0f} MB")
    return found


def _step(sites: PromptSites, rows: Sequence[EncodedImage], way: str, batch: int) -> Callable[[], object]:
    fields = f"clipped = '{'texts' if way == 'texts' else 'prompt'}'"
    task = federated_prompts.prompt_task(
        sites, {"name": "dp_fpl", "fields": fields, "config": {"train.batch-size": batch}}
    )
    local = task.trainer(rows, rng.initial_stream(sites.seed, "batches"))
    weights = task.initial(rng.initial_stream(sites.seed, "weights"))
    if way == "plain":
        return lambda: local.gradient(weights)
    if way == "opacus":
        return _opacus(task, rows, weights, batch)
    if way == "loop":
        return lambda: [local.rows.per_sample(weights, BatchIndices((i,))) for i in range(batch)]
    method = strategies.create_method("dp_fpl", fields)
    ctx = RoundContext(0, "a", True, rng.fresh_secret())
    return lambda: method.client(None, Payload(weights), _First(local), ctx)  # type: ignore[arg-type]


def _clock() -> float:
    """Return the time after the GPU has finished its work."""
    torch.cuda.synchronize()
    return time.perf_counter()


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
