"""A linear read-out of a prompt on random features: real per-row gradients, small enough to see through."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedveil.config import parse
from fedveil.contract.param_spec import ParamSpec
from fedveil.contract.task import Example, ExampleOrigin, Task, ignore_progress
from fedveil.rng import RandomStream
from fedveil.training.local_training import LocalTraining

LENGTH, WIDTH, CLASSES = 6, 5, 3


def examples(count: int, seed: int = 1, scale: float = 1.0):
    """Rows: features (classes, length x width) as lists, and a label."""
    generator = torch.Generator().manual_seed(seed)
    features = scale * torch.randn(count, CLASSES, LENGTH * WIDTH, generator=generator)
    return [
        Example({"x": x.tolist(), "y": i % CLASSES}, ExampleOrigin("train.jsonl", i + 1))
        for i, x in enumerate(features)
    ]


class PromptTask(Task):
    """logits = x P; what a task offers to local training, and a loss of a single row."""

    def __init__(self, config=None, rows=()) -> None:
        self.config = config or parse({"train.batch-size": 4})
        self.rows = list(rows)
        self.trained = {"prompt": torch.nn.Parameter(torch.zeros(LENGTH, WIDTH))}

    @property
    def spec(self):
        return {"prompt": ParamSpec((LENGTH, WIDTH))}

    def initial(self, rng):
        return {"prompt": 0.02 * torch.randn(LENGTH, WIDTH, generator=rng.torch_generator())}

    def examples(self, data, split, share=None):
        return [replace(row, origin=replace(row.origin, file=f"{data}/{row.origin.file}")) for row in self.rows]

    def encode(self, examples):
        return [(torch.tensor(e.values["x"]), e.values["y"]) for e in examples]

    def trainer(self, rows, rng: RandomStream, watch=ignore_progress, round_=0):
        return LocalTraining(self, rows, rng, watch, round_)

    def samples(self, rows):
        return torch.stack([x for x, _ in rows]), torch.tensor([y for _, y in rows])

    def sample_loss(self, weights, x, y):
        return torch.nn.functional.cross_entropy((x @ weights["prompt"].flatten())[None], y[None])

    def evaluate(self, weights, examples, generate):
        raise NotImplementedError

    def predict(self, weights, rows, generate=False):
        raise NotImplementedError


SPACE = 4
_TOWER = torch.randn(CLASSES * SPACE, LENGTH * WIDTH, generator=torch.Generator().manual_seed(77))


class TextTask(PromptTask):
    """A text a class, all of them made from the prompt alone; a row is a direction of their space."""

    def encode(self, examples):
        return [(torch.tensor(e.values["x"]).flatten()[:SPACE], e.values["y"]) for e in examples]

    def features(self, weights):
        texts = torch.tanh(_TOWER @ weights["prompt"].flatten()).reshape(CLASSES, SPACE)
        return torch.nn.functional.normalize(texts, dim=-1)

    def factors(self, features, x, y):
        return 3 * ((3 * x @ features.T).softmax(-1) - torch.nn.functional.one_hot(y, CLASSES)), x

    def sample_loss(self, weights, x, y):
        return torch.nn.functional.cross_entropy((3 * x @ self.features(weights).T)[None], y[None])


def local_of(count: int = 12, seed: int = 1, scale: float = 1.0, kind=PromptTask, **config):
    """A client with `count` rows; config as batch_size = 4, epochs = 1."""
    task = kind(parse({f"train.{k.replace('_', '-')}": v for k, v in {"batch_size": 4, **config}.items()}))
    return task.trainer(task.encode(examples(count, seed, scale)), RandomStream(bytes(32)))
