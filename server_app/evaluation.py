"""Score a method's models on the server's test data, and select the best round.

| evaluations so far | `BestEvaluation` |
|---|---|
| none, or none with a finite value | no round; only the last model is stored |
| one that is better than all before | that round |
| one equal to the best | the earlier round |
| one that is better by less than evaluate.min-delta | its round, but no improvement for evaluate.patience |
| a round that is not scored | unchanged; it does not count for evaluate.patience |
| the model before round 0 | it is scored but is no candidate: no site has contributed to it |

The choice costs no privacy: it uses only the server's own data, and models that the server has anyway.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedveil.config import EvaluateConfig, RunConfig
from fedveil.contract.method import FederatedState, Method
from fedveil.contract.task import Examples, Metrics, Task, TaskMetric
from fedveil.data import tables
from fedveil.errors import ConfigError

Scores = dict[str, dict[str, float]]


@dataclass(frozen=True)
class ServerEvaluator:
    """Scores models by view, in the rounds that the config names. `task` has the adapter of the server's model.

    `keeps_model`: the task also trains, so its model stays in memory after the scores.
    """

    task: Task
    examples: Examples
    config: EvaluateConfig
    rounds: int
    keeps_model: bool = False

    @classmethod
    def from_config(cls, task: Task, config: RunConfig, keeps_model: bool = False) -> ServerEvaluator | None:
        """Build the evaluator; None without test data. Raises TaskError if task.evaluation names missing data."""
        if not config.task.evaluation:
            return None
        with tables.columns_named_by("task.evaluation"):
            examples = task.examples(Path(config.task.evaluation), "test")
            task.require_shared_classes()
        return cls(task, examples, config.evaluate, config.run.rounds, keeps_model)

    def scores(self, method: Method, server: FederatedState, round_: int) -> Scores:
        """Return {view: {metric: value}}; empty in a round that is not scored. Round -1 is the model before round 0."""
        last = round_ == self.rounds - 1
        due = last or (self.config.every > 0 and (round_ + 1) % self.config.every == 0)
        if not due:
            return {}
        at_ends = last or round_ == -1
        generate = self.config.generate == "always" or (self.config.generate == "last" and at_ends)
        try:
            return {
                view: self.task.evaluate({n: weights[n] for n in self.task.spec}, self.examples, generate)
                for view, weights in method.models(server).items()
            }
        finally:
            if not self.keeps_model:
                self.task.release()


@dataclass(frozen=True)
class ModelSelection:
    """The settings with which a run chooses its final model and stops early.

    Attributes:
        name, metric: identify the deciding score of the server's model.
        keep: end the run with the best round's model.
        patience, min_delta: see evaluate.*.
    """

    name: str
    metric: TaskMetric
    keep: bool = True
    patience: int = 0
    min_delta: float = 0.0

    @classmethod
    def from_config(cls, config: RunConfig, metrics: Metrics) -> ModelSelection | None:
        """Build it from the config; None if no setting asks for it. `metrics` are those of the task.

        Raises:
            ConfigError: a metric that the task or its evaluations lack, or evaluations that do not exist.
        """
        asked, name = config.evaluate, config.evaluate.metric
        if name not in metrics:
            raise ConfigError(
                f'evaluate.metric: expected one of {sorted(metrics)} with the task "{config.task.name}", found {name!r}'
            )
        if asked.select_model == "last" and not asked.patience:
            if asked.min_delta:
                raise ConfigError(
                    f"evaluate.min-delta: expected 0 without evaluate.patience, found {asked.min_delta:g}; set both"
                )
            return None
        why = 'evaluate.select-model = "best"' if asked.select_model == "best" else "evaluate.patience"
        if not config.task.evaluation:
            raise ConfigError(f"task.evaluation: expected the server's test data with {why}, found none; name a folder")
        if not asked.every:
            raise ConfigError(
                f"evaluate.every: expected 1 or more with {why}, found 0, which evaluates only the last round"
            )
        if metrics[name].generated and asked.generate != "always":
            raise ConfigError(
                f'evaluate.generate: expected "always" with evaluate.metric = "{name}", which scores generated '
                f'texts, found "{asked.generate}"; set it, or take another metric'
            )
        return cls(name, metrics[name], asked.select_model == "best", asked.patience, asked.min_delta)

    def gain(self, before: float, now: float) -> float:
        """Return by how much `now` is better than `before`; below 0 if it is worse."""
        return before - now if self.metric.better == "lower" else now - before


@dataclass(frozen=True)
class BestEvaluation:
    """The best evaluation so far.

    Attributes:
        round: round of the best model, 0-based; None before the first finite value.
        value: the score of that model.
        reference: the score that the next improvement must exceed by evaluate.min-delta.
        waited: number of consecutive evaluations without such an improvement.
    """

    round: int | None = None
    value: float = math.nan
    reference: float = math.nan
    waited: int = 0

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> BestEvaluation:
        """Return the best evaluation in a checkpoint, or the initial one if the checkpoint has none."""
        if saved.get("round") is None:
            return cls(waited=int(saved.get("waited", 0)))
        return cls(int(saved["round"]), float(saved["value"]), float(saved["reference"]), int(saved["waited"]))

    def saved(self) -> dict[str, Any]:
        """Return the values for a checkpoint, as numbers that JSON can represent."""
        return {
            "round": self.round, "value": None if self.round is None else self.value,
            "reference": None if self.round is None else self.reference, "waited": self.waited,
        }  # fmt: skip

    def after(self, choice: ModelSelection, round_: int, scores: Mapping[str, Mapping[str, float]]) -> BestEvaluation:
        """Return the best evaluation after a round with these scores, by view."""
        server_scores = scores.get("server")
        if not server_scores:
            return self
        now = server_scores[choice.name]
        if not math.isfinite(now):
            return replace(self, waited=self.waited + 1)
        if self.round is None:
            return BestEvaluation(round_, now, now)
        gain = choice.gain(self.reference, now)
        improved = gain > 0 and gain >= choice.min_delta
        best = replace(self, round=round_, value=now) if choice.gain(self.value, now) > 0 else self
        if not improved:
            return replace(best, waited=self.waited + 1)
        return replace(best, reference=now, waited=0)

    def stopped(self, choice: ModelSelection, done: int) -> str:
        """Explain why a run stops after round `done`; "" if it continues."""
        if not 0 < choice.patience <= self.waited:
            return ""
        least = f" by {choice.min_delta:g} or more" if choice.min_delta else ""
        best = "no value was finite" if self.round is None else f"best {self.value:.6g} after round {self.round + 1}"
        return (
            f"stopped early, after round {done + 1}: {choice.name} has not improved{least} in {self.waited} "
            f"evaluations (evaluate.patience); {best}"
        )

    def about(self, choice: ModelSelection) -> dict[str, Any]:
        """Return the entry for status.json; {} before the first finite value."""
        if self.round is None:
            return {}
        return {"best": {"round": self.round, "metric": choice.name, "value": self.value, "kept": choice.keep}}
