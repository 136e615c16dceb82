"""Scores the models that a method deploys on the server's own test data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedveil.config import EvaluateConfig, RunConfig
from fedveil.contract.method import Method, State
from fedveil.contract.task import Examples, Task


@dataclass(frozen=True)
class Evaluator:
    """Scores by view, in the rounds that the config names. `task` has the adapter of the server's model."""

    task: Task
    examples: Examples
    config: EvaluateConfig
    rounds: int

    @classmethod
    def of(cls, task: Task, config: RunConfig) -> Evaluator | None:
        """None if the server has no test data. Raises TaskError if task.evaluation names data that is missing."""
        if not config.task.evaluation:
            return None
        return cls(task, task.examples(Path(config.task.evaluation), "test"), config.evaluate, config.run.rounds)

    def scores(self, method: Method, server: State, round_: int) -> dict[str, dict[str, float]]:
        """{view: {metric: value}}; empty in a round that is not scored. Round -1 is the model before round 0."""
        last = round_ == self.rounds - 1
        due = last or (self.config.every > 0 and (round_ + 1) % self.config.every == 0)
        if not due:
            return {}
        at_ends = last or round_ == -1
        generate = self.config.generate == "always" or (self.config.generate == "last" and at_ends)
        try:
            return {
                view: self.task.evaluate({n: weights[n] for n in self.task.spec}, self.examples, generate)
                for view, weights in method.deployed(server).items()
            }
        finally:
            self.task.release()
