"""Time and memory of one step of prompt training, plain and private, each measured in a process of its own with one thread.

| row | what |
|---|---|
| plain | the gradient of the batch's mean loss, one backward |
| texts | DP-FPL's step with clipped = "texts": one backward, noise included |
| prompt | with clipped = "prompt": a backward a row, by torch.func |
| loop | a backward a row, one after the other |

`times plain` compares processor time with the plain step of the same batch; `megabytes` is how far the process grew beyond a
step of one row. Opacus, if it is installed, has no layer rule for a prompt that all classes share, and is not compared.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import strategies
from benchmarks import prompt_sites, seeds
from benchmarks.run import Options, Outcome, interval
from fedveil import rng
from fedveil.method import Batch, Payload, RoundContext
from fedveil.privacy.plan import Sampling
from fedveil.tasks.training import LocalTraining

WAYS = ("plain", "texts", "prompt", "loop")


def run(settings: dict[str, Any], options: Options) -> Outcome:
    """Every way at every batch size, a process each."""
    rows, medians = [], {}
    for batch in settings["batches"]:
        for way in WAYS:
            chosen = settings | {"way": way, "batch": batch, "seeds": 1}
            (found,) = seeds.run("benchmarks.private_step", chosen, options)
            medians[way, batch] = (statistics.median(found["seconds"]), found["megabytes"])
            times = [s / medians["plain", batch][0] for s in found["seconds"]]
            metrics = {"cpu seconds": interval(found["seconds"]), "times plain": interval(times)}
            metrics["megabytes"] = interval([found["megabytes"]])
            rows.append({"name": f"{way}, batch {batch}", "metrics": metrics})
    largest, batches = settings["batches"][-1], settings["batches"]
    said = []
    for way in ("texts", "prompt"):
        ratio = medians[way, largest][0] / medians["plain", largest][0]
        said.append(
            f'clipped = "{way}" costs {ratio:.2f} times the plain step at batch {largest} (asked: at most 2): '
            f"{'held' if ratio <= 2 else 'NOT HELD'}."
        )
        grown = ", ".join(f"{medians[way, batch][1]:.0f} MB at {batch}" for batch in batches)
        said.append(f'clipped = "{way}" grows by {grown}.')
    return Outcome(rows, said)


class _First:
    """A Local whose every batch is its first rows."""

    def __init__(self, local: LocalTraining) -> None:
        self.spec, self.num_examples, self.batch_size, self.steps = local.spec, local.num_examples, local.batch_size, 1
        self.per_sample_gradients, self.feature_gradients = local.per_sample_gradients, local.feature_gradients

    def batches(self, sampling: Sampling, steps: int, rng: Any, skip: int = 0) -> list[Batch]:
        return [Batch(tuple(range(self.batch_size)))]


def _of_seed(settings: dict[str, Any], seed: int, options: Options) -> Any:
    torch.set_num_threads(1)
    way, batch = settings["way"], settings["batch"]
    step = _step(settings, way, seed, options)
    one, whole = step(1), step(batch)
    one()
    before = _peak()
    whole()
    grown = _peak() - before
    seconds = []
    for _ in range(settings["repeats"]):
        started = time.process_time()
        whole()
        seconds.append(time.process_time() - started)
    options.say(f"{way}, batch {batch}: {statistics.median(seconds) * 1e3:.1f} ms, {grown:.0f} MB")
    return {"seconds": seconds, "megabytes": grown}


def _step(settings: dict[str, Any], way: str, seed: int, options: Options) -> Callable[[int], Callable[[], object]]:
    chosen = {"name": "dp_fpl", "fields": f"clipped = '{'texts' if way == 'texts' else 'prompt'}'"}

    sites = prompt_sites.load(settings | {"rows": {way: chosen}}, seed, options)
    rows = [row for of_site in sites.rows.values() for row in of_site]

    def of(batch: int) -> Callable[[], object]:
        task = prompt_sites.task_of(sites, chosen | {"config": {"train.batch-size": batch}})
        local = task.local(rows, rng.initial(seed, "batches"))
        weights = task.initial(rng.initial(seed, "weights"))
        if way == "plain":
            return lambda: local.gradient(weights)
        if way == "loop":
            return lambda: [local.per_sample_gradients(weights, Batch((i,))) for i in range(batch)]
        method = strategies.create("dp_fpl", chosen["fields"])
        ctx = RoundContext(0, "a", True, rng.fresh_secret())
        return lambda: method.client(None, Payload(weights), _First(local), ctx)  # type: ignore[arg-type]

    return of


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    seeds.serve(_of_seed)
