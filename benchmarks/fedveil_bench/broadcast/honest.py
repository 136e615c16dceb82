"""Measure how far an honest server's broadcasts move; a site's bounds on broadcasts must permit this movement.

| metric | as computed by the guard (client_app/guards/broadcast_guard.py), the largest over all sites |
|---|---|
| first | change and drift of the first broadcast that a site trains from |
| change | the largest change in a later broadcast |
| drift | the largest drift in any broadcast |

Each row is one run of a few rounds in this process, with a method's default settings unless the row says otherwise. The
bundled bases are small: at the same learning rate, a larger base moves less per step, because it has more weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from typing_extensions import override

from fedveil import rng
from fedveil.config import RunConfig, parse
from fedveil.contract.method import Method, RoundContext
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import DatasetShard, Task
from fedveil.contract.trainer import (
    BatchIndices,
    Frozen,
    Penalty,
    PerExampleFeatureGradients,
    PerExampleGradients,
    PerExampleGradientSource,
    Trainer,
    TrainingResult,
)
from fedveil.contract.trainer_wrappers import TrainerWrapper, WrappedGradientSource
from fedveil.federation.exchange import MessageExchange
from fedveil.testing.training import BroadcastReference
from fedveil_bench.common import data, pictures
from fedveil_bench.common.federations import create_federation, method_of, task_of
from fedveil_bench.runner import BenchOptions, BenchOutcome

_KEY = bytes(32)  # a real site's key is secret; here a fixed key makes two runs measure the same values
_CLASSES = ("cat", "dog", "ox")


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return a row for each of `settings["rows"]`, and the largest figures over all rows."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folders = {
            "text": data.find_data_folder("e2e"),
            "pictures": pictures.write_colored_pictures(Path(scratch) / "pictures", _CLASSES, settings["pictures"]),
        }
        for name, row in settings["rows"].items():
            flat = settings["config"] | settings[f"{row['kind']}_config"] | row.get("config", {})
            measured = _measure(parse(flat), folders[row["kind"]], settings["sites"], options)
            options.say(f"{name}: " + ", ".join(f"{key} {value:.2f}" for key, value in measured.items()))
            rows.append({"name": name, "metrics": {key: _exact(value) for key, value in measured.items()}})
    return BenchOutcome(rows, [_verdict(rows, key) for key in ("first", "change", "drift")])


def _exact(value: float) -> dict[str, float]:
    return {"mean": value, "low": value, "high": value, "n": 1}


def _verdict(rows: list[dict[str, Any]], key: str) -> str:
    largest = max(rows, key=lambda row: float(row["metrics"][key]["mean"]))
    return f"The largest {key} is {largest['metrics'][key]['mean']:.2f}, of {largest['name']}."


def _measure(config: RunConfig, folder: Path, sites: int, options: BenchOptions) -> dict[str, float]:
    """Run all rounds of a config; return the largest figures over all sites."""
    task: Task = task_of(Task, config, options)  # type: ignore[type-abstract]
    method = method_of(Method, config)  # type: ignore[type-abstract]
    rows = {f"site-{i}": task.prepare(folder, "train", DatasetShard(i, sites)).rows for i in range(sites)}
    initial = task.initial(rng.initial_stream(config.run.seed, "weights"))
    figures = {"first": 0.0, "change": 0.0, "drift": 0.0}
    references = dict.fromkeys(rows, BroadcastReference.from_weights(initial, _KEY))

    def around(site: str, ctx: RoundContext, trainer: Trainer) -> Trainer:
        def note(weights: Weights) -> None:
            change, drift = references[site].distances(weights)
            references[site] = references[site].then(weights)
            key = "change" if ctx.round else "first"
            figures[key] = max(figures[key], change)
            figures["drift"] = max(figures["drift"], drift)

        return _FirstWeights(trainer, note)

    exchange = MessageExchange(method, config.method.name, task.spec)
    create_federation(exchange, config, task, rows, initial, around=around).run()
    return figures


@final
class _FirstWeights(TrainerWrapper):
    """A trainer that passes the first weights it receives to `note`, as a site passes them to its guard."""

    def __init__(self, trainer: Trainer, note: Callable[[Weights], None]) -> None:
        super().__init__(trainer)
        self._note, self._is_noted = note, False

    def note(self, weights: Weights) -> None:
        """Pass on the weights, but only the first time."""
        if not self._is_noted:
            self._is_noted = True
            self._note(weights)

    @property
    @override
    def rows(self) -> PerExampleGradientSource:
        return _FirstWeightsOfRows(self._trainer.rows, self.note)

    @override
    def train(self, weights: Weights, frozen: Frozen | None = None, penalty: Penalty | None = None) -> TrainingResult:
        self.note(weights)
        return super().train(weights, frozen, penalty)

    @override
    def gradient(self, weights: Weights) -> TrainingResult:
        self.note(weights)
        return super().gradient(weights)


@final
class _FirstWeightsOfRows(WrappedGradientSource):
    """Like `_FirstWeights`, for per-example gradients."""

    def __init__(self, rows: PerExampleGradientSource, note: Callable[[Weights], None]) -> None:
        super().__init__(rows)
        self._note = note

    @override
    def per_sample(self, weights: Weights, batch: BatchIndices) -> PerExampleGradients:
        self._note(weights)
        return super().per_sample(weights, batch)

    @override
    def feature(self, weights: Weights, batch: BatchIndices) -> PerExampleFeatureGradients:
        self._note(weights)
        return super().feature(weights, batch)
