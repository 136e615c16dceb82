"""FedLPP.

The low-rank fine-tuning baseline in the FedQSN paper (Xu et al. 2025). The server keeps its LoRA factors in full
precision and sends them quantized block by block; the clients train the quantized proxy.

| symbol | code | shape, unit |
|---|---|---|
| A_t, B_t | `server.tensors` | LoRA factors, fp32 |
| Q, b | `quantiser`, `bits` | one code per weight |
| Delta_k | the upload | the change that training makes to the proxy |
| n_k | `num_examples` | examples of client k |
| eta | `server_rate` | the server's step size |

    proxy   = Q(A_t), Q(B_t)                                                       (the same for every client)
    A_{t+1} = A_t + eta sum_k n_k Delta_k / sum_k n_k, and the same for B          update = "delta"
    A_{t+1} = Q(A_t) + eta sum_k n_k Delta_k / sum_k n_k, and the same for B       update = "replace"

A client shares: the change that training made to the received LoRA factors. A client keeps: nothing; the server keeps
the exact factors, and sends them rounded to a few levels.

The client learns: the quantized factors of every round it takes part in. It also has the unencrypted frozen base.
The server learns: each client's update, in full.

Formal guarantees: none (epsilon is infinite). Only the rounding error of the factors is hidden, not the base.

| case | result |
|---|---|
| B = 0 in round 0 | its blocks get scale 0 and decode to zeros |
| no upload | the factors stay unchanged, bit for bit, with either update |
| bits = 1, table "nf" | levels -1, 0, 1 |

Differences from the paper: the mean is weighted by n_k; update = "replace" is the paper's rule without interpolation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal, final

import torch

from fedveil.adapters.lora import LoraAdapter
from fedveil.contract.contributions import AggregateSums, ClientContributions, weighted_contributions
from fedveil.contract.layout import MessageLayout, Payload
from fedveil.contract.method import FederatedState, Method, RoundContext, Sends
from fedveil.contract.param_spec import Spec, Weights, param_specs_of
from fedveil.contract.trainer import Trainer
from fedveil.errors import ConfigError
from fedveil.ops.masked_weights import MaskedWeightsCodec
from fedveil.ops.quantization import BlockQuantizer
from fedveil.rng import RandomStream
from fedveil.wire.payloads import WireDtype, as_spec, cast_to, dense_fields, payload_tensors

__all__ = ["FedLPP"]


@final
@dataclass(frozen=True)
class FedLPP(Method):
    """The server sends LoRA factors rounded to a few levels.

    Attributes:
        quantiser: the quantizer's code table.
        bits: b, bits per code.
        block: number of weights that share a scale.
        update: whether the server adds the clients' mean change to its own factors ("delta") or to the proxy
            ("replace").
        server_rate: eta, the server's step size.
        adapter: LoRA.
        wire_dtype: dtype of the uploads; sums are always fp32.
    """

    quantiser: Literal["nf", "nf_sym", "absmax"] = "nf"
    bits: int = 2
    block: int = 256
    update: Literal["delta", "replace"] = "delta"
    server_rate: float = 1.0
    adapter: LoraAdapter = field(default_factory=LoraAdapter)
    wire_dtype: WireDtype = "float32"

    @property
    def upload_kind(self) -> Sends:
        """Return "changes", because clients send a change of the proxy."""
        return "changes"

    @property
    def stale_upload_conflict(self) -> str:
        """Return "": late uploads are allowed, because an upload is a change."""
        return ""

    @property
    def site_score_conflict(self) -> str:
        """Return why a site cannot score the server's model: it has only Q(A_t) and Q(B_t)."""
        return "sends a quantized proxy, so a site does not have the server's model"

    def __post_init__(self) -> None:
        BlockQuantizer(self.quantiser, self.bits, self.block)
        if not (self.server_rate > 0 and isfinite(self.server_rate)):
            raise ConfigError(f"server_rate: expected a finite number above 0, found {self.server_rate}")

    def _veil(self, spec: Spec) -> MaskedWeightsCodec:
        return MaskedWeightsCodec(spec, {}, dict.fromkeys(spec, BlockQuantizer(self.quantiser, self.bits, self.block)))

    def init(self, spec: Spec, weights: Weights, rng: RandomStream) -> FederatedState:
        """Return (A_0, B_0)."""
        return FederatedState(dict(weights))

    def _proxy(self, server: FederatedState) -> Payload:
        return Payload(self._veil(param_specs_of(server.tensors)).close(server.tensors, {}))

    def broadcast(self, server: FederatedState, ctx: RoundContext) -> Payload:
        """Return Q(A_t), Q(B_t)."""
        return self._proxy(server)

    def client(
        self, private: FederatedState | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[FederatedState | None, Payload]:
        """Return Delta_k, the change that training makes to the proxy, and keep no state."""
        received = as_spec(dict(self._veil(trainer.spec).open(down)), trainer.spec)
        trained = trainer.train(received).weights
        return None, Payload(cast_to({n: w - received[n] for n, w in trained.items()}, self.wire_dtype))

    def contributions(self, payload: Payload, num_examples: int, spec: Spec, ctx: RoundContext) -> ClientContributions:
        """Return n_k Delta_k, and n_k itself."""
        return weighted_contributions(payload_tensors(payload), num_examples)

    def server_update(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> FederatedState:
        """Add the weighted mean change to the full factors or to the proxy."""
        change = sums.means({n: torch.zeros(w.shape) for n, w in server.tensors.items()})
        spec = param_specs_of(server.tensors)
        base = server.tensors if self.update == "delta" else dict(self._veil(spec).open(self._proxy(server)))
        return FederatedState(
            as_spec({n: w + self.server_rate * change[n] for n, w in base.items()}, spec), server.scalars
        )

    def models(
        self, server: FederatedState, private: FederatedState | None = None, down: Payload | None = None
    ) -> Mapping[str, Weights]:
        """Return the server's model; with `down` also the proxy that a client received."""
        if down is None:
            return {"server": server.tensors}
        spec = param_specs_of(server.tensors)
        return {"server": server.tensors, "proxy": as_spec(dict(self._veil(spec).open(down)), spec)}

    def layout(self, spec: Spec) -> MessageLayout:
        """Declare codes for the broadcast, and the dense change for the upload."""
        return MessageLayout(self._veil(spec).fields("down") + dense_fields(spec, "up", self.wire_dtype))
