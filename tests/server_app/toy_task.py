"""A task for worker tests: becomes fedveil/tasks/toy.py of a copied app. What it does stands in <data>/orders.json.

entries: numbers in the one LoRA factor B; load, pause: seconds before the first turn and in each step; steps;
die_at_step: die_by (SIGKILL) for itself, once for each file of that name that is not there yet; hold_mb: memory it
keeps; raises, words: kind and text of the error that training ends with.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import torch

from fedveil.contract.param_spec import ParamSpec
from fedveil.contract.task import Example, Task, TaskInfo, TrainingProgress
from fedveil.contract.trainer import TrainingResult
from fedveil.errors import TaskError

DEFAULTS = {
    "entries": 1000,
    "load": 0.0,
    "pause": 0.0,
    "steps": 3,
    "deaths": 0,
    "die_at_step": 2,
    "die_by": "SIGKILL",
    "hold_mb": 0,
    "raises": "",
    "words": "row 4711 of the ward",
}

INFO = TaskInfo(mounts=("layers",), columns=lambda task: (), tiny=lambda: None)


def create(config, adapter, device):
    return Toy(Path(config.task.data))


class Toy(Task):
    def __init__(self, folder: Path) -> None:
        self.orders = DEFAULTS | json.loads((folder / "orders.json").read_text())
        time.sleep(self.orders["load"])

    @property
    def spec(self):
        return {"h.lora_A": ParamSpec((1, 5)), "h.lora_B": ParamSpec((self.orders["entries"], 1))}

    def initial(self, rng):
        return {name: torch.zeros(t.shape) for name, t in self.spec.items()}

    def examples(self, data, split, share=None):
        return Example.from_columns(
            [{"folder": str(data), **DEFAULTS, **json.loads((data / "orders.json").read_text())}] * 3
        )

    def encode(self, examples):
        return examples

    def trainer(self, rows, rng, watch=None, round_=0):
        return ToyTraining(self, rows, rng, watch)

    def predict(self, weights, rows, generate=False):
        raise NotImplementedError

    def evaluate(self, weights, examples, generate):
        return {"loss": 0.0}


class ToyTraining:
    def __init__(self, task, rows, rng, watch):
        self.spec, self.orders, self.num_examples = task.spec, rows[0].values, len(rows)
        self.step, self.watch = float(torch.rand((), generator=rng.torch_generator())), watch

    def train(self, weights, frozen=None, penalty=None):
        self.held = torch.ones(self.orders["hold_mb"] * 250_000)
        for step in range(1, self.orders["steps"] + 1):
            time.sleep(self.orders["pause"])
            self._perhaps_die(step)
            self.watch(TrainingProgress(step, self.orders["steps"], 1.0 / step, 100 * step, 0.5 * step))
        if self.orders["raises"]:
            kinds = (TaskError, ValueError, MemoryError, RuntimeError)
            raise {kind.__name__: kind for kind in kinds}[self.orders["raises"]](self.orders["words"])
        return TrainingResult({name: w + self.step for name, w in weights.items()}, {"steps": self.orders["steps"]})

    def gradient(self, weights):
        trained = self.train(weights)
        return TrainingResult({name: w - trained.weights[name] for name, w in weights.items()}, trained.report)

    def _perhaps_die(self, step):
        for death in range(self.orders["deaths"]):
            marker = Path(self.orders["folder"]) / f"died-{death}"
            if step == self.orders["die_at_step"] and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.Signals[self.orders["die_by"]])
                time.sleep(60)  # but for SIGKILL it may take a moment, in which this thread must not die again
