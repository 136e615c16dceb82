"""Measure an attack by a server that crafts its broadcast: how many examples one upload reveals, with and without a
site's check.

| row | broadcast to the site |
|---|---|
| honest broadcast | the run's initial weights; the attack must fail |
| crafted | the imprinting pair in one layer, with a steep gate; the attack must succeed under FedAvg |
| crafted, within c | the steepest gate that a site with max-broadcast-change = c accepts in the first client round |
| crafted, after a ramp of c | the whole pair, reached over several rounds with changes of c; drift is not bounded |
| others | the crafted broadcast in a different run: more steps, more examples, another method, noise |

"rows" is the share of the batch's examples whose beginning (the tokens at the chosen positions) was recovered exactly;
"false" is the number of wrong beginnings reported; "change" and "norm" are defined as in a site's check. Intervals are
over batches and seeds (`resampling`).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fedveil import rng, strategies
from fedveil.attacks.base import AdversaryView
from fedveil.attacks.reconstruction import imprint
from fedveil.config import RunConfig, parse
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import Rows
from fedveil.federation.exchange import MessageExchange
from fedveil.tasks.text_generation import TextGeneration
from fedveil.testing.training import weights_norm
from fedveil.wire.capture import MessageCapture
from fedveil.wire.payloads import payload_tensors
from fedveil_bench.common import data, resampling, seeds
from fedveil_bench.common import verdicts as common
from fedveil_bench.common.federations import create_federation, task_of
from fedveil_bench.runner import BenchOptions, BenchOutcome

_BATCHES = 9  # name of the random draws


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return a row for each of `settings["rows"]`, averaged over batches and seeds."""
    answers = seeds.run_seeds(__name__, settings, options)
    figures = {
        name: {
            metric: resampling.over_seeds(
                [resampling.resample_mean([b[metric] for b in of[name]], _BATCHES) for of in answers]
            )
            for metric in batches[0]
        }
        for name, batches in answers[0].items()
    }
    rows = [
        {"name": n, "metrics": {m: resampling.compute_interval(f) for m, f in of.items()}} for n, of in figures.items()
    ]
    claims = common.list_verdicts(common.judge_claims(figures, common.claims_of(settings), "+.2f"), len(answers))
    said = [*_verdicts({row["name"]: row["metrics"] for row in rows}, settings), *claims]
    return BenchOutcome(rows, said, [f"this run: {settings['batches']} batches a seed, {len(answers)} seeds"])


def _verdicts(found: Mapping[str, Mapping[str, Any]], settings: dict[str, Any]) -> list[str]:
    won, lost = found[settings["must_win"]]["rows"]["mean"], found[settings["must_lose"]]["rows"]["mean"]
    controls = "stand" if won >= 0.9 and lost == 0.0 else "DO NOT STAND: the other rows say nothing"
    said = [
        f"Controls {controls}: {settings['must_win']} gives {won:.2f} of the rows' beginnings, "
        f"{settings['must_lose']} {lost:.2f}."
    ]
    for name, metrics in found.items():
        if name not in (settings["must_win"], settings["must_lose"]):
            part = f"{name}: {metrics['rows']['mean']:.2f} of the rows, at a change of {metrics['change']['mean']:.2f}"
            rounds = f" in each of {metrics['ramp rounds']['mean']:.0f} rounds" if "ramp rounds" in metrics else ""
            said.append(f"{part}{rounds}.")
    return said


def of_seed(settings: dict[str, Any], seed: int, options: BenchOptions) -> dict[str, list[dict[str, float]]]:
    """Return one seed's results for `run_benchmark`: the metrics of each batch, by row."""
    out: dict[str, list[dict[str, float]]] = {}
    gate: Tensor | None = None  # depends only on the base
    for name, row in settings["rows"].items():
        flat = settings["config"] | row.get("config", {}) | {"run.seed": seed, "run.deterministic": True}
        case = _Case(parse(flat), settings, row, options, gate)
        gate, out[name] = case.gate, case.batches(seed)
        shares = [batch["rows"] for batch in out[name]]
        options.say(f"seed {seed}: {name}: {sum(shares) / len(shares):.2f} of the rows")
    return out


