"""Clients whose loss is 1/2 (w - c)^2 in every entry, trained by two steps of plain SGD at rate 0.25."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from fedveil import rng
from fedveil.config import parse
from fedveil.contract.method import Method, RoundContext
from fedveil.contract.param_spec import ParamSpec
from fedveil.contract.trainer import TrainingResult
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from tests.conftest import ToyTrainer

CTX = RoundContext(0, "a", True, bytes(32), seeded=True)
RATE, STEPS = 0.25, 2


@dataclass
class Quadratic(ToyTrainer):
    """A client of this center and number of examples."""

    def __init__(self, spec, center: float, count: int) -> None:
        super().__init__(spec, count)
        self.center = center

    def train(self, weights, frozen=None, penalty=None) -> TrainingResult:
        now = {name: w.clone() for name, w in weights.items()}
        for _ in range(STEPS):
            leaves = {name: w.requires_grad_() for name, w in now.items()}
            loss = sum(((w - self.center) ** 2).sum() / 2 for w in leaves.values())
            (loss + (penalty(leaves) if penalty else 0.0)).backward()
            now = {name: (w - RATE * w.grad).detach() for name, w in leaves.items()}
        return TrainingResult(now, {"steps": STEPS})

    def gradient(self, weights) -> TrainingResult:
        return TrainingResult({name: w - self.center for name, w in weights.items()}, {})


def quadratic_twin(start: float, slope: Callable[[float], float]) -> float:
    """The same descent of one entry."""
    for _ in range(STEPS):
        start -= RATE * slope(start)
    return start


def federation(
    method: Method, name: str, centers: Mapping[str, float], counts: Mapping[str, int]
) -> InProcessFederation:
    """A federation of such clients, which all take part in every round, from 0.5."""
    spec = {"w": ParamSpec((2,))}
    exchange = MessageExchange(method, name, spec)
    config = parse({"run.deterministic": True, "method.name": name})
    state = method.init(spec, {"w": torch.full((2,), 0.5)}, rng.initial_stream(0, "x"))
    return InProcessFederation(
        exchange, config, lambda site, ctx: Quadratic(spec, centers[site], counts[site]), list(centers), state
    )
