"""Random binary weights for gradients.

Sawada, Imaizumi, Kiya: random binary weights for privacy-preserving federated learning of the Vision Transformer. Each
client multiplies its gradient entry by entry with a random binary mask and sends the product.

| paper | code | shape, unit |
|---|---|---|
| w | the weights in `server.tensors` | every tensor of the adapter |
| R | `rate` | probability that an entry of the mask is zero; a map gives each tensor its own |
| B^n | `masks.expanded`, or the bits received | one bit an entry of the gradient |
| g^n | `fedsgd.gradient` | gradient of client n: one batch, or w minus its locally trained weights |
| c | sum of the masks, see `fedveil.contract.sums` | clients (or examples) behind an entry |
| eta | `learning_rate` | step of the server |

    g'^n = B^n o g^n,  B^n ~ Bernoulli(1 - R) for every entry                          (Eq. 10, on the client)
    w <- w - eta (sum_n g'^n) / (sum_n B^n)  where sum_n B^n > 0; unchanged elsewhere   (Eq. 12, on the server)
    updates of one entry in m epochs by N clients ~ Binomial(m, 1 - R^N); locked: m with probability 1 - R^N, else 0
                                                (Eq. 13, corrected: it is printed with R^{n(1-f)} for R^{n(m-f)})

A client shares: the entries of its gradient that a random mask lets through; masks are drawn for each batch or epoch,
or once. With it stays: the other entries.

The client learns: the weights of every round it takes part in.
The server learns: each client's surviving gradient entries, bit for bit, and which they are. Masks are public: explicit
bits, a key that the server expands, or visible zeros. Several masks of one client together leave out almost no entry.

Formal guarantees: none (epsilon is infinite). A mask leaves entries out; it hides nothing of the others.

| case | result |
|---|---|
| an entry that every client masked (c = 0) | unchanged bit for bit: no step, no decay, no moments, no step count |
| no upload | everything stays |
| R = 0 for a tensor | it is sent whole, without a mask, in every wire form: equal to FedSGD bit for bit |
| R = 1 for a tensor | it is never sent and never moves; where all tensors have R = 1, uploads have no fields |
| a true zero in the gradient | explicit, seeded: counted in c, as in Eq. 12. implicit: the server cannot tell it from a
  masked entry and leaves it out of c, which pulls the mean away from zero; the same holds for what half precision
  rounds to zero |
| wire = "seeded", several R | 32 bytes for each distinct R strictly between 0 and 1 |
| a mask of a wrong shape | the layout refuses it |
| more or fewer values than the mask has ones | `check` refuses the upload |
| mask_period = "batch" with exchange = "epoch" | one mask a participation, because single batches are not exchanged |
| mask_period = "never", and the site lost its private state | the site draws another mask and keeps that one |
| buffers | none: adapters have parameters only |

Differences from the paper: `exchange = "epoch"` sends a pseudo-gradient after local epochs, which a deployment can
afford; the server's Adam counts steps by entry; `weighted` puts n_k into both sums of Eq. 12 (the paper has no
weights); R may differ by tensor. With `exchange = "batch"` every exchange draws its rows anew, so that an epoch of
`epoch_batches` exchanges is one of masks alone: of 300 rows 19 batches of 16 see about 190, where the paper's see all.
The paper sends zeros in place (`implicit`); here the default is the explicit form.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, cast, final

import torch
from torch import Tensor

from fedveil.adapters.all_weights import AllWeights
from fedveil.adapters.kinds import AnyAdapter
from fedveil.algebra import fedsgd, masks
from fedveil.algebra.fedsgd import Exchanged, Optimiser
from fedveil.contract.layout import Field, Layout, Payload
from fedveil.contract.method import Method, RoundContext, Sends, State
from fedveil.contract.spec import Spec, Weights
from fedveil.contract.sums import Sums, Term, Terms
from fedveil.contract.trainer import Trainer
from fedveil.errors import ConfigError
from fedveil.rng import Stream
from fedveil.wire.bits import Bits
from fedveil.wire.dense import Dense
from fedveil.wire.payloads import WireDtype, cast_to, dense_fields, tensors_of
from fedveil.wire.seeded import KEY_BYTES, Seeded

_MASK = "mask."  # a tensor's bits on the wire
_KEY = "key."  # on the wire, the key of all masks with one `keep`


@final
@dataclass(frozen=True)
class RandomBinary(Method):
    """Clients send gradients with random entries left out.

    Attributes:
        rate: R, from 0 to 1: one for all tensors, or a map from regular expressions over tensor names (searched; the
            first that matches wins; 0 where none does).
        mask_period: when a client draws a new mask: every "batch", every "epoch", or "never" (locked).
        epoch_batches: exchanges that make an epoch, for mask_period = "epoch" with exchange = "batch".
        exchange: what a client sends: the gradient of one "batch", or the pseudo-gradient of local epochs ("epoch").
        wire: "explicit" (surviving values, bits), "implicit" (zeros in place), "seeded" (surviving values, a key).
        optimiser: the server's.
        learning_rate: eta; None: 1 with exchange = "epoch" and SGD, otherwise 1e-4.
        weighted: weight every client with its number of examples.
        adapter: what is trained.
        wire_dtype: dtype on the wire, both ways; sums are fp32 whatever it is.
    """

    version: ClassVar[int] = 2  # 1 drew its masks from AES
    rate: float | Mapping[str, float] = 0.5
    mask_period: Literal["batch", "epoch", "never"] = "epoch"
    epoch_batches: int = 1
    exchange: Exchanged = "batch"
    wire: Literal["explicit", "implicit", "seeded"] = "explicit"
    optimiser: Optimiser = "sgd"
    learning_rate: float | None = None
    weighted: bool = False
    adapter: AnyAdapter = field(default_factory=AllWeights)
    wire_dtype: WireDtype = "float32"

    @property
    def sends(self) -> Sends:
        """Gradients, or pseudo-gradients of an epoch, under a mask."""
        return "gradients"

    @property
    def optimises(self) -> bool:
        """In local epochs; for a single batch there is nothing but its gradient."""
        return self.exchange == "epoch"

    @property
    def on_device(self) -> bool:
        """With all weights, gradient and masks are as large as the model."""
        return True

    @property
    def masked(self) -> bool:
        """Also at R = 0, where every entry is sent."""
        return True

    def __post_init__(self) -> None:
        masks.check_rate("rate", self.rate)
        fedsgd.check_learning_rate(self.learning_rate)
        fedsgd.check_wire_dtype(self.wire_dtype)
        if self.epoch_batches < 1:
            raise ConfigError(f"epoch_batches: expected an integer of at least 1, found {self.epoch_batches}")
        if self.epoch_batches > 1 and (self.exchange, self.mask_period) != ("batch", "epoch"):
            raise ConfigError(
                'epoch_batches: expected 1 unless exchange = "batch" and mask_period = "epoch", '
                f"found {self.epoch_batches}"
            )

    def init(self, spec: Spec, weights: Weights, rng: Stream) -> State:
        """w_0, and zero moments for Adam."""
        return fedsgd.start(weights, self.optimiser)

    def broadcast(self, server: State, ctx: RoundContext) -> Payload:
        """w, the same for every client."""
        return Payload(cast_to(fedsgd.weights_of(server), self.wire_dtype))

    def client(
        self, private: State | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[State | None, Payload]:
        """B o g (Eq. 10)."""
        keep = masks.keeps(self.rate, trainer.spec)
        keys, private = self._keys(private, keep, ctx)
        found = cast_to(fedsgd.gradient(trainer, tensors_of(down), self.exchange, ctx.device), self.wire_dtype)
        shapes = {n: t.shape for n, t in trainer.spec.items()}
        sent: dict[str, Tensor | bytes] = {n: found[n] for n, k in keep.items() if k == 1.0}
        for name, mask in masks.expanded(keys, keep, shapes, ctx.device):
            if self.wire == "implicit":
                sent[name] = torch.where(mask, found[name], 0.0)
                continue
            sent[name] = masks.pack(found[name], mask)
            if self.wire == "explicit":
                sent[_MASK + name] = mask
        if self.wire == "seeded":
            sent |= {_key_name(k): key for k, key in keys.items()}
        return private, Payload(sent)

    def _keys(
        self, private: State | None, keep: Mapping[str, float], ctx: RoundContext
    ) -> tuple[dict[float, bytes], State | None]:
        """The keys of this participation's masks, and the private state that keeps them for the next participations."""
        if self.mask_period == "batch" or (self.mask_period == "epoch" and self.epoch_batches == 1):
            return masks.draw_keys(ctx.rng("mask"), keep), None
        used = cast(int, private.scalars["used"]) if private else 0
        if private and (self.mask_period == "never" or used < self.epoch_batches):
            kept = cast("Mapping[str, str]", private.scalars["keys"])
            keys = {float(k): bytes.fromhex(key) for k, key in kept.items()}
        else:
            keys, used = masks.draw_keys(ctx.rng("mask"), keep), 0
        return keys, State({}, {"keys": {repr(k): key.hex() for k, key in keys.items()}, "used": used + 1})

    def check(self, payload: Payload, spec: Spec) -> None:
        """Raises WireError unless every tensor has as many values as its mask has ones."""
        if self.wire == "implicit":
            return
        for name, mask in self._masks(payload, {n: t.shape for n, t in spec.items()}):
            masks.check_count(name, cast(Tensor, payload.fields[name]), mask)

    def _masks(self, payload: Payload, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
        """An upload's masks by tensor, one at a time; tensors that are sent whole or not at all have none."""
        keep = masks.keeps(self.rate, shapes)
        if self.wire == "seeded":
            keys = {k: payload.fields[_key_name(k)] for k in set(keep.values()) if masks.is_random(k)}
            yield from masks.expanded(cast("dict[float, bytes]", keys), keep, shapes)
            return
        for name in (n for n, k in keep.items() if masks.is_random(k)):
            carried = cast(Tensor, payload.fields[name if self.wire == "implicit" else _MASK + name])
            yield name, carried != 0 if self.wire == "implicit" else carried

    def surviving(
        self, payload: Payload, shapes: Mapping[str, tuple[int, ...]]
    ) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """What an upload shows, a tensor at a time: its values, zero where masked, and its mask (None: sent whole)."""
        fields = cast("Mapping[str, Tensor]", payload.fields)
        for name in (n for n, k in masks.keeps(self.rate, shapes).items() if k == 1.0):
            yield name, fields[name], None
        for name, mask in self._masks(payload, shapes):
            yield name, fields[name] if self.wire == "implicit" else masks.unpack(name, fields[name], mask), mask

    def terms(self, payload: Payload, num_examples: int, spec: Spec, ctx: RoundContext) -> Terms:
        """B o g and B (Eq. 12), one tensor at a time."""
        weight = float(num_examples) if self.weighted else 1.0
        shapes = {n: t.shape for n, t in spec.items()}
        return Terms(Term(name, whole, weight, mask) for name, whole, mask in self.surviving(payload, shapes))

    def summed(self, spec: Spec, round_: int) -> Mapping[str, tuple[int, ...]]:
        """Every tensor of which something is sent; where entries are left out, a weight for each of them."""
        keep = masks.keeps(self.rate, spec)
        return {n: t.shape if masks.is_random(keep[n]) else () for n, t in spec.items() if keep[n] > 0}

    def settle(self, server: State, sums: Sums, ctx: RoundContext) -> State:
        """A step along the mean of Eq. 12."""
        eta = fedsgd.rate_of(self.learning_rate, self.exchange, self.optimiser)
        return fedsgd.descend(server, sums, self.optimiser, eta)

    def deployed(
        self, server: State, private: State | None = None, down: Payload | None = None
    ) -> Mapping[str, Weights]:
        """One model: the server's."""
        return {"server": fedsgd.weights_of(server)}

    def layout(self, spec: Spec) -> Layout:
        """Every tensor down. Up: whole where R = 0, nothing where R = 1, and between the two as `wire` says."""
        keep = masks.keeps(self.rate, spec)
        fields = dense_fields(spec, "down", self.wire_dtype)
        fields += dense_fields({n: t for n, t in spec.items() if keep[n] == 1.0}, "up", self.wire_dtype)
        random = {n: t for n, t in spec.items() if masks.is_random(keep[n])}
        if self.wire == "implicit":
            return Layout(fields + dense_fields(random, "up", self.wire_dtype))
        codec = Dense(getattr(torch, self.wire_dtype))
        fields += tuple(
            Field(n, "up", codec, (None,), "surviving weight", most=(math.prod(t.shape),)) for n, t in random.items()
        )
        if self.wire == "explicit":
            return Layout(
                fields + tuple(Field(_MASK + n, "up", Bits(), t.shape, "mask bit") for n, t in random.items())
            )
        distinct = sorted({keep[n] for n in random})
        return Layout(fields + tuple(Field(_key_name(k), "up", Seeded(k), (KEY_BYTES,), "key byte") for k in distinct))


def _key_name(keep: float) -> str:
    return f"{_KEY}{keep!r}"