class BroadcastCase:
    """A run with the gate of its server's crafted pair; measures what one upload reveals.

    Args:
        gate: the direction from `imprint.gate_direction`, which depends only on the base, or None to compute it.
    """

    def __init__(
        self, config: RunConfig, settings: dict[str, Any], options: BenchOptions, gate: Tensor | None = None
    ) -> None:
        self._config, self._settings = config, settings
        self.task = task_of(TextGeneration, config, options)
        method = strategies.create_method(config.method.name, config.method.params)
        self._exchange = MessageExchange(method, config.method.name, self.task.spec)
        self.initial = self.task.initial(rng.initial_stream(config.run.seed, "weights"))
        folder = data.find_data_folder(settings["data"])
        self._rows = self.task.encode(self.task.examples(folder, "train"))
        self._public: Any = self.task.encode(self.task.examples(folder, "test"))[: settings["public"]]
        self._positions = range(*settings["positions"])
        if gate is None:
            gate = imprint.gate_direction(self.task, self.initial, settings["layer"], self._positions, self._public)
        self.gate = gate

    def measure_batches(self, sent: Weights, seed: int) -> list[dict[str, float]]:
        """Return "rows" and "false" for each batch of the site's examples, trained from `sent`."""
        size = self._config.train.batch_size * max(1, self._config.train.max_steps)
        drawn = rng.RandomStream.derive(bytes(32), seed, "", "batches").choice(
            len(self._rows), size * self._settings["batches"]
        )
        starts = range(0, len(drawn), size)
        return [self._measured(sent, [self._rows[i] for i in drawn[n : n + size]], f"site-{n}") for n in starts]

    def _measured(self, sent: Weights, rows: Rows, site: str) -> dict[str, float]:
        """Return one upload's metrics. Each batch has its own site: a site's private part also depends on its name."""
        layer, length, config = self._settings["layer"], self._positions.stop, self._config
        prefix = tuple(self._public[0].ids[: self._positions.start])
        with tempfile.TemporaryDirectory() as folder:
            tap = MessageCapture(Path(folder))
            create_federation(self._exchange, config, self.task, {site: rows}, sent, tap).round(0)
            view = AdversaryView.server(tap, self._exchange)
            upload = next(view.uploads(site))
            asked = view.answered(upload)
            assert asked is not None
            received, answered = payload_tensors(asked.payload), view.added(upload)
            rate, decay = config.train.learning_rate, config.train.weight_decay
            learned = imprint.recover_gradient(received, answered, layer, rate, decay, adamw=config.dp.clip_norm == 0)
            found = imprint.recover_prefixes(self.task, self.initial, layer, learned, prefix, length)
        truth = [tuple(row.ids[:length]) for row in rows]
        return {"rows": sum(t in found for t in truth) / len(truth), "false": float(len(found - set(truth)))}


class _Case:
    """One row of the table: a run with its server's broadcast."""

    def __init__(
        self,
        config: RunConfig,
        settings: dict[str, Any],
        row: dict[str, Any],
        options: BenchOptions,
        gate: Tensor | None,
    ) -> None:
        self._settings, self._row = settings, row
        self._run = BroadcastCase(config, settings, options, gate)
        self._initial, self.gate = self._run.initial, self._run.gate
        self._sent = self._initial if row.get("honest") else self._crafted()

    def _crafted(self) -> Weights:
        """Return the broadcast; with `within`, use the steepest gate that a site with that bound on changes accepts."""
        layer, task, gate = self._settings["layer"], self._run.task, self.gate
        within = self._row.get("within")
        if within is None:
            return imprint.craft_broadcast(task, self._initial, layer, gate, self._settings["slope"])
        low, high = 1e-6, float(self._settings["slope"])
        for _ in range(30):
            middle = (low * high) ** 0.5
            made = imprint.craft_broadcast(task, self._initial, layer, gate, middle, plain=False)
            low, high = (middle, high) if _first_change(self._initial, made) <= within else (low, middle)
        return imprint.craft_broadcast(task, self._initial, layer, gate, low, plain=False)

    def batches(self, seed: int) -> list[dict[str, float]]:
        """Return the metrics of each batch of the site's examples."""
        more = {
            "change": _first_change(self._initial, self._sent),
            "norm": weights_norm(self._sent) / weights_norm(self._initial),
        }
        if (step := self._row.get("ramp")) is not None:
            more |= {"change": step, "ramp rounds": float(self._ramp(step))}
        return [batch | more for batch in self._run.measure_batches(self._sent, seed)]

    def _ramp(self, most: float) -> int:
        """Return the round, from 1, in which a site that accepts changes of `most` trains from the crafted pair."""
        rounds, part, norms = 0, 0.0, _norms(self._initial)
        moved = {n: self._sent[n] - w for n, w in self._initial.items()}
        while part < 1.0:
            part = min(1.0, part + most / _change(moved, norms))
            now = _norms({n: w + part * moved[n] for n, w in self._initial.items()})
            norms = {n: max(norm, norms[n]) for n, norm in now.items()}
            rounds += 1
        return rounds


def _norms(weights: Weights) -> dict[str, float]:
    return {name: weights_norm({name: w}) for name, w in weights.items()}


def _change(moved: Weights, norms: Mapping[str, float]) -> float:
    """Return the change as in a site's check (client_app/guards/broadcast_guard.py), without the sketching error."""
    of_all = math.hypot(*norms.values()) / math.sqrt(sum(w.numel() for w in moved.values()))
    roots = {name: math.sqrt(w.numel()) for name, w in moved.items()}
    return max(norm / roots[n] / max(of_all, norms[n] / roots[n]) for n, norm in _norms(moved).items())


def _first_change(initial: Weights, sent: Weights) -> float:
    return _change({n: sent[n] - w for n, w in initial.items()}, _norms(initial))
