"""FedPer.

Arivazhagan, Aggarwal, Singh, Choudhary: Federated Learning with Personalization Layers. 2019.
https://arxiv.org/abs/1912.00818. This file applies it to LoRA pairs, as Park et al. (FedRand, 2025, section 4.1) do.

The pairs of the top layers are shared; after a first round over all layers, the pairs below stay at the site.

| paper | code | shape, unit |
|---|---|---|
| n | `layers` | layers: the n nearest the output of those that have trained tensors |
| W_T | the tensors of the top n layers | `<module>.lora_A`, `<module>.lora_B`, weights |
| W_L | all other tensors, "the lower layers" | weights |
| n_k, m_r | `num_examples`, their sum over the cohort | examples |
| k in H_r | `server.scalars["holders"]`, sorted | clients that gave an accepted upload after round 0 |

    (W_T, W_L)_1 = sum_k (n_k / m_0) (W_T, W_L)^k             (1, round 0: FedAvg over everything)
    W_T,r+1      = sum_k (n_k / m_r) W_T^k,  W_L,r+1 = W_L,1  (2, r > 0, on the server)
    start_k      = (W_T,r, W_L^k)                             (3, r > 0, on the client; W_L^k as it last trained it)
    W_L^k        = W_L,1                                      (4, for (3) while k has no W_L^k of a round after 0)

A layer's number is the first whole number between the dots of a tensor's name: 3 in "model.layers.3.mlp.lora_A".

A client shares: the LoRA factors of the top layers; all layers in round 0. With it stays: the lower layers.

The client learns: W_T of every round it takes part in, and W_L,1 (in round 0 the initial weights).
The server learns: in round 0 everything that a client trained; in later rounds its trained top layers and n_k.

Formal guarantees: none (epsilon is infinite). By construction: after round 0 no upload holds a tensor of a lower layer,
and the server's lower layers never change again. What clients sent in round 0, the server has seen.

| case | result |
|---|---|
| `layers` at or above the number of layers | FedAvg, bit for bit |
| client that trained in round 0 | its next participation starts from W_L,1, not from its own lower layers of round 0 |
| round 0 once more, at a site whose upload of it is in the server's state | the site sends its top layers alone |
| round 0 once more, because that upload was lost | the same upload again: a site takes no other message for round 0, so
  its lower layers leave it in one form only; W_L,1 is the mean over the clients whose first upload was accepted |
| newcomer in a later round | gets the current top layers and W_L,1 |
| the server takes a site for new that has a state of a round after 0, for example because its upload was lost | the
  server sends W_L,1 once more; the site continues with its own lower layers |
| site that lost its private state | it reports an error and gets all layers next time |
| upload of a round after 0 that holds lower layers | these layers are left out of the mean |
| no upload | the weights stay, bit for bit |
| client that never came back after round 0 | it deploys what it trained in round 0 |

Differences from the paper: Arivazhagan et al. share the layers near the input and keep those near the output, from
round 0 on and with random initial values. FedRand's comparison, which this file follows, shares the layers near the
output and starts the others from the mean of the first round. It does not say how a client that was not in the first
round gets that mean, nor which lower layers the server's own model has. Here the server sends W_L,1 once more at a
client's first participation after round 0, and its own model has W_L,1.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, final

from fedveil.adapters.lora import Lora
from fedveil.contract.layout import Layout, Payload
from fedveil.contract.method import Method, RoundContext, State
from fedveil.contract.spec import Spec, Weights
from fedveil.contract.sums import Sums, Terms, weighted
from fedveil.contract.trainer import Trainer
from fedveil.errors import ConfigError, StateError
from fedveil.rng import Stream
from fedveil.wire.payloads import WireDtype, as_spec, cast_to, dense_fields, tensors_of

T = TypeVar("T")


@final
@dataclass(frozen=True)
class FedPer(Method):
    """The top layers are shared; the others stay at the site after round 0.

    Attributes:
        layers: how many layers are shared, counted from the output.
        adapter: LoRA.
        wire_dtype: dtype on the wire, both ways; sums are fp32 whatever it is.
    """

    layers: int = 2
    adapter: Lora = field(default_factory=Lora)
    wire_dtype: WireDtype = "float32"

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ConfigError(f"layers: expected at least 1 shared layer, found {self.layers}")

    def init(self, spec: Spec, weights: Weights, rng: Stream) -> State:
        """The adapter's initial weights; no client holds W_L,1 yet."""
        self._top(spec)
        return State(dict(weights), {"holders": []})

    def broadcast(self, server: State, ctx: RoundContext) -> Payload:
        """W_T; in round 0, and to every client that may lack lower layers, also W_L."""
        if ctx.round == 0 or ctx.is_new or not _holds(server, ctx.client):
            return Payload(cast_to(server.tensors, self.wire_dtype), "all")
        return Payload(cast_to(_only(self._top(server.tensors), server.tensors), self.wire_dtype), "top")

    def client(
        self, private: State | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[State | None, Payload]:
        """Local epochs on all layers from Eq. 3; the top layers are sent, at first in round 0 all layers."""
        top, received = self._top(trainer.spec), tensors_of(down)
        # Eq. 4: lower layers that a site kept in round 0 are never started from.
        has_own = private is not None and private.scalars["round"] != 0
        kept = private.tensors if private is not None and has_own else received
        start = {n: (received if n in top else kept).get(n) for n in trainer.spec}  # Eq. 3
        whole = {n: w for n, w in start.items() if w is not None}
        if len(whole) < len(start):
            raise StateError(
                "private state: expected lower layers of an earlier participation (only the top was sent), found none; "
                "all layers come at the next participation"
            )
        trained = trainer.train(as_spec(whole, trainer.spec)).weights
        # A server that asks for round 0 again must not get what was trained since: private state says who has sent it.
        first = ctx.round == 0 and private is None
        sent, variant = (trained, "all") if first else (_only(top, trained), "top")
        return State(dict(trained), {"round": ctx.round}), Payload(cast_to(sent, self.wire_dtype), variant)

    def terms(self, payload: Payload, num_examples: int, spec: Spec, ctx: RoundContext) -> Terms:
        """n_k W^k, and n_k: of all layers in round 0, of the top layers after it."""
        sent = tensors_of(payload)
        return weighted(sent if ctx.round == 0 else _only(self._top(spec), sent), num_examples)

    def summed(self, spec: Spec, round_: int) -> Mapping[str, tuple[int, ...]]:
        """All layers in round 0, the top layers after it."""
        return dict.fromkeys(spec if round_ == 0 else _only(self._top(spec), spec), ())

    def settle(self, server: State, sums: Sums, ctx: RoundContext) -> State:
        """Eq. 1 in round 0, Eq. 2 after it."""
        holders = {*_holders(server)} | (set(sums.clear) if ctx.round > 0 else set())
        return State(sums.means(server.tensors), {"holders": sorted(holders)})

    def deployed(
        self, server: State, private: State | None = None, down: Payload | None = None
    ) -> Mapping[str, Weights]:
        """The server's model, with W_L,1 in the lower layers; with `private` also that client's, as last trained."""
        clients = {"client": private.tensors} if private is not None else {}
        return {"server": server.tensors, **clients}

    def layout(self, spec: Spec) -> Layout:
        """The top layers always; the lower ones down to a client that may lack them, and up in round 0."""
        top = self._top(spec)
        shared, lower = _only(top, spec), {n: t for n, t in spec.items() if n not in top}
        both = ("all", "top")
        fields = dense_fields(shared, "down", self.wire_dtype, both)
        fields += dense_fields(lower, "down", self.wire_dtype, ("all",), "round 0, first time after it")
        fields += dense_fields(shared, "up", self.wire_dtype, both)
        return Layout(fields + dense_fields(lower, "up", self.wire_dtype, ("all",), "round 0"))

    def _top(self, names: Iterable[str]) -> frozenset[str]:
        """Names of the tensors in the top layers. Raises ConfigError for a tensor whose name has no layer number."""
        layer_of = {name: _layer(name) for name in names}
        shared = sorted(set(layer_of.values()))[-self.layers :]
        return frozenset(name for name, layer in layer_of.items() if layer in shared)


def _layer(name: str) -> int:
    for part in name.split("."):
        if part.isdecimal():
            return int(part)
    raise ConfigError(
        f'{name}: expected a layer number in the name ("h.3.attn.lora_A"), found none; set adapter.targets to modules '
        "of numbered layers"
    )


def _only(names: frozenset[str], tensors: Mapping[str, T]) -> dict[str, T]:
    return {name: tensor for name, tensor in tensors.items() if name in names}


def _holders(server: State) -> Sequence[str]:
    return server.scalars["holders"]  # type: ignore[return-value]


def _holds(server: State, client: str) -> bool:
    """Halves the sorted list: a round asks this for every site, and N looks through N names would be quadratic."""
    holders = _holders(server)
    at = bisect.bisect_left(holders, client)
    return at < len(holders) and holders[at] == client
