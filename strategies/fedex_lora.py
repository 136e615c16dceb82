"""FedEx-LoRA.

Singhal, Ponkshe, Vepakomma: FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Foundation Models.
ACL 2025. https://arxiv.org/abs/2410.09432

Both LoRA factors are trained and averaged. What the mean of the products has beyond the product of the means goes into
the base, so that the new model is the mean of the clients' models.

| paper | code | shape, unit |
|---|---|---|
| A, B | `<module>.lora_A`, `<module>.lora_B` | r x d_in and d_out x r, weights; A random, B zero at first |
| Delta W_res, added up over rounds | `<module>.residual`: R_t | d_out x d_in, weights; zero at first |
| Delta W_res of one round | D_t, kept as factors where these are smaller | of rank at most k r, for k uploads |
| W_0 | the base, which stays as it is: W_t = W_0 + scale (R_t + B_t A_t) | |
| 1/k, here n_i / m_t | `num_examples` over their sum over the cohort | |

    (A_i, B_i) <- local epochs on both, from (A_t, B_t), over the base with R_t                    (1, client)
    A_{t+1} = sum_i (n_i / m_t) A_i,   B_{t+1} = sum_i (n_i / m_t) B_i                             (2, server)
    D_t = sum_i (n_i / m_t) B_i A_i - B_{t+1} A_{t+1}                                              (3, server)
    R_{t+1} = R_t + D_t                                                                            (4, server and site)
    R_{t+1} + B_{t+1} A_{t+1} = R_t + sum_i (n_i / m_t) B_i A_i                                    (5: it is exact)

A client shares: both LoRA factors; what their mean loses goes into the base. With it stays: a copy of what went into
the base.

The client learns: A_t, B_t and R_t of every round it takes part in; of the others' products only their mean.
The server learns: each client's trained A and B in full, and n_i; under secure aggregation the sums of A, B and B A.

Formal guarantees: none by itself (epsilon is infinite); with `dp.*` those of `fedveil.privacy.dp_sgd`. By construction:
R has no gradient, and no upload holds it.

What goes down of R, what sites and server keep of it, and at which size: see `fedveil.adapters.residual_mean`.

| case | result |
|---|---|
| no upload | A, B and R stay, bit for bit |
| one upload, or equal ones | D = 0: it is FedAvg |
| newcomer, a site that skipped rounds, or one that lost its files | gets R whole |
| a site of the last sums | gets factors of D, of rank k r at most; R whole where they would be no smaller |
| `wire_dtype` below fp32 | A and B are rounded before D is formed: (5) holds for what goes down; D has rank (k + 1) r |
| `upload_bits` | (5) holds for what was decoded |
| secure aggregation | a site's vector has B_i A_i, d_out x d_in a layer, for factors cannot be multiplied once they are
  summed; the sum is rounded, so R goes down whole |
| `aggregate.rule = "median"` | the medians of A, of B and of the products are (2) and the sum in (3) |
| `fedveil audit` | R is read off the broadcasts: a site's start and its trained model are known to the bit |
| `final/` | a pair of a higher rank a layer, up to the smaller of its widths |

Differences from the paper: AdamW; the mean is over the cohort of the round and weighted with n_i, the paper's is 1/k
over all clients. The paper adds each D to the weights of every client: here R stands beside the base, which may be
quantised and is never sent. The paper sends D to all clients of a fixed set; who was absent gets R here. Its text was
not at hand: the equations follow its abstract and others' accounts of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from fedveil.adapters import residual_mean
from fedveil.adapters.residual_lora import ResidualLora, factors
from fedveil.algebra.coded import Uploads
from fedveil.contract.layout import Layout, Payload
from fedveil.contract.method import Method, RoundContext, State
from fedveil.contract.spec import Spec, Weights
from fedveil.contract.sums import Sums, Terms
from fedveil.contract.trainer import Trainer
from fedveil.rng import Stream
from fedveil.wire.payloads import WireDtype, cast_to, tensors_of


@final
@dataclass(frozen=True)
class FedExLora(Method):
    """Everyone shares both factors, and the mean of their products is exact.

    Attributes:
        adapter: LoRA beside a residual; no other adapter has one.
        wire_dtype: dtype of A and B on the wire, both ways; sums and the residual are fp32 whatever it is.
        upload_bits: bits of the codes in which a client sends A and B, 2 to 8, with a scale for every 256 weights; 0:
            none.
    """

    adapter: ResidualLora = field(default_factory=ResidualLora)
    wire_dtype: WireDtype = "float32"
    upload_bits: int = 0

    def __post_init__(self) -> None:
        self._uploads  # noqa: B018  # it checks the bits

    @property
    def _uploads(self) -> Uploads:
        return Uploads(self.wire_dtype, self.upload_bits)

    def init(self, spec: Spec, weights: Weights, rng: Stream) -> State:
        """(A_0, B_0), drawn once for all clients, and R_0, which is zero unless `weights` have one."""
        return residual_mean.start(spec, weights)

    def broadcast(self, server: State, ctx: RoundContext) -> Payload:
        """(A_t, B_t), the same for every client, and what this one lacks of R_t."""
        pairs = factors(residual_mean.model(server))
        return residual_mean.broadcast(server, cast_to(pairs, self.wire_dtype), ctx)

    def client(
        self, private: State | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[State | None, Payload]:
        """Eq. 1: both factors are sent; R_t is kept, for the server sends its changes."""
        kept, pairs = residual_mean.trained(private, down, trainer, tensors_of(down), {})
        return kept, Payload(self._uploads.sent(pairs))

    def terms(self, payload: Payload, num_examples: int, spec: Spec, ctx: RoundContext) -> Terms:
        """n_i times A_i, B_i and B_i A_i, and n_i."""
        return Terms(residual_mean.pairs_and_products(self._uploads.opened(payload), num_examples))

    def summed(self, spec: Spec, round_: int) -> Mapping[str, tuple[int, ...]]:
        """The factors, and under the names of R their products."""
        return dict.fromkeys(spec, ())

    def settle(self, server: State, sums: Sums, ctx: RoundContext) -> State:
        """Eqs. 2 to 4."""
        means = sums.means(factors(residual_mean.model(server)))
        pairs = {name: w.float() for name, w in cast_to(means, self.wire_dtype).items()}
        rounded = self.wire_dtype != "float32"  # a rounded product is not in the span of the others
        ranks = (len(sums.clear) + rounded) * self.adapter.rank
        return residual_mean.settled(server, sums, pairs, subtracted=True, ranks=ranks, ctx=ctx)

    def deployed(
        self, server: State, private: State | None = None, down: Payload | None = None
    ) -> Mapping[str, Weights]:
        """One model: the server's. What a site keeps of R is the server's too."""
        return {"server": residual_mean.model(server)}

    def layout(self, spec: Spec) -> Layout:
        """Down: both factors, and R, or factors of its last change, or nothing of it. Up: both factors."""
        pairs = factors(spec)
        return Layout(residual_mean.fields(spec, pairs, self.wire_dtype) + self._uploads.fields(pairs))
