"""FedSGD: clients send gradients, and the server takes one step along their mean. Several methods share this code.

    g^n = gradient of the mean loss of one batch at w            exchange = "batch"
    g^n = w - (w after local training)                           exchange = "epoch", the pseudo-gradient
    w  <- w - eta g                                              optimiser = "sgd"; g is the mean of the g^n
    m  <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2,  t <- t + 1
    w  <- w - eta (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)   optimiser = "adam"; every entry has its own t

For an entry that no client sent, the weight, both moments and t do not change. There is no weight decay.
b1 = 0.9, b2 = 0.999, eps = 1e-8 (Kingma, Ba: Adam. ICLR 2015).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from fedveil.contract.contributions import AggregateSums
from fedveil.contract.layout import Payload
from fedveil.contract.method import FederatedState, Method, RoundContext, Sends
from fedveil.contract.param_spec import Spec, Weights
from fedveil.contract.trainer import Trainer
from fedveil.errors import ConfigError
from fedveil.rng import RandomStream
from fedveil.wire.payloads import WireDtype, cast_to, lazy_spec

Exchanged = Literal["batch", "epoch"]
Optimiser = Literal["sgd", "adam"]

_FIRST, _SECOND, _STEPS = "adam.first.", "adam.second.", "adam.steps."
_BETA_1, _BETA_2, _EPS = 0.9, 0.999, 1e-8


def check_learning_rate(learning_rate: float | None) -> None:
    """Raise ConfigError unless the learning rate is None or above 0."""
    if learning_rate is not None and not 0.0 < learning_rate < math.inf:
        raise ConfigError(f"learning_rate: expected a finite number above 0, found {learning_rate}")


def check_wire_dtype(wire_dtype: WireDtype) -> None:
    """Raise ConfigError for float16, which turns gradient entries below 3e-8 into zeros that would count."""
    if wire_dtype == "float16":
        raise ConfigError(
            'wire_dtype: expected "float32" or "bfloat16" for gradients, found "float16", which rounds their small '
            "entries to zero; use one of the two"
        )


def learning_rate_of(learning_rate: float | None, exchange: Exchanged, optimiser: Optimiser) -> float:
    """Return eta; the default is 1 for SGD after local training, otherwise 1e-4 as in the random binary paper."""
    if learning_rate is not None:
        return learning_rate
    return 1.0 if (exchange, optimiser) == ("epoch", "sgd") else 1e-4


def client_gradient(
    trainer: Trainer, received: Weights, exchange: Exchanged, device: torch.device | None = None
) -> dict[str, Tensor]:
    """Return g^n at the received weights, on `device` if given, otherwise on the weights' device."""
    weights = lazy_spec(received, trainer.spec)
    if exchange == "batch":
        gradients = trainer.gradient(weights).weights
        return {name: g.to(device or received[name].device) for name, g in gradients.items()}
    trained = trainer.train(weights).weights
    return {name: (w - trained[name]).to(device) for name, w in weights.items()}


def start_state(weights: Weights, optimiser: Optimiser) -> FederatedState:
    """Return the server's state before round 0: the weights, and zero moments and counts for Adam."""
    if optimiser == "sgd":
        return FederatedState(dict(weights))
    moments = {p + n: torch.zeros(w.shape) for p in (_FIRST, _SECOND) for n, w in weights.items()}
    return FederatedState(
        {**weights, **moments, **{_STEPS + n: torch.zeros(w.shape, dtype=torch.int32) for n, w in weights.items()}}
    )


def weights_after(server: FederatedState) -> dict[str, Tensor]:
    """Return the weights in a server's state, without the optimizer's tensors."""
    return {n: w for n, w in server.tensors.items() if not n.startswith((_FIRST, _SECOND, _STEPS))}


def gradient_step(
    server: FederatedState, sums: AggregateSums, optimiser: Optimiser, learning_rate: float
) -> FederatedState:
    """Take one step along the mean. A tensor that no client sent stays the same object."""
    new = dict(server.tensors)
    for name, old in weights_after(server).items():
        if name not in sums:
            continue
        moved, direction = sums.moved(name), sums.mean(name)
        if optimiser == "adam":
            own = {prefix: server.tensors[prefix + name] for prefix in (_FIRST, _SECOND, _STEPS)}
            direction, own = _adam(direction, own)
            new |= {p + name: torch.where(moved, t, server.tensors[p + name]) for p, t in own.items()}
        stepped = old.to(torch.float32).sub(direction, alpha=learning_rate).to(old.dtype)
        new[name] = torch.where(moved, stepped, old)
    return FederatedState(new, server.scalars)


def _adam(g: Tensor, own: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the step direction, and the moments and step counts after the step."""
    first = own[_FIRST] * _BETA_1 + g * (1 - _BETA_1)
    second = own[_SECOND] * _BETA_2 + g.square() * (1 - _BETA_2)
    steps = own[_STEPS] + 1
    unbiased = first / -torch.expm1(steps * math.log(_BETA_1))
    scale = (second / -torch.expm1(steps * math.log(_BETA_2))).sqrt_()
    return unbiased / (scale + _EPS), {_FIRST: first, _SECOND: second, _STEPS: steps}


class FedSgdMethod(Method):
    """Base class for methods whose clients send gradients.

    It is not a dataclass: each method declares its fields in its own order.

    Attributes:
        exchange: content of a client's upload: the gradient of one "batch", or the pseudo-gradient of local epochs
            ("epoch").
        optimiser: the server's optimizer.
        learning_rate: eta; None: 1 with exchange = "epoch" and SGD, otherwise 1e-4.
        wire_dtype: dtype on the wire in both directions; sums are always fp32.
    """

    exchange: Exchanged
    optimiser: Optimiser
    learning_rate: float | None
    wire_dtype: WireDtype

    @property
    def upload_kind(self) -> Sends:
        """Return the kind: gradients, or pseudo-gradients from an epoch, with no tensors withheld."""
        return "gradients"

    @property
    def uses_local_optimizer(self) -> bool:
        """Return True for local epochs, False for the gradient of a single batch."""
        return self.exchange == "epoch"

    @property
    def server_optimizer_conflict(self) -> str:
        """Return the reason: with Adam, the method already has a server optimizer."""
        return "would follow the method's own server optimizer (optimiser)" if self.optimiser != "sgd" else ""

    @property
    def stale_upload_conflict(self) -> str:
        """Return "": an upload is a gradient."""
        return ""

    def init(self, spec: Spec, weights: Weights, rng: RandomStream) -> FederatedState:
        """Return w_0, and zero moments for Adam."""
        return start_state(weights, self.optimiser)

    def broadcast(self, server: FederatedState, ctx: RoundContext) -> Payload:
        """Return w, which is the same for every client."""
        return Payload(cast_to(weights_after(server), self.wire_dtype))

    def server_update(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> FederatedState:
        """Take a step along the mean of the uploads."""
        eta = learning_rate_of(self.learning_rate, self.exchange, self.optimiser)
        return gradient_step(server, sums, self.optimiser, eta)

    def models(
        self, server: FederatedState, private: FederatedState | None = None, down: Payload | None = None
    ) -> Mapping[str, Weights]:
        """Return one model: the server's."""
        return {"server": weights_after(server)}
