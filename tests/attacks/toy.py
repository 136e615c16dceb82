"""A transparent linear classifier with one LoRA pair, trained by real gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from fedveil import rng
from fedveil.config import parse
from fedveil.contract.method import Method, RoundContext
from fedveil.contract.param_spec import ParamSpec, Weights
from fedveil.contract.task import ExamplePrediction
from fedveil.contract.trainer import Trainer, TrainingResult
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.wire.capture import MessageCapture

WIDTH, CLASSES, RANK = 24, 4, 3
Point = tuple[torch.Tensor, int]


def points(count: int, seed: int) -> list[Point]:
    """Rows of one distribution. Labels are drawn apart from the inputs: only a row's own training can teach it."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator).tolist()
    return list(zip(torch.randn(count, WIDTH, generator=generator), labels, strict=True))


@dataclass
class Points:
    """A batch."""

    inputs: torch.Tensor
    labels: torch.Tensor

    def to(self, device: torch.device) -> Points:
        return Points(self.inputs.to(device), self.labels.to(device))


class Linear:
    """W = W_0 + B A; what attacks need of a task."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(141421)
        self.base = torch.randn(CLASSES, WIDTH, generator=generator) / WIDTH**0.5
        self._initial = {
            "m.lora_A": torch.randn(RANK, WIDTH, generator=generator) / WIDTH**0.5,
            "m.lora_B": torch.zeros(CLASSES, RANK),
        }
        self.trained = {name: nn.Parameter(w.clone()) for name, w in self._initial.items()}

    @property
    def spec(self):
        return {name: ParamSpec(tuple(w.shape)) for name, w in self._initial.items()}

    def initial(self) -> Weights:
        return {name: w.clone() for name, w in self._initial.items()}

    def put(self, weights: Weights) -> None:
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(weights[name])

    def collate(self, rows: Sequence[Point]) -> Points:
        return Points(torch.stack([x for x, _ in rows]), torch.tensor([y for _, y in rows]))

    def loss_sum(self, batch: Points) -> torch.Tensor:
        weight = self.base + self.trained["m.lora_B"] @ self.trained["m.lora_A"]
        return nn.functional.cross_entropy(batch.inputs @ weight.T, batch.labels, reduction="sum")

    def predict(self, weights: Weights, rows: Sequence[Point], generate: bool = False):
        weight = self.base + weights["m.lora_B"] @ weights["m.lora_A"]
        for x, y in rows:
            yield ExamplePrediction({"target": (weight @ x)[None]}, torch.tensor([y]))


@dataclass
class Descent:
    """A client: some steps of gradient descent on its rows; remembers what it started from."""

    task: Linear
    rows: Sequence[Point]
    steps: int = 4
    rate: float = 0.5
    started_from: list[Weights] = field(default_factory=list)

    @property
    def num_examples(self) -> int:
        return len(self.rows)

    @property
    def spec(self):
        return self.task.spec

    def train(self, weights: Weights, frozen=None, penalty=None) -> TrainingResult:
        self.started_from.append({name: w.clone() for name, w in weights.items()})
        self.task.put(weights)
        optimiser = torch.optim.SGD(self.task.trained.values(), lr=self.rate)
        for _ in range(self.steps):
            optimiser.zero_grad()
            loss = self.task.loss_sum(self.task.collate(self.rows)) / len(self.rows)
            loss.backward()
            optimiser.step()
        after = {name: p.detach().clone() for name, p in self.task.trained.items()}
        return TrainingResult(after, {"loss_trained": float(loss.detach()) if self.steps else 0.0})

    def gradient(self, weights: Weights) -> TrainingResult:
        self.task.put(weights)
        loss = self.task.loss_sum(self.task.collate(self.rows)) / len(self.rows)
        gradients = torch.autograd.grad(loss, list(self.task.trained.values()))
        return TrainingResult(
            dict(zip(self.task.trained, gradients, strict=True)), {"loss_received": float(loss.detach())}
        )


def federation(
    method: Method,
    name: str,
    folder: Path,
    locals_: dict[str, Trainer],
    weights: Weights,
    rounds: int = 6,
    fraction: float = 1.0,
    seed: int = 3,
    wrap: Callable[[str, RoundContext, Trainer], Trainer] = lambda site, ctx, local: local,
) -> InProcessFederation:
    """A federation over `locals_` with a tap in `folder`; not run yet."""
    spec = next(iter(locals_.values())).spec
    config = parse({"run.deterministic": True, "run.seed": seed, "run.rounds": rounds, "cohort.fraction": fraction})
    state = method.init(spec, weights, rng.initial_stream(0, "method init"))
    return InProcessFederation(
        MessageExchange(method, name, spec),
        config,
        lambda site, ctx: wrap(site, ctx, locals_[site]),
        list(locals_),
        state,
        tap=MessageCapture(folder),
    )
