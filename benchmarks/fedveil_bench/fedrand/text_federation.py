"""A seed's federations on text, which share the rows, the split and the initial weights, and their models' scores."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from fedveil import rng, strategies, tasks
from fedveil.config import RunConfig, parse
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import DatasetShard, Examples, Task
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.testing.tensor_ops import aggregation_gap
from fedveil_bench.common import resampling, texts
from fedveil_bench.common.federations import create_federation
from fedveil_bench.common.resampling import ResampledMetric
from fedveil_bench.fedrand import curves, source_losses
from fedveil_bench.runner import BenchOptions

VALIDATION = "validation_loss"
RATE_KEY = "train.learning-rate"
_EVERY = 10  # rounds between progress lines


@dataclass(frozen=True)
class TextFederationRun:
    """The results of one federation.

    Attributes:
        scores: values by name; for a trial, only the validation loss.
        upload_bytes, download_bytes: totals over all sites and rounds.
        seconds: duration of the training.
        rounds: number of rounds.
        commit: the measured commit.
        curve: the method's curve, if requested: the points of `curves`, as JSON.
        source_losses: for "loss" and "client_loss" of `scores`, the model's `SourceLosses`, as JSON.
    """

    scores: Mapping[str, float]
    upload_bytes: int
    download_bytes: int
    seconds: float
    rounds: int = 0
    commit: str = ""
    curve: list[Any] = field(default_factory=list)
    source_losses: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


class TextFederationSeed:
    """The parts shared by all federations of a seed, loaded once.

    Args:
        settings: the preset's settings (see `on_texts`).
        number: the seed.
        options: only the device and the progress callback are used.
    """

    def __init__(self, settings: Mapping[str, Any], number: int, options: BenchOptions) -> None:
        self._settings, self._number, self._options = settings, number, options
        self._scratch = tempfile.TemporaryDirectory(prefix="fedveil-")
        self._folder = texts.prepare_folder(settings["data"], Path(self._scratch.name))
        self._flat = settings["config"] | {"run.seed": number, "run.deterministic": True}

    def before(self) -> TextFederationRun:
        """Score the model before any round."""
        task = self._task(parse(self._flat | {"method.name": "fedavg"}))
        scores = task.evaluate(self._initial(task), self._test, generate=True)
        losses = self._source_losses(task, {"loss": self._initial(task)}, scores)
        return TextFederationRun(scores, 0, 0, 0.0, source_losses=losses)

    def alone(self) -> TextFederationRun:
        """Run the median-size client, which trains in every round on its own rows and shares nothing."""
        config = parse(self._flat | {"method.name": "fedavg", "cohort.fraction": 1.0})
        task = self._task(config)
        done, seconds, _ = self._federated(config, task, [self._median])
        model = done.models()["server"]
        scores = task.evaluate(model, self._test, generate=True)
        return replace(_run(done, scores, seconds), source_losses=self._source_losses(task, {"loss": model}, scores))

    def trial(self, label: str, rate: float) -> TextFederationRun:
        """Run a method with a learning rate, scored only on validation rows."""
        config = self._config(label, rate)
        task = self._task(config)
        done, seconds, _ = self._federated(config, task, list(self._rows))
        models = list(self._own(done).values()) or [done.models()["server"]]
        loss = statistics.fmean(task.evaluate(m, self._validation, generate=False)["loss"] for m in models)
        self._options.say(f"{label}: rate {rate:g}: validation loss {loss:.3f} in {seconds:.0f} s")
        return _run(done, {VALIDATION: loss}, seconds)

    def method(self, label: str, rate: float) -> TextFederationRun:
        """Run a method with its learning rate, scored on the test rows."""
        config = self._config(label, rate)
        task = self._task(config)
        every = self._settings.get("curve_every", 0)
        done, seconds, curve = self._federated(config, task, list(self._rows), every)
        scores = task.evaluate(done.models()["server"], self._test, generate=True) | {"learning_rate": rate}
        # Only the last cohort's states: other sites' states belong to older weights.
        kept = {site: p.tensors for site in done.last_cohort if (p := done.private.get(site)) is not None}
        pairs = {site: tensors for site, tensors in kept.items() if set(tensors) == set(task.spec)}
        if pairs:
            scores["aggregation_gap"] = aggregation_gap(list(pairs.values()), [len(self._rows[s]) for s in pairs])
        own = self._own(done)
        scores |= self._of_clients(task, own)
        models = {"loss": done.models()["server"]} | ({"client_loss": own[m]} if (m := self._median) in own else {})
        losses = self._source_losses(task, models, scores)
        self._options.say(f"seed {self._number}: {label}: {_brief(scores)} in {seconds:.0f} s")
        return replace(_run(done, scores, seconds), curve=[point.to_json() for point in curve], source_losses=losses)

    def _source_losses(
        self, task: Task, models: Mapping[str, Weights], scores: Mapping[str, float]
    ) -> dict[str, dict[str, str]]:
        """Return the models' losses by test source, by the name of the score that is their mean."""
        found = {}
        for name, weights in models.items():
            losses = source_losses.measure_losses(task, weights, self._test, parse(self._flat).task.source_column)
            if losses.agrees_with(scores[name]):
                found[name] = losses.to_json()
            else:  # a task may truncate rows differently when it scores them
                self._options.say(
                    f"seed {self._number}: {name}: the loss by source is {losses.mean:.4f}, the score is "
                    f"{scores[name]:.4f}; its interval will not cover the test rows"
                )
        return found

    def _of_clients(self, task: Task, own: Mapping[str, Weights]) -> dict[str, float]:
        """Return scores of the clients' models: the median client's on all test rows, and the mean over all clients."""
        scores: dict[str, float] = {}
        if self._median in own:
            found = task.evaluate(own[self._median], self._test, generate=True)
            scores |= {f"client_{name}": score for name, score in found.items()}
        if self._settings.get("client") == "all" and own:
            each = [task.evaluate(model, self._clients_test, generate=True) for model in own.values()]
            scores |= {f"clients_{name}": statistics.fmean(s[name] for s in each) for name in ("loss", "bleu")}
        return scores

    def _own(self, done: InProcessFederation) -> dict[str, Weights]:
        """Return the sites' own models, for the requested sites."""
        wanted = self._settings.get("client", False)
        sites: Sequence[str] = list(self._rows) if wanted == "all" else [self._median] if wanted else []
        return {site: model for site in sites if (model := done.models(site).get("client"))}

    def _federated(
        self, config: RunConfig, task: Task, sites: Sequence[str], every: int = 0
    ) -> tuple[InProcessFederation, float, list[curves.CurvePoint]]:
        """Return the finished federation, its training seconds, and the loss curve of the server's model."""
        exchange = MessageExchange(
            strategies.create_method(config.method.name, config.method.params), config.method.name, task.spec
        )

        def tell(_: InProcessFederation, round_: int) -> None:
            if (round_ + 1) % _EVERY == 0:
                self._options.say(f"seed {self._number}: {exchange.name}: round {round_ + 1} of {config.run.rounds}")

        def score(weights: Weights) -> dict[str, ResampledMetric]:
            return {"loss": resampling.from_constant(task.evaluate(weights, self._curve_test, generate=False)["loss"])}

        rows = {site: task.encode(self._rows[site]) for site in sites}
        started = time.perf_counter()
        done = create_federation(exchange, config, task, rows, self._initial(task))
        followed = curves.run_and_score(done, every, score, tell)
        return done, time.perf_counter() - started - followed.seconds, followed.points

    def _config(self, label: str, rate: float) -> RunConfig:
        chosen = self._settings["methods"][label]
        fields = {"method.name": chosen["name"], "method.params": chosen.get("fields", ""), **chosen.get("config", {})}
        return parse(self._flat | fields | {RATE_KEY: rate})

    def _task(self, config: RunConfig) -> Task:
        return tasks.load_task(
            config, strategies.create_method(config.method.name, config.method.params).adapter, self._options.device
        )

    def _initial(self, task: Task) -> Weights:
        return task.initial(rng.initial_stream(self._number, "weights"))

    @property
    def _median(self) -> str:
        """Return the client of median size."""
        return sorted(self._rows, key=lambda site: len(self._rows[site]))[len(self._rows) // 2]

    @cached_property
    def _rows(self) -> dict[str, Examples]:
        """Return every client's rows; they do not depend on the method or the learning rate."""
        reader, count = self._task(parse(self._flat)), self._settings["clients"]
        return {f"client-{i:02d}": reader.examples(self._folder, "train", DatasetShard(i, count)) for i in range(count)}

    @cached_property
    def _test(self) -> Examples:
        """Return the rows of the first evaluate.eval-examples sources, which are the same in every seed."""
        return self._part("test", parse(self._flat).evaluate.eval_examples)

    @cached_property
    def _clients_test(self) -> Examples:
        return self._part("test", self._settings.get("clients_test"))

    @cached_property
    def _curve_test(self) -> Examples:
        return self._part("test", self._settings.get("curve_test"))

    @cached_property
    def _validation(self) -> Examples:
        return self._part("validation", self._settings.get("rate_test"))

    def _part(self, split: str, sources: int | None) -> Examples:
        """Return the rows of a split; if `sources` is given, only the rows of the first `sources` sources."""
        config = parse(self._flat)
        found = self._task(config).examples(self._folder, split)
        if sources is None:
            return found
        column = config.task.source_column
        first = set(islice(dict.fromkeys(row.values[column] for row in found), sources))
        return [row for row in found if row.values[column] in first]


def _run(done: InProcessFederation, scores: Mapping[str, float], seconds: float) -> TextFederationRun:
    return TextFederationRun(scores, done.upload_bytes, done.download_bytes, seconds, done.config.run.rounds)


def _brief(scores: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in scores.items())
