"""Random binary weights for gradients.

Sawada, Imaizumi, Kiya: Random binary weights for privacy-preserving federated learning of the Vision Transformer.
Each client multiplies its gradient entry by entry with a random binary mask and sends the product.

| paper | code | shape, unit |
|---|---|---|
| w | the weights in `server.tensors` | every tensor of the adapter |
| R | `rate` | probability that a mask entry is zero; a map gives each tensor its own probability |
| B^n | `random_masks.expand_mask`, or the received bits | one bit per gradient entry |
| g^n | `fedsgd.gradient` | gradient of client n: one batch, or w minus its locally trained weights |
| c | sum of the masks, see `fedveil.contract.contributions` | clients (or examples) behind an entry |
| eta | `learning_rate` | the server's step size |

    g'^n = B^n o g^n,  B^n ~ Bernoulli(1 - R) for every entry                          (Eq. 10, on the client)
    w <- w - eta (sum_n g'^n) / (sum_n B^n)  where sum_n B^n > 0; unchanged elsewhere   (Eq. 12, on the server)
    updates of one entry in m epochs by N clients ~ Binomial(m, 1 - R^N); locked: m with probability 1 - R^N, else 0
                                            (Eq. 13, corrected: the paper prints R^{n(1-f)} instead of R^{n(m-f)})

A client shares: the entries of its gradient that a random mask selects; masks are drawn for each batch or
epoch, or once. A client keeps: the other entries.

The client learns: the weights of every round it takes part in.
The server learns: each client's surviving gradient entries, bit for bit, with their positions. Masks are public:
explicit bits, a key that the server expands, or visible zeros. Taken together, several masks of one client hide
almost no entry.

Formal guarantees: none (epsilon is infinite). A mask omits entries; it does not protect the others.

| case | result |
|---|---|
| an entry that every client masked (c = 0) | unchanged, bit for bit: no step, no decay, no moments, no step count |
| no upload | the state does not change |
| R = 0 for a tensor | the full tensor is sent without a mask in every wire format; this is FedSGD, bit for bit |
| R = 1 for a tensor | it is never sent and never changes; if all tensors have R = 1, uploads have no fields |
| a true zero in the gradient | explicit, seeded: counted in c, as in Eq. 12. implicit: the server cannot distinguish it
  from a masked entry and does not count it in c, which moves the mean away from zero; the same holds for values that
  half precision rounds to zero |
| wire = "seeded", several values of R | 32 bytes for each distinct R strictly between 0 and 1 |
| a mask of the wrong shape | the layout refuses it |
| more or fewer values than ones in the mask | `check` refuses the upload |
| mask_period = "batch" with exchange = "epoch" | one mask per round, because individual batches are not exchanged |
| mask_period = "never", and the site lost its private state | the site draws a new mask and keeps it |
| buffers | none: adapters have only parameters |

Differences from the paper: `exchange = "epoch"` sends a pseudo-gradient after local epochs, which a deployment can
afford. The server's Adam counts steps per entry. `weighted` puts n_k into both sums of Eq. 12; the paper has no
weights. R may differ by tensor. With `exchange = "batch"` every exchange draws a new batch, so `epoch_batches`
exchanges form an epoch of the masks only. With 300 examples, 19 batches of 16 cover about 190; the paper's batches
cover all. The paper sends zeros in place (`implicit`); here the default is the explicit form.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, cast, final

import torch
from torch import Tensor

from fedveil.adapters.adapter_types import AnyAdapter
from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.contract.contributions import ClientContributions, Contribution
from fedveil.contract.layout import MessageLayout, Payload, WireField
from fedveil.contract.method import FederatedState, RoundContext
from fedveil.contract.param_spec import Spec
from fedveil.contract.trainer import Trainer
from fedveil.errors import ConfigError
from fedveil.ops import fedsgd, random_masks
from fedveil.ops.fedsgd import Exchanged, FedSgdMethod, Optimiser
from fedveil.wire.bits import BitCodec
from fedveil.wire.dense import DenseCodec
from fedveil.wire.payloads import WireDtype, cast_to, dense_fields, payload_tensors
from fedveil.wire.seeded_masks import KEY_BYTES, SeededMaskCodec

__all__ = ["RandomBinary"]

_MASK = "mask."  # prefix on the wire of a tensor's mask bits
_KEY = "key."  # prefix on the wire of the key for all masks with the same `keep`


@final
@dataclass(frozen=True)
class RandomBinary(FedSgdMethod):
    """Clients send gradients with random entries left out.

    Attributes:
        rate: R, from 0 to 1: one rate for all tensors, or a map from regular expressions to rates. Expressions are
            searched in tensor names; the first match wins, and R is 0 without a match.
        mask_period: when a client draws a new mask: every "batch", every "epoch", or "never" (locked).
        epoch_batches: number of exchanges per epoch, for mask_period = "epoch" with exchange = "batch".
        exchange: a client's upload: the gradient of one "batch", or the pseudo-gradient of local epochs ("epoch").
        wire: "explicit" (surviving values and mask bits), "implicit" (zeros in place), or "seeded" (surviving values
            and a key).
        optimiser: the server's optimizer.
        learning_rate: eta; None means 1 with exchange = "epoch" and SGD, and otherwise 1e-4.
        weighted: weight each client by its number of examples.
        adapter: the trained parameters.
        wire_dtype: dtype on the wire in both directions; sums are always fp32.
    """

    version: ClassVar[int] = 2  # version 1 drew its masks from AES
    rate: float | Mapping[str, float] = 0.5
    mask_period: Literal["batch", "epoch", "never"] = "epoch"
    epoch_batches: int = 1
    exchange: Exchanged = "batch"
    wire: Literal["explicit", "implicit", "seeded"] = "explicit"
    optimiser: Optimiser = "sgd"
    learning_rate: float | None = None
    weighted: bool = False
    adapter: AnyAdapter = field(default_factory=AllWeightsAdapter)
    wire_dtype: WireDtype = "float32"

    @property
    def on_device(self) -> bool:
        """Return True: if all weights are trained, gradient and masks are as large as the model."""
        return True

    @property
    def has_masked_terms(self) -> bool:
        """Return True, even at R = 0, where every entry is sent."""
        return True

    @property
    def has_partial_uploads(self) -> bool:
        """Return whether sites draw masks for any tensor; at R = 0 and R = 1, all sites send the same entries."""
        rates = self.rate.values() if isinstance(self.rate, Mapping) else [self.rate]
        return any(random_masks.is_random(1.0 - rate) for rate in rates)

    def __post_init__(self) -> None:
        random_masks.check_rate("rate", self.rate)
        fedsgd.check_learning_rate(self.learning_rate)
        fedsgd.check_wire_dtype(self.wire_dtype)
        if self.epoch_batches < 1:
            raise ConfigError(f"epoch_batches: expected an integer of at least 1, found {self.epoch_batches}")
        if self.epoch_batches > 1 and (self.exchange, self.mask_period) != ("batch", "epoch"):
            raise ConfigError(
                'epoch_batches: only exchange = "batch" with mask_period = "epoch" allows a value other than 1, '
                f"found {self.epoch_batches}"
            )

    def client(
        self, private: FederatedState | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[FederatedState | None, Payload]:
        """Return B o g (Eq. 10)."""
        keep = random_masks.keep_probability(self.rate, trainer.spec)
        keys, private = self._keys(private, keep, ctx)
        gradient = cast_to(
            fedsgd.client_gradient(trainer, payload_tensors(down), self.exchange, ctx.device), self.wire_dtype
        )
        shapes = {n: t.shape for n, t in trainer.spec.items()}
        sent: dict[str, Tensor | bytes] = {n: gradient[n] for n, k in keep.items() if k == 1.0}
        for name, mask in random_masks.expand_masks(keys, keep, shapes, ctx.device):
            if self.wire == "implicit":
                sent[name] = torch.where(mask, gradient[name], 0.0)
                continue
            sent[name] = random_masks.pack_masked(gradient[name], mask)
            if self.wire == "explicit":
                sent[_MASK + name] = mask
        if self.wire == "seeded":
            sent |= {_key_name(k): key for k, key in keys.items()}
        return private, Payload(sent)

    def _keys(
        self, private: FederatedState | None, keep: Mapping[str, float], ctx: RoundContext
    ) -> tuple[dict[float, bytes], FederatedState | None]:
        """Return the keys of this client round's masks, and the private state that keeps them for later rounds."""
        if self.mask_period == "batch" or (self.mask_period == "epoch" and self.epoch_batches == 1):
            return random_masks.draw_mask_keys(ctx.rng("mask"), keep), None
        used = cast(int, private.scalars["used"]) if private else 0
        if private and (self.mask_period == "never" or used < self.epoch_batches):
            hex_keys = cast("Mapping[str, str]", private.scalars["keys"])
            keys = {float(k): bytes.fromhex(key) for k, key in hex_keys.items()}
        else:
            keys, used = random_masks.draw_mask_keys(ctx.rng("mask"), keep), 0
        return keys, FederatedState({}, {"keys": {repr(k): key.hex() for k, key in keys.items()}, "used": used + 1})

    def check(self, payload: Payload, spec: Spec) -> None:
        """Raise WireError unless each tensor's number of values matches the number of ones in its mask."""
        if self.wire == "implicit":
            return
        for name, mask in self._masks(payload, {n: t.shape for n, t in spec.items()}):
            random_masks.check_count(name, cast(Tensor, payload.fields[name]), mask)

    def _masks(self, payload: Payload, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
        """Yield an upload's masks one tensor at a time, for partially sent tensors."""
        keep = random_masks.keep_probability(self.rate, shapes)
        if self.wire == "seeded":
            keys = {k: payload.fields[_key_name(k)] for k in set(keep.values()) if random_masks.is_random(k)}
            yield from random_masks.expand_masks(cast("dict[float, bytes]", keys), keep, shapes)
            return
        for name in (n for n, k in keep.items() if random_masks.is_random(k)):
            carried = cast(Tensor, payload.fields[name if self.wire == "implicit" else _MASK + name])
            yield name, carried != 0 if self.wire == "implicit" else carried

    def surviving(
        self, payload: Payload, shapes: Mapping[str, tuple[int, ...]]
    ) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Yield each uploaded tensor's name, values (zero where masked) and mask (None if it was sent in full)."""
        fields = cast("Mapping[str, Tensor]", payload.fields)
        for name in (n for n, k in random_masks.keep_probability(self.rate, shapes).items() if k == 1.0):
            yield name, fields[name], None
        for name, mask in self._masks(payload, shapes):
            yield (
                name,
                fields[name] if self.wire == "implicit" else random_masks.unpack_masked(name, fields[name], mask),
                mask,
            )

    def contributions(self, payload: Payload, num_examples: int, spec: Spec, ctx: RoundContext) -> ClientContributions:
        """Return B o g and B (Eq. 12), one tensor at a time."""
        weight = float(num_examples) if self.weighted else 1.0
        shapes = {n: t.shape for n, t in spec.items()}
        return ClientContributions(
            Contribution(name, whole, weight, mask) for name, whole, mask in self.surviving(payload, shapes)
        )

    def aggregate_shapes(self, spec: Spec, round_: int) -> Mapping[str, tuple[int, ...]]:
        """Return the weights' shape for every tensor that is sent; masked tensors have one weight per entry."""
        keep = random_masks.keep_probability(self.rate, spec)
        return {n: t.shape if random_masks.is_random(keep[n]) else () for n, t in spec.items() if keep[n] > 0}

    def layout(self, spec: Spec) -> MessageLayout:
        """Declare every tensor down; up, in full if R = 0, omitted if R = 1, and otherwise in the format of `wire`."""
        keep = random_masks.keep_probability(self.rate, spec)
        fields = dense_fields(spec, "down", self.wire_dtype)
        fields += dense_fields({n: t for n, t in spec.items() if keep[n] == 1.0}, "up", self.wire_dtype)
        random = {n: t for n, t in spec.items() if random_masks.is_random(keep[n])}
        if self.wire == "implicit":
            return MessageLayout(fields + dense_fields(random, "up", self.wire_dtype))
        codec = DenseCodec(getattr(torch, self.wire_dtype))
        fields += tuple(
            WireField(n, "up", codec, (None,), "surviving weight", most=(math.prod(t.shape),))
            for n, t in random.items()
        )
        if self.wire == "explicit":
            return MessageLayout(
                fields + tuple(WireField(_MASK + n, "up", BitCodec(), t.shape, "mask bit") for n, t in random.items())
            )
        distinct = sorted({keep[n] for n in random})
        return MessageLayout(
            fields
            + tuple(WireField(_key_name(k), "up", SeededMaskCodec(k), (KEY_BYTES,), "key byte") for k in distinct)
        )


def _key_name(keep: float) -> str:
    return f"{_KEY}{keep!r}"
