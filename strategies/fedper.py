"""FedPer.

Arivazhagan, Aggarwal, Singh, Choudhary: Federated Learning with Personalization Layers. 2019.
https://arxiv.org/abs/1912.00818. This file applies it to LoRA pairs, as Park et al. (FedRand, 2025, section 4.1) do.

The pairs of the top layers are shared. In the first round all layers are shared; after that, the pairs of the lower
layers stay at the site.

| paper | code | shape, unit |
|---|---|---|
| n | `layers` | layers: the n layers nearest the output, among those with trained tensors |
| W_T | the tensors of the top n layers | `<module>.lora_A`, `<module>.lora_B`, weights |
| W_L | all other tensors, "the lower layers" | weights |
| n_k, m_r | `num_examples`, their sum over the cohort | examples |
| k in H_r | `server.scalars["holders"]`, sorted | clients with an accepted upload after round 0 |

    (W_T, W_L)_1 = sum_k (n_k / m_0) (W_T, W_L)^k             (1, round 0: FedAvg over everything)
    W_T,r+1      = sum_k (n_k / m_r) W_T^k,  W_L,r+1 = W_L,1  (2, r > 0, on the server)
    start_k      = (W_T,r, W_L^k)                             (3, r > 0, on the client; W_L^k as it last trained it)
    W_L^k        = W_L,1                                      (4, in (3), while k has no W_L^k from a round after 0)

A layer's number is the first dot-separated part of the tensor's name that is a whole number: 3 in
"model.layers.3.mlp.lora_A". A tensor without a number, such as a classifier head's "classifier.lora_A", belongs to the
top layers.

A client shares: the LoRA factors of the top layers; all layers in round 0. A client keeps: the lower layers.

The client learns: W_T of every round it takes part in, and W_L,1 (in round 0, the initial weights).
The server learns: in round 0, everything that a client trained; in later rounds, its trained top layers and n_k.

Formal guarantees: none (epsilon is infinite). By construction, after round 0 no upload contains a tensor of a lower
layer, and the server's lower layers never change again. The server has seen the clients' uploads in round 0.

| case | result |
|---|---|
| `layers` at or above the number of layers | FedAvg, bit for bit |
| client that trained in round 0 | its next participation starts from W_L,1, not from its own round-0 lower layers |
| round 0 is repeated at a site whose upload is in the server's state | the site sends only its top layers |
| the same under secure aggregation | the site sends nothing, because a lower layer could come from too few sites |
| round 0 is repeated because that upload was lost | the site sends the same upload again: it accepts no other message
  for round 0, so only one version of its lower layers is ever sent; W_L,1 is the mean over clients whose first upload
  was accepted |
| newcomer in a later round | gets the current top layers and W_L,1 |
| the server treats a site with later state as new, for example because its upload was lost | the server sends W_L,1
  once more; the site continues with its own lower layers |
| site that lost its private state | it reports an error and gets all layers next time |
| upload after round 0 that contains lower layers | the mean ignores these layers |
| no upload | the weights stay unchanged, bit for bit |
| client that never came back after round 0 | it deploys the model that it trained in round 0 |

Differences from the paper: Arivazhagan et al. share the layers near the input and keep those near the output, from
round 0 on and with random initial values. FedRand's comparison, which this file follows, shares the layers near the
output and starts the other layers from the mean of the first round. The paper does not say how a client that missed
the first round gets that mean, or which lower layers the server's own model uses. Here the server sends W_L,1 once
more at a client's first participation after round 0, and its own model uses W_L,1.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, final

from fedveil.adapters.lora import LoraAdapter
from fedveil.contract.contributions import AggregateSums, ClientContributions, weighted_contributions
from fedveil.contract.layout import MessageLayout, Payload
from fedveil.contract.method import FederatedState, Method, RoundContext
from fedveil.contract.param_spec import Spec, Weights
from fedveil.contract.trainer import Trainer
from fedveil.errors import ConfigError, StateError
from fedveil.ops.upload_quantization import UploadQuantization
from fedveil.rng import RandomStream
from fedveil.wire.payloads import WireDtype, as_spec, cast_to, dense_fields, payload_tensors

__all__ = ["FedPer"]

T = TypeVar("T")


@final
@dataclass(frozen=True)
class FedPer(Method):
    """Every client shares the top layers; the other layers stay at the site after round 0.

    Attributes:
        layers: number of shared layers, counted from the output.
        adapter: LoRA.
        wire_dtype: dtype on the wire in both directions; sums are always fp32.
        upload_bits: bits per uploaded weight, 2 to 8, with one scale per 256 weights; 0 disables quantization.
    """

    layers: int = 2
    adapter: LoraAdapter = field(default_factory=LoraAdapter)
    wire_dtype: WireDtype = "float32"
    upload_bits: int = 0

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ConfigError(f"layers: expected at least 1 shared layer, found {self.layers}")
        self._uploads  # noqa: B018  # this access checks upload_bits

    @property
    def _uploads(self) -> UploadQuantization:
        return UploadQuantization(self.wire_dtype, self.upload_bits)

    @property
    def has_partial_uploads(self) -> bool:
        """Return True: in a repeated round 0, sites that have trained before send only the top layers."""
        return True

    @property
    def stale_upload_conflict(self) -> str:
        """Return why late uploads are refused: Eq. 1 is the mean of all sites' lower layers in round 0."""
        return "shares its lower layers only in round 0"

    @property
    def sends_same_broadcast(self) -> bool:
        """Return False: only newcomers get the lower layers."""
        return False

    @property
    def keeps_private_state(self) -> bool:
        """Return True: the lower layers stay at the site."""
        return True

    @property
    def has_single_site_entries(self) -> bool:
        """Return False: under secure aggregation, a site refuses to send only its top layers in round 0."""
        return False

    def init(self, spec: Spec, weights: Weights, rng: RandomStream) -> FederatedState:
        """Return the adapter's initial weights; no client has W_L,1 yet."""
        self._top(spec)
        return FederatedState(dict(weights), {"holders": []})

    def broadcast(self, server: FederatedState, ctx: RoundContext) -> Payload:
        """Return W_T; in round 0, and for every client that may lack the lower layers, also W_L."""
        if ctx.round == 0 or ctx.is_new or not _holds(server, ctx.client):
            return Payload(cast_to(server.tensors, self.wire_dtype), "all")
        return Payload(cast_to(_only(self._top(server.tensors), server.tensors), self.wire_dtype), "top")

    def client(
        self, private: FederatedState | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[FederatedState | None, Payload]:
        """Train all layers, starting from Eq. 3; send the top layers, or all layers the first time in round 0."""
        top, received = self._top(trainer.spec), payload_tensors(down)
        # Eq. 4: training never starts from the lower layers that a site trained in round 0.
        has_own = private is not None and private.scalars["round"] != 0
        lower_layers = private.tensors if private is not None and has_own else received
        start = {n: (received if n in top else lower_layers).get(n) for n in trainer.spec}  # Eq. 3
        whole = {n: w for n, w in start.items() if w is not None}
        if len(whole) < len(start):
            raise StateError(
                "private state: the lower layers of an earlier participation are missing, and the server sent "
                "only the top layers; it will send all layers at the next participation"
            )
        trained = trainer.train(as_spec(whole, trainer.spec)).weights
        # A server that repeats round 0 must not get lower layers trained later. Private state means they were sent.
        first = ctx.round == 0 and private is None
        sent, variant = (trained, "all") if first else (_only(top, trained), "top")
        return FederatedState(dict(trained), {"round": ctx.round}), Payload(self._uploads.sent(sent), variant)

    def contributions(self, payload: Payload, num_examples: int, spec: Spec, ctx: RoundContext) -> ClientContributions:
        """Return n_k W^k and n_k: for all layers in round 0, and for the top layers afterward."""
        sent = self._uploads.opened(payload)
        return weighted_contributions(sent if ctx.round == 0 else _only(self._top(spec), sent), num_examples)

    def aggregate_shapes(self, spec: Spec, round_: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of all layers in round 0, and of the top layers afterward."""
        return dict.fromkeys(spec if round_ == 0 else _only(self._top(spec), spec), ())

    def server_update(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> FederatedState:
        """Apply eq. 1 in round 0, and eq. 2 afterward."""
        holders = {*_holders(server)} | (set(sums.clear) if ctx.round > 0 else set())
        return FederatedState(sums.means(server.tensors), {"holders": sorted(holders)})

    def models(
        self, server: FederatedState, private: FederatedState | None = None, down: Payload | None = None
    ) -> Mapping[str, Weights]:
        """Return the server's model, with lower layers W_L,1; with `private` also that client's last trained model."""
        clients = {"client": private.tensors} if private is not None else {}
        return {"server": server.tensors, **clients}

    def layout(self, spec: Spec) -> MessageLayout:
        """Declare the top layers; also the lower layers, down to clients that may lack them and up in round 0."""
        top = self._top(spec)
        shared, lower = _only(top, spec), {n: t for n, t in spec.items() if n not in top}
        both = ("all", "top")
        fields = dense_fields(shared, "down", self.wire_dtype, both)
        fields += dense_fields(lower, "down", self.wire_dtype, ("all",), "round 0, or first participation after it")
        fields += self._uploads.fields(shared, both)
        return MessageLayout(fields + self._uploads.fields(lower, ("all",), "round 0"))

    def _top(self, names: Iterable[str]) -> frozenset[str]:
        """Return the names of the top layers' tensors. Raises ConfigError if no name has a layer number."""
        layer_of = {name: _layer(name) for name in names}
        numbers = sorted({layer for layer in layer_of.values() if layer is not None})
        if not numbers:
            raise ConfigError(
                f'{next(iter(layer_of))}: the name has no layer number, unlike "h.3.attn.lora_A"; set '
                "adapter.targets to modules in numbered layers"
            )
        shared = {None, *numbers[-self.layers :]}
        return frozenset(name for name, layer in layer_of.items() if layer in shared)


def _layer(name: str) -> int | None:
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def _only(names: frozenset[str], tensors: Mapping[str, T]) -> dict[str, T]:
    return {name: tensor for name, tensor in tensors.items() if name in names}


def _holders(server: FederatedState) -> Sequence[str]:
    return server.scalars["holders"]  # type: ignore[return-value]


def _holds(server: FederatedState, client: str) -> bool:
    """Return whether `client` is in the sorted list, by bisection, because each round checks every site."""
    holders = _holders(server)
    at = bisect.bisect_left(holders, client)
    return at < len(holders) and holders[at] == client
