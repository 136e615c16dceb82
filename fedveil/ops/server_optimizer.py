"""Server optimizers: a step with momentum and adaptive rates along a round's aggregated update.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: Adaptive Federated Optimization. ICLR 2021.
https://arxiv.org/abs/2003.00295. FedAvgM follows Hsu, Qi and Brown (2019). https://arxiv.org/abs/1909.06335

| paper | code | shape, unit |
|---|---|---|
| x_t | `before.tensors` for trained names | every tensor that training changes |
| Delta_t | the method's next state minus x_t | weights; in FedAvg the weighted mean of x_k - x_t |
| m_t, v_t | `moments["first.<name>"]`, `moments["second.<name>"]`, fp32 | weights; weights squared |
| eta, beta_1, beta_2, tau | `learning_rate`, `beta1`, `beta2`, `tau` | tau in weights |

    m_t = beta_1 m_{t-1} + (1 - beta_1) Delta_t                                  (Algorithm 2)
    v_t = v_{t-1} + Delta_t^2                                                    FedAdagrad
    v_t = v_{t-1} - (1 - beta_2) Delta_t^2 sign(v_{t-1} - Delta_t^2)             FedYogi
    v_t = beta_2 v_{t-1} + (1 - beta_2) Delta_t^2                                FedAdam
    x_{t+1} = x_t + eta m_t / (sqrt(v_t) + tau)
    m_t = beta_1 m_{t-1} + Delta_t,    x_{t+1} = x_t + eta m_t                   FedAvgM

m_{-1} = 0 and v_{-1} = tau^2. As in the paper, there is no bias correction.

| case | result |
|---|---|
| FedAvgM with beta_1 = 0 and eta = 1 | the method without a server optimizer, up to rounding |
| an entry that no site sent in the round | the method's own next value; m and v stay: a frozen factor does not drift |
| a buffer that training does not change (BatchNorm) | the method's mean: a variance must not be extrapolated |
| a round without a sum | x, m and v stay, bit for bit |
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedveil.config import ServerConfig
from fedveil.contract.method import FederatedState
from fedveil.errors import ConfigError

__all__ = ["ServerOptimizer"]

Kind = Literal["fedavgm", "fedadam", "fedyogi", "fedadagrad"]
_USED = {  # the keys that each optimizer uses, besides `optimizer`
    "none": (), "fedavgm": ("learning_rate", "beta1"), "fedadagrad": ("learning_rate", "beta1", "tau"),
    "fedadam": ("learning_rate", "beta1", "beta2", "tau"), "fedyogi": ("learning_rate", "beta1", "beta2", "tau"),
}  # fmt: skip
_FIRST, _SECOND = "first.", "second."


@dataclass(frozen=True)
class ServerOptimizer:
    """A server optimizer and its constants.

    Attributes:
        kind: the algorithm.
        learning_rate: eta.
        beta1, beta2, tau: the paper's constants; FedAvgM uses only beta1, FedAdagrad only beta1 and tau.
    """

    kind: Kind
    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    @classmethod
    def from_config(cls, config: ServerConfig) -> ServerOptimizer | None:
        """Return the run config's optimizer; None if the method's own update is used unchanged.

        Raises:
            ConfigError: a key that this optimizer does not use is set.
        """
        for key in ("learning_rate", "beta1", "beta2", "tau"):
            value, plain = getattr(config, key), getattr(ServerConfig(), key)
            if value != plain and key not in _USED[config.optimizer]:
                raise ConfigError(
                    f'server.{key.replace("_", "-")}: server.optimizer = "{config.optimizer}" does not use it, so it '
                    f"must stay {plain:g}, but it is {value:g}; leave it out"
                )
        if config.optimizer == "none":
            return None
        rate = config.learning_rate or (1.0 if config.optimizer == "fedavgm" else 0.01)
        return cls(config.optimizer, rate, config.beta1, config.beta2, config.tau)

    def next_state(
        self, before: FederatedState, proposed: FederatedState, changed: Mapping[str, Tensor], trained: Iterable[str]
    ) -> FederatedState:
        """Return the server's next state, with this optimizer's step instead of the method's own.

        Args:
            before: the server's state; its moments may be empty before the first step.
            proposed: the state after the method's own update.
            changed: for each tensor sent by any site, True for the entries sent by any site.
            trained: names of the tensors that training changes.
        """
        tensors, moments = dict(proposed.tensors), dict(before.moments)
        for name in trained:
            if name not in changed:
                continue
            there, old, new = changed[name], before.tensors[name], proposed.tensors[name]
            first = moments.get(_FIRST + name, torch.zeros(old.shape))
            delta = new.to(torch.float32) - old.to(torch.float32)
            if self.kind == "fedavgm":
                direction = after = first * self.beta1 + delta
            else:
                second = moments.get(_SECOND + name, torch.full(old.shape, self.tau**2))
                after = first * self.beta1 + delta * (1 - self.beta1)
                moments[_SECOND + name] = torch.where(there, self._second(second, delta.square()), second)
                direction = after / (moments[_SECOND + name].sqrt() + self.tau)
            moments[_FIRST + name] = torch.where(there, after, first)
            stepped = old.to(torch.float32).add(direction, alpha=self.learning_rate).to(old.dtype)
            tensors[name] = torch.where(there, stepped, new)
        return FederatedState(tensors, proposed.scalars, moments)

    def _second(self, second: Tensor, squared: Tensor) -> Tensor:
        """Return v_t."""
        if self.kind == "fedadagrad":
            return second + squared
        if self.kind == "fedyogi":
            return second - (1 - self.beta2) * squared * torch.sign(second - squared)
        return second * self.beta2 + squared * (1 - self.beta2)

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate: expected a finite number above 0, found {self.learning_rate}")
