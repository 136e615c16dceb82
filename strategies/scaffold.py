"""SCAFFOLD.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for Federated Learning.
ICML 2020. https://arxiv.org/abs/1910.06378

Each client corrects its steps by the difference between the mean gradient of all clients and its own gradient.

| paper | code | shape, unit |
|---|---|---|
| x | the spec's names in `server.tensors` | every tensor of the adapter |
| c | `control.<name>` in `server.tensors` | gradients; zero at first |
| c_i | `control.<name>` in the private state | gradients; zero at first |
| g_i(x) | `trainer.gradient` | of the mean loss of one batch |
| S, N | the cohort; `server.scalars["seen"]`, sorted | clients; all clients that ever had an upload in a sum |
| n_i, m | `num_examples`, their sum over the cohort | examples |

    y_i <- y_i - step on (g_i(y_i) - c_i + c), from y_i = x                          (Algorithm 1, line 10)
    c_i+ = g_i(x)                                                                    (line 12, option I)
    x <- sum_i (n_i / m) y_i                                                         (line 16, with eta_g = 1)
    c <- c + (|S| / N) sum_i (n_i / m) (c_i+ - c_i)                                  (line 17)

The correction is the gradient of the linear term <c - c_i, y>, which the trainer adds to the loss of every step.

A client shares: all trained weights, and the change of a gradient that corrects its steps. A client keeps: nothing.

The client learns: x and c of every round it takes part in; c is the mean of the last gradients of all clients.
The server learns: each client's trained weights in full, n_i, and the change of c_i. These changes add up to
c_i = g_i(x), the plain gradient of one batch at weights that the server chose. That is more than under FedAvg, and
it is the input that gradient inversion needs. Under secure aggregation, a server that follows the protocol learns only
the sums of both.

Formal guarantees: none (epsilon is infinite). `dp.*` is refused, because no accountant covers the plain gradient.

| case | result |
|---|---|
| c = c_i = 0, as in round 0 | the clients take the same steps as in FedAvg |
| one client | c = c_i: no correction |
| all clients in every round | c is the mean of the c_i, weighted by n_i |
| newcomer | c_i = 0 |
| a site that lost its private state | c_i = 0: it sends its full gradient as a change again, and c keeps that error |
| no upload | x and c stay unchanged, bit for bit |

Differences from the paper: the optimizer is AdamW, which scales the corrected gradient, instead of SGD. Option II
takes (x - y_i) / (K eta) as the mean gradient, which is correct only under plain SGD. This file therefore uses
option I, with one batch. The paper's g_i is stochastic too, but the text describes a pass over the local data.
Option I costs one extra gradient per participation. The means are weighted by n_i. N is the number of clients
seen so far, because later clients are unknown. Messages carry twice as many tensors as in FedAvg, in both directions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast, final

import torch
from torch import Tensor

from fedveil.adapters.adapter_types import AnyAdapter
from fedveil.adapters.lora import LoraAdapter
from fedveil.contract.contributions import AggregateSums
from fedveil.contract.layout import Direction, MessageLayout, Payload, WireField
from fedveil.contract.method import FederatedState, RoundContext
from fedveil.contract.param_spec import Spec, Weights
from fedveil.contract.trainer import Penalty, Trainer
from fedveil.ops.weight_averaging import WeightAveragingMethod
from fedveil.rng import RandomStream
from fedveil.wire.payloads import WireDtype, as_spec, cast_to, dense_fields, payload_tensors

__all__ = ["CONTROL", "Scaffold"]

CONTROL = "control."  # prefix that turns a tensor's name into the name of its control variate


@final
@dataclass(frozen=True)
class Scaffold(WeightAveragingMethod):
    """Every client shares all trained weights, and corrects its steps by the mean gradient.

    Attributes:
        adapter: the trained parameters: LoRA factors or all weights.
        wire_dtype: dtype on the wire in both directions; sums are always fp32.
    """

    adapter: AnyAdapter = field(default_factory=LoraAdapter)
    wire_dtype: WireDtype = "float32"

    @property
    def stale_upload_conflict(self) -> str:
        """Return why late uploads are refused: c and the sites' c_i belong to a single round."""
        return "adds changes of control variates, which belong to a single round of a cohort"

    @property
    def site_score_conflict(self) -> str:
        """Return "": a site can score the server's model, because only the control variate is its own."""
        return ""

    @property
    def requests_raw_gradient(self) -> bool:
        """Return True: clients also compute g_i(x)."""
        return True

    @property
    def keeps_private_state(self) -> bool:
        """Return True: the control variate stays at the site."""
        return True

    def init(self, spec: Spec, weights: Weights, rng: RandomStream) -> FederatedState:
        """Return x, and c = 0."""
        return FederatedState({**weights, **_zeros(spec)}, {"seen": []})

    def client(
        self, private: FederatedState | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[FederatedState | None, Payload]:
        """Run line 12, then line 10; send y_i and the change of c_i, and keep c_i as the server would add it up."""
        spec, received = trainer.spec, payload_tensors(down)
        start = as_spec({name: received[name] for name in spec}, spec)
        own = private.tensors if private else _zeros(spec)
        gradient = {name: g.detach().to("cpu", torch.float32) for name, g in trainer.gradient(start).weights.items()}
        change = cast_to({CONTROL + name: g - own[CONTROL + name] for name, g in gradient.items()}, self.wire_dtype)
        drift = {name: received[CONTROL + name].float() - own[CONTROL + name] for name in spec}
        # Train last, so that the client round reports this training.
        trained = trainer.train(start, penalty=_along(drift)).weights
        new_control = {name: own[name] + moved.float() for name, moved in change.items()}
        return FederatedState(new_control), Payload({**cast_to(trained, self.wire_dtype), **change})

    def aggregate_shapes(self, spec: Spec, round_: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the tensors and of their control variates."""
        return dict.fromkeys([*spec, *map(CONTROL.__add__, spec)], ())

    def server_update(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> FederatedState:
        """Run lines 16 and 17."""
        seen = sorted({*cast("Sequence[str]", server.scalars["seen"]), *sums.clear})
        new, part = sums.means(server.tensors), len(sums.clear) / len(seen)
        for name, c in server.tensors.items():
            if name.startswith(CONTROL):
                new[name] = c + part * new[name] if name in sums else c
        return FederatedState(new, {"seen": seen})

    def models(
        self, server: FederatedState, private: FederatedState | None = None, down: Payload | None = None
    ) -> Mapping[str, Weights]:
        """Return the server's model, x."""
        return {"server": {n: w for n, w in server.tensors.items() if not n.startswith(CONTROL)}}

    def layout(self, spec: Spec) -> MessageLayout:
        """Declare, in both directions, every tensor and its part of c (down) or of the change of c_i (up)."""
        return MessageLayout(self._fields(spec, "down") + self._fields(spec, "up"))

    def _fields(self, spec: Spec, direction: Direction) -> tuple[WireField, ...]:
        control = dense_fields(spec, direction, self.wire_dtype, prefix=CONTROL)
        return dense_fields(spec, direction, self.wire_dtype) + tuple(replace(f, unit="gradient") for f in control)


def _zeros(spec: Spec) -> dict[str, Tensor]:
    return {CONTROL + name: torch.zeros(t.shape) for name, t in spec.items()}


def _along(drift: Weights) -> Penalty:
    """Return the penalty <drift, y>, whose gradient is the drift. The drift is copied to the weights' device once."""
    there: dict[str, Tensor] = {}

    def penalty(now: Weights) -> Tensor:
        if not there:
            there.update({name: drift[name].to(w) for name, w in now.items()})
        return torch.stack([(there[name] * w).sum() for name, w in now.items()]).sum()

    return penalty
