"""FedSP.

Dong, Xie, Ding, Shen, Chen, Li: Tunable Soft Prompts are Messengers in Federated Learning. EMNLP Findings 2023. It is a
baseline in the FedQSN paper. The server sends only a few layers of its model; both sides exchange trained prefixes.

| symbol | code | shape, unit |
|---|---|---|
| M | the server's own model, `server_adapter` | frozen; never in a state, never on the wire |
| m | all tensors except "prefix" | `cells` layers of M, repeated to its depth, with embeddings, norms and head |
| P | "prefix" | layers x 2 x heads x length x width: keys and values before every layer |
| n_k | `num_examples` | examples of client k |

    m_0 <- argmin mean_l (h_l(m) - h_l(M))^2 on the server's own examples, before round 0         `before_round_0`
    m_k <- local training of m_k with P fixed, then P_k <- local training of P with m_k fixed     `alternate`
    P <- sum_k n_k P_k / sum_k n_k;  the same for m with proxy = "shared"
    deployed: M with P

A client shares: a deep prefix, trained on a proxy that repeats a few layers. A client keeps: the proxy; the server
keeps its model's other layers.

The client learns: P of every round it takes part in, and once the distilled m_0: `cells` layers, embeddings, norms and
head. With proxy = "shared" it learns the mean of m in every round.
The server learns: each client's P_k; with proxy = "shared" its m_k too.

Formal guarantees: none (epsilon is infinite). By construction, the server's state contains no tensor of M's other
layers, so none is sent; m_0 depends on them only through distillation.

| case | result |
|---|---|
| a newcomer, or a site that lost its state | gets m_0 and P first, then only P; with proxy = "shared" always m and P |
| proxy = "local": the site gets only P, and has no private state | StateError |
| no upload | the state stays unchanged, bit for bit |
| distil_steps = 0 | m_0 is the first `cells` layers of M, without distillation |
| alternate = false | m_k and P_k are trained together |

Differences from the paper: P starts as the keys and values of random tokens (normally distributed initial values would
increase M's loss by one nat); the server does not train P; each round takes one mean over its clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal, final

import torch

from fedveil.adapters.prefix import PrefixAdapter
from fedveil.contract.contributions import AggregateSums, ClientContributions, weighted_contributions
from fedveil.contract.layout import MessageLayout, Payload
from fedveil.contract.method import Distiller, FederatedState, Method, RoundContext
from fedveil.contract.param_spec import Spec, Weights
from fedveil.contract.trainer import Trainer
from fedveil.errors import ConfigError, StateError
from fedveil.ops.upload_quantization import UploadQuantization
from fedveil.rng import RandomStream
from fedveil.wire.payloads import WireDtype, as_spec, cast_to, dense_fields, payload_tensors

__all__ = ["PREFIX", "FedSP"]

PREFIX = "prefix"
_WHOLE, _PREFIX = "proxy", "prefix"  # variants of a broadcast


@final
@dataclass(frozen=True)
class FedSP(Method):
    """Server and clients exchange prefixes, which the clients train on a proxy of the server's model.

    Attributes:
        proxy: "local" keeps the proxy's weights with each client; "shared" averages them like the prefix.
        alternate: train the proxy with the prefix fixed, then the prefix with the proxy fixed; false trains
            both together.
        distil_steps, distil_rate: number and learning rate of the server's AdamW distillation steps before
            round 0.
        adapter: a prefix with cells.
        wire_dtype: dtype on the wire in both directions; sums are always fp32.
        upload_bits: bits per uploaded weight, 2 to 8, with one scale per 256 weights; 0 disables quantization.
    """

    proxy: Literal["local", "shared"] = "local"
    alternate: bool = True
    distil_steps: int = 5000
    distil_rate: float = 5e-4
    adapter: PrefixAdapter = field(default_factory=lambda: PrefixAdapter(cells=1))
    wire_dtype: WireDtype = "float32"
    upload_bits: int = 0

    def __post_init__(self) -> None:
        if self.adapter.cells < 1:
            raise ConfigError("adapter.cells: the proxy must repeat at least 1 layer, found 0")
        if self.distil_steps < 0:
            raise ConfigError(f"distil_steps: expected at least 0, found {self.distil_steps}")
        if not (self.distil_rate > 0 and isfinite(self.distil_rate)):
            raise ConfigError(f"distil_rate: expected a finite number above 0, found {self.distil_rate}")
        self._uploads  # noqa: B018  # this access checks upload_bits

    @property
    def trainings(self) -> int:
        """Return the number of training passes in a client round."""
        return 2 if self.alternate else 1

    @property
    def _uploads(self) -> UploadQuantization:
        return UploadQuantization(self.wire_dtype, self.upload_bits)

    @property
    def server_adapter(self) -> PrefixAdapter:
        """Return the adapter for the server's model, which has all layers."""
        return PrefixAdapter(self.adapter.length)

    @property
    def needs_server_rows(self) -> bool:
        """Return whether there are distillation steps, which need the server's own examples."""
        return self.distil_steps > 0

    def before_round_0(self, weights: Weights, server: Distiller) -> Weights:
        """Return m_0, distilled from M."""
        distilled_weights = server.distil(weights, self.distil_steps, self.distil_rate)
        return {n: weights[n] if n == PREFIX else w for n, w in distilled_weights.items()}

    @property
    def sends_same_broadcast(self) -> bool:
        """Return whether every site gets the proxy, not only newcomers."""
        return self.proxy == "shared"

    @property
    def stale_upload_conflict(self) -> str:
        """Return "": late uploads are allowed, because an upload is the received tensors, moved by training."""
        return ""

    @property
    def site_score_conflict(self) -> str:
        """Return why a site cannot score the server's model: it has only the proxy."""
        return "has the sites train a proxy, so a site does not have the server's model"

    @property
    def keeps_private_state(self) -> bool:
        """Return whether the proxy stays at the site."""
        return self.proxy != "shared"

    def init(self, spec: Spec, weights: Weights, rng: RandomStream) -> FederatedState:
        """Return the initial state, (P, m_0)."""
        if PREFIX not in spec or len(spec) < 2:
            raise ConfigError(f'adapter: expected "{PREFIX}" and the tensors of a proxy, found {sorted(spec)}')
        return FederatedState(dict(weights))

    def broadcast(self, server: FederatedState, ctx: RoundContext) -> Payload:
        """Return P; for a newcomer, or if the proxy is shared, also m."""
        whole = ctx.is_new or self.proxy == "shared"
        sent = server.tensors if whole else {PREFIX: server.tensors[PREFIX]}
        return Payload(cast_to(sent, self.wire_dtype), self._variant(whole))

    def _variant(self, whole: bool) -> str:
        return "" if self.proxy == "shared" else _WHOLE if whole else _PREFIX

    def client(
        self, private: FederatedState | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[FederatedState | None, Payload]:
        """Train m_k and P; keep m_k at the site unless it is shared."""
        received = as_spec(payload_tensors(down), trainer.spec)
        if down.variant == _PREFIX:
            if private is None:
                raise StateError(
                    "private state: the proxy of an earlier participation is missing, and the server sent only "
                    "the prefix; it will send the proxy at the next participation"
                )
            received = {**private.tensors, **received}
        trained: Weights = received
        for still in ([PREFIX], [n for n in received if n != PREFIX]) if self.alternate else ([],):
            frozen = {n: torch.ones((1,) * received[n].ndim, dtype=torch.bool) for n in still}
            trained = trainer.train(trained, frozen).weights
        if self.proxy == "shared":
            return None, Payload(self._uploads.sent(trained))
        return FederatedState(dict(trained)), Payload(self._uploads.sent({PREFIX: trained[PREFIX]}))

    def contributions(self, payload: Payload, num_examples: int, spec: Spec, ctx: RoundContext) -> ClientContributions:
        """Return n_k times the sent tensors, and n_k itself."""
        return weighted_contributions(self._uploads.opened(payload), num_examples)

    def server_update(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> FederatedState:
        """Return the weighted mean of the sent tensors."""
        return FederatedState(sums.means(server.tensors), server.scalars)

    def models(
        self, server: FederatedState, private: FederatedState | None = None, down: Payload | None = None
    ) -> Mapping[str, Weights]:
        """Return the views "server" (P for the server's model M, and the proxy), "client" and "proxy" (received)."""
        clients = {"client": private.tensors} if private is not None else {}
        proxies = {"proxy": {**server.tensors, **payload_tensors(down)}} if down is not None else {}
        return {"server": server.tensors, **clients, **proxies}

    def layout(self, spec: Spec) -> MessageLayout:
        """Declare the prefix in both directions; the proxy down to newcomers, or in both directions if shared."""
        prefix = {PREFIX: spec[PREFIX]}
        others = {n: t for n, t in spec.items() if n != PREFIX}
        if self.proxy == "shared":
            return MessageLayout(dense_fields(spec, "down", self.wire_dtype) + self._uploads.fields(spec))
        fields = dense_fields(prefix, "down", self.wire_dtype, (_WHOLE, _PREFIX))
        fields += dense_fields(others, "down", self.wire_dtype, (_WHOLE,), "to a newcomer")
        return MessageLayout(fields + self._uploads.fields(prefix))
