"""Measure what a server that ramps up its crafted broadcast over several rounds can learn within a site's bounds.

Each row is a defense; each metric is for a certain number of rounds that the server takes. In each round the server
sends weights that the site's guard accepts; the last weights are the steepest crafted pair it can reach. The value is
the share of the batch's examples whose beginning the last upload reveals exactly, as in broadcast/imprint.

| defense | what the guard accepts |
|---|---|
| none | anything |
| change c | a change of at most c from the previous round |
| change c, drift d | the same, and a drift of at most d from the run's initial weights |
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedveil.attacks.reconstruction import imprint
from fedveil.config import parse
from fedveil.contract.param_spec import Weights
from fedveil.testing.training import BroadcastReference
from fedveil_bench.broadcast.imprint import BroadcastCase
from fedveil_bench.common import resampling, seeds
from fedveil_bench.runner import BenchOptions, BenchOutcome

_KEY = bytes(32)  # a real site's key is secret; here a fixed key makes two runs measure the same values
_SEARCH_STEPS = 12
_BATCHES = 9  # name of the random draws


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return a row for each of `settings["rows"]`, with the share of examples revealed, by number of rounds."""
    answers = seeds.run_seeds(__name__, settings, options)
    rows = []
    for name, by_rounds in answers[0].items():
        metrics = {
            metric: resampling.compute_interval(
                resampling.over_seeds([resampling.resample_mean(answer[name][metric], _BATCHES) for answer in answers])
            )
            for metric in by_rounds
        }
        rows.append({"name": name, "metrics": metrics})
    return BenchOutcome(
        rows, _verdicts(rows), [f"this run: {settings['batches']} batches a seed, {len(answers)} seeds"]
    )


def _verdicts(rows: list[dict[str, Any]]) -> list[str]:
    return [
        f"{row['name']}: at most {max(row['metrics'].items(), key=lambda item: item[1]['mean'])[1]['mean']:.2f} of the "
        "rows, over all numbers of rounds."
        for row in rows
    ]


def of_seed(settings: dict[str, Any], seed: int, options: BenchOptions) -> dict[str, dict[str, list[float]]]:
    """Return one seed's results: the share of each batch, by row and number of rounds."""
    flat = settings["config"] | {"run.seed": seed, "run.deterministic": True}
    case = BroadcastCase(parse(flat), settings, options)
    server = RampingServer(case, settings["layer"], settings["slope"])

    @functools.cache  # different numbers of rounds may end at the same pair
    def shares(slope: float, plain: bool) -> list[float]:
        sent = server.craft(slope, plain)
        return [batch["rows"] for batch in case.measure_batches(sent, seed)]

    out: dict[str, dict[str, list[float]]] = {}
    for name, bounds in settings["rows"].items():
        out[name] = {}
        for rounds in settings["rounds"]:
            found = shares(*server.steepest(bounds, rounds))
            out[name][f"rounds {rounds}"] = found
            options.say(f"seed {seed}: {name}, {rounds} rounds: {sum(found) / len(found):.2f} of the rows")
    return out


class RampingServer:
    """A server that knows a site's bounds, and how its guard measures distances.

    Args:
        case: the run.
        layer: the layer of the crafted pair.
        slope: the gate's slope in the whole pair; a steeper gate reveals no more.
    """

    def __init__(self, case: BroadcastCase, layer: str, slope: float) -> None:
        self._case, self._layer, self._slope = case, layer, slope

    def craft(self, slope: float, plain: bool) -> Weights:
        """Return a crafted broadcast; `plain` as in `craft_broadcast`."""
        case = self._case
        return imprint.craft_broadcast(case.task, case.initial, self._layer, case.gate, slope, plain)

    def steepest(self, bounds: Mapping[str, float], rounds: int) -> tuple[float, bool]:
        """Return the slope and kind of the best pair that a site with these bounds accepts in round `rounds`."""
        for plain in (True, False):
            if self.is_reached(self.craft(self._slope, plain), bounds, rounds):
                return self._slope, plain
        low, high = 1e-6, self._slope
        for _ in range(_SEARCH_STEPS):
            middle = (low * high) ** 0.5
            reached = self.is_reached(self.craft(middle, False), bounds, rounds)
            low, high = (middle, high) if reached else (low, middle)
        return low, False

    def is_reached(self, target: Weights, bounds: Mapping[str, float], rounds: int) -> bool:
        """Return whether the guard accepts a broadcast in each of `rounds` rounds, ending with `target`."""
        initial = self._case.initial
        reference, part = BroadcastReference.from_weights(initial, _KEY), 0.0
        for _ in range(rounds):
            change, drift = reference.distances(target)  # both grow linearly toward the target
            step = (1.0 - part) * bounds.get("change", math.inf) / change
            part = min(1.0, part + step, bounds.get("drift", math.inf) / drift)
            if part == 1.0:
                return True
            reference = reference.then(_between(initial, target, part))
        return False


def _between(initial: Weights, target: Weights, part: float) -> dict[str, Tensor]:
    return {name: w + part * (target[name] - w) for name, w in initial.items()}
