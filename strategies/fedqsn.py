"""FedQSN.

Xu et al.: FedQSN. 2025. The server hides its model from the clients that train it. It sends them a proxy: some columns
are missing, either in every round or in one round, and the rest is rounded to a few levels.

| paper | code | shape, unit |
|---|---|---|
| W_t | `server.tensors` | every tensor of the model, fp32 |
| M^s, p_1 | `_shown`, `server_rate` | one bit per column, drawn once; rate of zeros |
| M^c, p_2 | `_visible` (M^s o M^c), `client_rate` | one bit per column, drawn per client and round; rate of zeros |
| 1 / (1 - p) | `scale` | for both masks together, so that E[W~] = W |
| Q, w | `quantiser`, `bits` | one code per weight |
| Delta W_k | the upload with `update = "delta"` | the change that training makes to the proxy |
| D_k | `num_examples` | examples of client k |

    W~_k = Q(W_t o M^s o M^c_k / ((1 - p_1)(1 - p_2)))                   (Eq. 1 to 3, mask first; Q: Eq. 4, or `nf_sym`)
    W_{t+1} = W_t + sum_k |D_k| Delta W_k (1 - p_1)(1 - p_2) / sum_k |D_k|   over the k that saw the column (Eq. 5)
    W_{t+1} = sum_k |D_k| W_k (1 - p_1)(1 - p_2) / sum_k |D_k|               update = "replace" (Algorithm 1, line 11)
    restored = trained where M^s = 1, W_0 where M^s = 0         (the paper's "logical AND"): the server's own weights

A column is an output feature. Q acts on the matrices of attention and MLP layers, in blocks over the visible columns.

A client shares: the change that training made to the received proxy. A client keeps: nothing; the server keeps its
model and sends only a proxy, with some columns missing and the rest rounded to a few levels.

The client learns: its proxies, and so which columns are missing; over the rounds it sees all columns that the server
does not mask. Under secure aggregation it gets the seeds of the round's masks, and so the positions of all missing
columns, though not their weights.
The server learns: each client's update of the visible columns, in full.

Formal guarantees: none (epsilon is infinite). By construction:
1. No message to any client in any round depends on a server-masked column.
2. A server-masked column of W never changes. A column that no client saw in a round does not change in that round.

| case | result |
|---|---|
| p_1 = p_2 = 0, no quantizer | FedAvg, bit for bit: W~ is W, both updates are the same, and clients send weights |
| a masked column in local training | it stays zero (no step, no weight decay) and is not in the upload |
| output head | a tied head is the same tensor as the embedding, so it has its mask; an untied head gets the same mask |
| an upload that names columns the client did not receive | server-masked columns are never counted |
| no upload | nothing changes |
| secure aggregation | one M^c for all sites, drawn in each round. All sites get the same message, which the plan
  names, and send the same columns; a site refuses a table with several masks |
| a tensor of more than two axes without a known location (fused experts) | ConfigError: it would be sent unprotected |

Differences from the paper: the paper's code sends all weights and masks activations on the client; here the weights,
with their biases, are masked before they are sent. `mask_targets = "proj"` masks the layers whose activations the
paper's code masks. Block scales are computed over visible columns. The server divides by `scale` before it takes the
mean. Clients see different columns, so each column has its own sum of |D_k|. The architecture need not be secret. If
W_0 is a public checkpoint, it is not hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast, final

import torch
from torch import Tensor

from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.contract.contributions import AggregateSums, ClientContributions, Contribution
from fedveil.contract.entry_table import EntryTable
from fedveil.contract.layout import Direction, MessageLayout, Payload
from fedveil.contract.method import FederatedState, Method, RoundContext, Sends
from fedveil.contract.param_spec import ParamLocation, ParamSpec, Spec, Weights
from fedveil.contract.trainer import Trainer
from fedveil.errors import ConfigError, WireError
from fedveil.ops.masked_weights import MaskedWeightsCodec
from fedveil.ops.quantization import BlockQuantizer
from fedveil.rng import RandomStream
from fedveil.sanitize import sanitize
from fedveil.wire.payloads import WireDtype, as_spec, lazy_spec

__all__ = ["FedQSN"]

_VISIBLE = "visible."  # prefix on the wire of a layer's column mask, one bit per column


@final
@dataclass(frozen=True)
class FedQSN(Method):
    """The server sends a proxy with columns missing and weights rounded to a few levels.

    Attributes:
        server_rate: p_1, below 1: fraction of columns that no client ever gets.
        client_rate: p_2, below 1: fraction of columns that a client does not get in a given round.
        mask_targets: layers with masked columns: the last layer of each attention and MLP block ("proj"), or "all"
            layers.
        exact: mask exactly p_2 of all columns, chosen among the columns that the server shows, instead of one random
            draw per column.
        embeddings: how token embeddings and head are sent: "masked", masked and "quantised", or "open".
        quantiser: the quantizer's code table; "none" sends unquantized weights.
        bits: w, bits per code.
        block: number of weights that share a scale.
        update: add the change from training ("delta"), or "replace" the weights with the trained weights.
        upload_bits: bits per `nf_sym` code in uploads of the quantized matrices; 0 disables upload quantization.
        adapter: all weights; no other adapter has columns to mask.
        wire_dtype: dtype of unquantized tensors on the wire in both directions; sums are always fp32.
    """

    server_rate: float = 0.1
    client_rate: float = 0.1
    mask_targets: Literal["proj", "all"] = "proj"
    exact: bool = False
    embeddings: Literal["masked", "quantised", "open"] = "masked"
    quantiser: Literal["nf_sym", "absmax", "none"] = "nf_sym"
    bits: int = 2
    block: int = 256
    update: Literal["delta", "replace"] = "delta"
    upload_bits: int = 0
    adapter: AllWeightsAdapter = field(default_factory=AllWeightsAdapter)
    wire_dtype: WireDtype = "float32"

    @property
    def upload_kind(self) -> Sends:
        """Return "changes", because clients send a change of the proxy."""
        return "changes"

    @property
    def stale_upload_conflict(self) -> str:
        """Return why late uploads are refused, if clients send trained weights: these belong to the proxy."""
        return "" if self._sends_change else "sends trained weights of a proxy instead of their change"

    @property
    def site_score_conflict(self) -> str:
        """Return why a site cannot score the server's model; "" if the proxy is that model."""
        return "" if self._is_open else "sends a masked or quantized proxy, so a site does not have the server's model"

    @property
    def aggregate_divisor(self) -> float:
        """Return `scale`, for the masked columns."""
        return self.scale

    @property
    def has_masked_terms(self) -> bool:
        """Return True: each client sees its own set of columns."""
        return True

    @property
    def has_partial_uploads(self) -> bool:
        """Return whether clients see different columns; the server-masked columns are the same for all clients."""
        return self.client_rate > 0.0

    @property
    def plans_entries(self) -> bool:
        """Return whether columns are masked; the table then has the seeds that let every site compute all masks."""
        return self.server_rate > 0.0 or self.client_rate > 0.0

    @property
    def on_device(self) -> bool:
        """Return True, because proxies and their changes are as large as the model."""
        return True

    def __post_init__(self) -> None:
        for name, rate in (("server_rate", self.server_rate), ("client_rate", self.client_rate)):
            if not 0.0 <= rate < 1.0:
                raise ConfigError(
                    f"{name}: expected a probability from 0 to below 1 (1 hides the whole model), found {rate}"
                )
        if self.quantiser != "none":
            BlockQuantizer(self.quantiser, self.bits, self.block)
        if self.upload_bits:
            BlockQuantizer("nf_sym", self.upload_bits, self.block)

    def _veil(self, spec: Spec, direction: Direction) -> MaskedWeightsCodec:
        places = {n: t.place for n, t in spec.items() if t.place is not None}
        masked: dict[str, ParamLocation] = {}
        if self.server_rate or self.client_rate:
            masked = {
                n: p for n, p in places.items() if p.part == "linear" and (p.closes or self.mask_targets == "all")
            }
            masked |= {n: p for n, p in places.items() if p.part == "embedding" and self.embeddings != "open"}
        coder = None
        if direction == "down" and self.quantiser != "none":
            coder = BlockQuantizer(self.quantiser, self.bits, self.block)
        if direction == "up" and self.upload_bits:
            coder = BlockQuantizer("nf_sym", self.upload_bits, self.block)
        coded = {n for n, p in places.items() if p.part == "linear" or self.embeddings == "quantised"}
        coders = {n: coder for n in spec if coder and n in coded and len(spec[n].shape) == 2}
        return MaskedWeightsCodec(spec, masked, coders, getattr(torch, self.wire_dtype))

    @property
    def _is_open(self) -> bool:
        return self.server_rate == self.client_rate == 0.0 and self.quantiser == "none" and not self.upload_bits

    @property
    def _sends_change(self) -> bool:
        return self.update == "delta" and not self._is_open

    @property
    def scale(self) -> float:
        """Return the factor applied to every visible column; it is public, like p_1 and p_2."""
        return 1.0 / ((1.0 - self.server_rate) * (1.0 - self.client_rate))

    @property
    def sends_same_broadcast(self) -> bool:
        """Return True: under secure aggregation a round has one M^c for all sites."""
        return True

    def init(self, spec: Spec, weights: Weights, rng: RandomStream) -> FederatedState:
        """Return W_0 with its tensors' locations. Raises ConfigError if linear layers are missing or fused."""
        if not any(t.place and t.place.part == "linear" for t in spec.values()):
            raise ConfigError(
                f"task.model: none of the {len(spec)} tensors belongs to a linear layer (nn.Linear, Conv1D), so "
                "FedQSN would hide nothing; use a language model with such layers"
            )
        if fused := sorted(n for n, t in spec.items() if t.place is None and len(t.shape) > 2):
            raise ConfigError(
                f"task.model: {fused[0]} of shape {spec[fused[0]].shape} is a fused layer, which would be sent "
                "unprotected; use a base without such layers"
            )
        return FederatedState(dict(weights), {"places": {n: asdict(t.place) for n, t in spec.items() if t.place}})

    def plan_entries(self, spec: Spec, cohort: Sequence[str], fewest: int, ctx: RoundContext) -> EntryTable:
        """Return the seeds of M^s and of the one M^c that all sites share, drawn for the round."""
        return EntryTable(
            seeds=dict.fromkeys(cohort, ctx.rng("client mask").key.hex()),
            common_seed=_server_mask_stream(ctx.secret).key.hex(),
            fewest=fewest,
        )

    def _planned(self, veil: MaskedWeightsCodec, table: EntryTable, site: str) -> dict[str, Tensor]:
        """Return the round's M^s o M^c. Raises WireError for a table without a seed for this site.

        All sites have one seed, which `EntryTable.require_cohort` has checked: so every site sends the same entries and
        gets the same message, which the plan names. The codes of a column depend on the other columns in its blocks, so
        sites with different masks could not compare them.
        """
        if site not in table.seeds:
            raise WireError("entries: the table has no seed from which this site could compute its columns")
        stream = RandomStream(bytes.fromhex(table.seeds[site]))
        shown = self._shown_of(veil, RandomStream(bytes.fromhex(table.common_seed)))
        return {layer: self._visible(mask, stream) for layer, mask in shown.items()}

    def _shown(self, veil: MaskedWeightsCodec, secret: bytes) -> dict[str, Tensor]:
        """Return M^s by layer; it is the same for every client and round."""
        return self._shown_of(veil, _server_mask_stream(secret))

    def _shown_of(self, veil: MaskedWeightsCodec, stream: RandomStream) -> dict[str, Tensor]:
        return {layer: stream.bernoulli(1.0 - self.server_rate, (n,)) for layer, n in veil.columns.items()}

    def _visible(self, shown: Tensor, stream: RandomStream) -> Tensor:
        """Return M^s o M^c of one layer."""
        if not self.exact:
            return shown & stream.bernoulli(1.0 - self.client_rate, tuple(shown.shape))
        left = shown.nonzero().squeeze(1)
        hidden = stream.choice(len(left), min(len(left), int(self.client_rate * len(shown))))
        return shown.index_fill(0, left[hidden], False)

    def broadcast(self, server: FederatedState, ctx: RoundContext) -> Payload:
        """Return W~ (Eq. 1 to 3), this client's proxy: masked, scaled, then quantized."""
        veil, stream = self._veil(_spec(server), "down"), ctx.rng("client mask")
        if ctx.entries is None:
            visible = {layer: self._visible(m, stream) for layer, m in self._shown(veil, ctx.secret).items()}
        else:
            visible = self._planned(veil, ctx.entries, ctx.site)
        return Payload(veil.close(server.tensors, visible, self.scale, ctx.device))

    def client(
        self, private: FederatedState | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[FederatedState | None, Payload]:
        """Train the proxy with missing columns held at zero, send the visible columns, and keep no state."""
        veil = self._veil(trainer.spec, "down")
        if ctx.entries is not None:
            for layer, planned in self._planned(veil, ctx.entries, ctx.site).items():
                if not torch.equal(planned, veil.visible(down)[layer]):
                    raise WireError(
                        f"{_VISIBLE}{sanitize(layer, 80)}: the columns differ from those that the table of entries "
                        "gives this site"
                    )
        visible, received = veil.visible(down), lazy_spec(veil.opened(down, ctx.device), trainer.spec)
        frozen = {n: ~veil.seen(n, visible) for n in veil.masked}
        trained = dict((trainer.train(received, frozen) if frozen else trainer.train(received)).weights)
        # Each tensor is freed as soon as its change is known, so model, proxy and change are never all in memory.
        sent = ((n, trained.pop(n) - received[n]) for n in list(trained)) if self._sends_change else trained
        return None, Payload(self._veil(trainer.spec, "up").close(sent, visible))

    def check(self, payload: Payload, spec: Spec) -> None:
        """Raise WireError unless every tensor has as many columns as its mask has ones."""
        self._veil(spec, "up").check(payload)

    def contributions(self, payload: Payload, num_examples: int, spec: Spec, ctx: RoundContext) -> ClientContributions:
        """Return the visible columns times n_k, divided by `scale`, and n_k for these columns."""
        return ClientContributions(self._terms(payload, float(num_examples), self._veil(spec, "up")))

    def _terms(self, payload: Payload, weight: float, veil: MaskedWeightsCodec) -> Iterator[Contribution]:
        visible = veil.visible(payload)
        for name, value in veil.open(payload):
            if name in veil.masked:
                seen = veil.seen(name, visible).expand(value.shape)
                yield Contribution(name, value.to(torch.float32).div_(self.scale), weight, seen)  # a new tensor
            else:
                yield Contribution(name, value, weight)

    def aggregate_shapes(self, spec: Spec, round_: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of each tensor's weights; layers with masked columns have one weight per column."""
        veil = self._veil(spec, "up")
        return {n: veil.weights_shape(n) if n in veil.masked else () for n in spec}

    def server_update(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> FederatedState:
        """Apply Eq. 5 (or Algorithm 1, line 11) column by column, ignoring all uploads of server-masked columns."""
        veil, new = self._veil(_spec(server), "up"), dict(server.tensors)
        visible_masks = self._shown(veil, ctx.secret)
        for name, old in server.tensors.items():
            if name in sums:
                moved = sums.moved(name)
                moved = moved & veil.seen(name, visible_masks) if name in veil.masked else moved
                aggregate = sums.take(name)  # becomes the new tensor, so that no third copy is needed
                aggregate = (aggregate.add_(old) if self._sends_change else aggregate).to(old.dtype)
                new[name] = torch.where(moved, aggregate, old, out=aggregate)
        return FederatedState(new, server.scalars)

    def models(
        self, server: FederatedState, private: FederatedState | None = None, down: Payload | None = None
    ) -> Mapping[str, Weights]:
        """Return the server's (restored) model; with `down` also the proxy that a client received."""
        if down is None:
            return {"server": server.tensors}
        spec = _spec(server)
        return {"server": server.tensors, "proxy": as_spec(dict(self._veil(spec, "down").open(down)), spec)}

    def layout(self, spec: Spec) -> MessageLayout:
        """Declare, in both directions: one bit per column, the visible columns, and all other tensors in full."""
        return MessageLayout(self._veil(spec, "down").fields("down") + self._veil(spec, "up").fields("up"))


def _server_mask_stream(secret: bytes) -> RandomStream:
    return RandomStream.derive(secret, 0, "", "server mask")


def _spec(server: FederatedState) -> Spec:
    places = cast("Mapping[str, Mapping[str, Any]]", server.scalars["places"])
    return {
        n: ParamSpec(tuple(w.shape), w.dtype, ParamLocation(**places[n]) if n in places else None)
        for n, w in server.tensors.items()
    }
