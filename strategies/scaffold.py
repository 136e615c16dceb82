"""SCAFFOLD.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for Federated Learning. ICML
2020. https://arxiv.org/abs/1910.06378

Every step of a client is corrected by how its own gradient differs from the mean of all clients' gradients.

| paper | code | shape, unit |
|---|---|---|
| x | the spec's names in `server.tensors` | every tensor of the adapter |
| c | `control.<name>` in `server.tensors` | gradients; zero at first |
| c_i | `control.<name>` in the private state | gradients; zero at first |
| g_i(x) | `trainer.gradient` | of the mean loss of one batch |
| S, N | the cohort; `server.scalars["seen"]`, sorted | clients; those whose upload was ever in a sum |
| n_i, m | `num_examples`, their sum over the cohort | examples |

    y_i <- y_i - step on (g_i(y_i) - c_i + c), from y_i = x                          (Algorithm 1, line 10)
    c_i+ = g_i(x)                                                                    (line 12, option I)
    x <- sum_i (n_i / m) y_i                                                         (line 16, with eta_g = 1)
    c <- c + (|S| / N) sum_i (n_i / m) (c_i+ - c_i)                                  (line 17)

The correction is the gradient of the linear term <c - c_i, y>, which is added to the loss of every step.

A client shares: all trained weights, and the change of a gradient that corrects its steps. With it stays: nothing.

The client learns: x and c of every round it takes part in; c is the mean of the last gradients of all clients.
The server learns: each client's trained weights in full, n_i, and the change of c_i. As c_i is the sum of its changes,
that is g_i(x), the plain gradient of one batch at weights that it chose: more than under FedAvg, and what gradient
inversion asks for. Under secure aggregation it learns the sums of both.

Formal guarantees: none (epsilon is infinite). `dp.*` is refused: no accountant covers the plain gradient.

| case | result |
|---|---|
| c = c_i = 0, so in round 0 | the clients' steps are FedAvg's |
| one client | c = c_i: nothing is corrected |
| all clients in every round | c is the mean of the c_i, weighted with n_i |
| newcomer | c_i = 0 |
| a site that lost its private state | c_i = 0: it sends a whole gradient as a change once more, and c stays off by it |
| no upload | x and c stay, bit for bit |

Differences from the paper: AdamW, which scales the corrected gradient, instead of SGD. Option II takes (x - y_i) / (K
eta) for the mean gradient, which it is under plain SGD alone; so option I is taken, of one batch (the paper's g_i is
stochastic too, its text speaks of a pass over the local data). It costs one more gradient a participation. The means
are weighted with n_i. N is the number of clients seen so far, for nobody knows who else will come. The wire carries
twice the tensors of FedAvg, both ways.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast, final

import torch
from torch import Tensor

from fedveil.adapters.kinds import AnyAdapter
from fedveil.adapters.lora import Lora
from fedveil.contract.layout import Direction, Field, Layout, Payload
from fedveil.contract.method import Method, RoundContext, State
from fedveil.contract.spec import Spec, Weights
from fedveil.contract.sums import Sums, Terms, weighted
from fedveil.contract.trainer import Penalty, Trainer
from fedveil.rng import Stream
from fedveil.wire.payloads import WireDtype, as_spec, cast_to, dense_fields, tensors_of

CONTROL = "control."  # before the name of a tensor: of its control variate


@final
@dataclass(frozen=True)
class Scaffold(Method):
    """Everyone shares everything, and corrects its steps by the mean gradient.

    Attributes:
        adapter: what is trained: LoRA factors or all weights.
        wire_dtype: dtype on the wire, both ways; sums are fp32 whatever it is.
    """

    adapter: AnyAdapter = field(default_factory=Lora)
    wire_dtype: WireDtype = "float32"

    @property
    def asks_gradient(self) -> bool:
        """g_i(x), beside the training."""
        return True

    def init(self, spec: Spec, weights: Weights, rng: Stream) -> State:
        """x, and c = 0."""
        return State({**weights, **_zeros(spec)}, {"seen": []})

    def broadcast(self, server: State, ctx: RoundContext) -> Payload:
        """(x, c), the same for every client."""
        return Payload(cast_to(server.tensors, self.wire_dtype))

    def client(
        self, private: State | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[State | None, Payload]:
        """Line 12, then line 10: y_i and the change of c_i are sent, c_i is kept as the server can add it up."""
        spec, received = trainer.spec, tensors_of(down)
        start = as_spec({name: received[name] for name in spec}, spec)
        own = private.tensors if private else _zeros(spec)
        found = {name: g.detach().to("cpu", torch.float32) for name, g in trainer.gradient(start).weights.items()}
        change = cast_to({CONTROL + name: g - own[CONTROL + name] for name, g in found.items()}, self.wire_dtype)
        drift = {name: received[CONTROL + name].float() - own[CONTROL + name] for name in spec}
        # Trained last: its report is the turn's.
        trained = trainer.train(start, penalty=_along(drift)).weights
        kept = {name: own[name] + moved.float() for name, moved in change.items()}
        return State(kept), Payload({**cast_to(trained, self.wire_dtype), **change})

    def terms(self, payload: Payload, num_examples: int, spec: Spec, ctx: RoundContext) -> Terms:
        """n_i times y_i and the change of c_i, and n_i."""
        return weighted(tensors_of(payload), num_examples)

    def summed(self, spec: Spec, round_: int) -> Mapping[str, tuple[int, ...]]:
        """The tensors, and their control variates."""
        return dict.fromkeys([*spec, *map(CONTROL.__add__, spec)], ())

    def settle(self, server: State, sums: Sums, ctx: RoundContext) -> State:
        """Lines 16 and 17."""
        seen = sorted({*cast("Sequence[str]", server.scalars["seen"]), *sums.clear})
        new, part = sums.means(server.tensors), len(sums.clear) / len(seen)
        for name, c in server.tensors.items():
            if name.startswith(CONTROL):
                new[name] = c + part * new[name] if name in sums else c
        return State(new, {"seen": seen})

    def deployed(
        self, server: State, private: State | None = None, down: Payload | None = None
    ) -> Mapping[str, Weights]:
        """One model: x."""
        return {"server": {n: w for n, w in server.tensors.items() if not n.startswith(CONTROL)}}

    def layout(self, spec: Spec) -> Layout:
        """Both ways: every tensor, and c or the change of c_i."""
        return Layout(self._fields(spec, "down") + self._fields(spec, "up"))

    def _fields(self, spec: Spec, direction: Direction) -> tuple[Field, ...]:
        control = dense_fields(spec, direction, self.wire_dtype, prefix=CONTROL)
        return dense_fields(spec, direction, self.wire_dtype) + tuple(replace(f, unit="gradient") for f in control)


def _zeros(spec: Spec) -> dict[str, Tensor]:
    return {CONTROL + name: torch.zeros(t.shape) for name, t in spec.items()}


def _along(drift: Weights) -> Penalty:
    """<drift, y>, whose gradient is the drift; it is taken to where the weights are once."""
    there: dict[str, Tensor] = {}

    def penalty(now: Weights) -> Tensor:
        if not there:
            there.update({name: drift[name].to(w) for name, w in now.items()})
        return torch.stack([(there[name] * w).sum() for name, w in now.items()]).sum()

    return penalty
