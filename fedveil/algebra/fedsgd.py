"""FedSGD: clients send gradients, and the server takes one step along their mean. Several methods share this code.

    g^n = gradient of the mean loss of one batch at w            exchange = "batch"
    g^n = w - (w after local training)                           exchange = "epoch", the pseudo-gradient
    w  <- w - eta g                                              optimiser = "sgd", g is the mean of the g^n
    m  <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2,  t <- t + 1
    w  <- w - eta (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)   optimiser = "adam"; every entry has its own t

For an entry that no client sent, the weight, both moments and t stay bit for bit. There is no weight decay.
b1 = 0.9, b2 = 0.999, eps = 1e-8 (Kingma, Ba: Adam. ICLR 2015).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from fedveil.contract.method import State
from fedveil.contract.spec import Weights
from fedveil.contract.sums import Sums
from fedveil.contract.trainer import Trainer
from fedveil.errors import ConfigError
from fedveil.wire.payloads import WireDtype, lazy_spec

Exchanged = Literal["batch", "epoch"]
Optimiser = Literal["sgd", "adam"]

_FIRST, _SECOND, _STEPS = "adam.first.", "adam.second.", "adam.steps."
_BETA_1, _BETA_2, _EPS = 0.9, 0.999, 1e-8


def check_learning_rate(learning_rate: float | None) -> None:
    """Raises ConfigError unless it is None or above 0."""
    if learning_rate is not None and not 0.0 < learning_rate < math.inf:
        raise ConfigError(f"learning_rate: expected a finite number above 0, found {learning_rate}")


def check_wire_dtype(wire_dtype: WireDtype) -> None:
    """Raises ConfigError for float16, in which entries of a gradient below 3e-8 are zeros, and these would count."""
    if wire_dtype == "float16":
        raise ConfigError(
            'wire_dtype: expected "float32" or "bfloat16" where gradients are sent, found "float16", which makes zeros '
            "of their small entries; take one of the two"
        )


def rate_of(learning_rate: float | None, exchange: Exchanged, optimiser: Optimiser) -> float:
    """eta as given; by default 1 for SGD after local training, otherwise 1e-4 as in the random binary paper."""
    if learning_rate is not None:
        return learning_rate
    return 1.0 if (exchange, optimiser) == ("epoch", "sgd") else 1e-4


def gradient(
    trainer: Trainer, received: Weights, exchange: Exchanged, device: torch.device | None = None
) -> dict[str, Tensor]:
    """g^n at the received weights, on `device`, or on theirs."""
    weights = lazy_spec(received, trainer.spec)
    if exchange == "batch":
        found = trainer.gradient(weights).weights
        return {name: g.to(device or received[name].device) for name, g in found.items()}
    trained = trainer.train(weights).weights
    return {name: (w - trained[name]).to(device) for name, w in weights.items()}


def start(weights: Weights, optimiser: Optimiser) -> State:
    """The server's state before round 0: the weights, and zero moments and counts for Adam."""
    if optimiser == "sgd":
        return State(dict(weights))
    moments = {p + n: torch.zeros(w.shape) for p in (_FIRST, _SECOND) for n, w in weights.items()}
    return State(
        {**weights, **moments, **{_STEPS + n: torch.zeros(w.shape, dtype=torch.int32) for n, w in weights.items()}}
    )


def weights_of(server: State) -> dict[str, Tensor]:
    """The weights in a server's state, without the optimiser's tensors."""
    return {n: w for n, w in server.tensors.items() if not n.startswith((_FIRST, _SECOND, _STEPS))}


def descend(server: State, sums: Sums, optimiser: Optimiser, learning_rate: float) -> State:
    """One step along the mean. A tensor that no client sent stays the same object."""
    new = dict(server.tensors)
    for name, old in weights_of(server).items():
        if name not in sums:
            continue
        moved, direction = sums.moved(name), sums.mean(name)
        if optimiser == "adam":
            own = {prefix: server.tensors[prefix + name] for prefix in (_FIRST, _SECOND, _STEPS)}
            direction, own = _adam(direction, own)
            new |= {p + name: torch.where(moved, t, server.tensors[p + name]) for p, t in own.items()}
        stepped = old.to(torch.float32).sub(direction, alpha=learning_rate).to(old.dtype)
        new[name] = torch.where(moved, stepped, old)
    return State(new, server.scalars)


def _adam(g: Tensor, own: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The direction of the step, and the moments and step counts after it."""
    first = own[_FIRST] * _BETA_1 + g * (1 - _BETA_1)
    second = own[_SECOND] * _BETA_2 + g.square() * (1 - _BETA_2)
    steps = own[_STEPS] + 1
    unbiased = first / -torch.expm1(steps * math.log(_BETA_1))
    scale = (second / -torch.expm1(steps * math.log(_BETA_2))).sqrt_()
    return unbiased / (scale + _EPS), {_FIRST: first, _SECOND: second, _STEPS: steps}
