"""FedEx-LoRA.

Singhal, Ponkshe, Vepakomma: FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Foundation
Models. ACL 2025. https://arxiv.org/abs/2410.09432

Clients train both LoRA factors and the server averages them. The server adds the mean of the products minus the
product of the means to the base, so the new model is the mean of the clients' models.

| paper | code | shape, unit |
|---|---|---|
| A, B | `<module>.lora_A`, `<module>.lora_B` | r x d_in and d_out x r, weights; A random, B zero at first |
| Delta W_res, accumulated over rounds | `<module>.residual`: R_t | d_out x d_in, weights; zero at first |
| Delta W_res of one round | D_t, kept as factors if they are smaller | rank at most k r for k uploads |
| W_0 | the base, which never changes: W_t = W_0 + scale (R_t + B_t A_t) | |
| 1/k, here n_i / m_t | `num_examples` over their sum over the cohort | |

    (A_i, B_i) <- local epochs on both, from (A_t, B_t), over the base with R_t                    (1, client)
    A_{t+1} = sum_i (n_i / m_t) A_i,   B_{t+1} = sum_i (n_i / m_t) B_i                             (2, server)
    D_t = sum_i (n_i / m_t) B_i A_i - B_{t+1} A_{t+1}                                              (3, server)
    R_{t+1} = R_t + D_t                                                                            (4, server and site)
    R_{t+1} + B_{t+1} A_{t+1} = R_t + sum_i (n_i / m_t) B_i A_i                                    (5: it is exact)

A client shares: both LoRA factors; the error of their mean goes into the base. A client keeps: a copy of the change
to the base; under secure aggregation, nothing.

The client learns: A_t, B_t and R_t of every round it takes part in, but only the mean of the other clients'
products.
The server learns: each client's trained A and B in full, and n_i; under secure aggregation, if it follows the
protocol, only the sums of A, B and B A.

Formal guarantees: none by itself (epsilon is infinite); with `dp.*`, see `fedveil.privacy.dp_sgd`. By
construction, R has no gradient, and no upload contains it.

`fedveil.adapters.residual_aggregation` describes which part of R is broadcast, which parts the sites and the server
keep, and their sizes.

| case | result |
|---|---|
| no upload | A, B and R stay unchanged, bit for bit |
| one upload, or equal uploads | D = 0: the round is the same as FedAvg |
| newcomer, or a site that skipped rounds or lost its files | gets the whole R |
| a site in the last sums | gets factors of D, of rank at most k r, or the whole R if that is no larger |
| `wire_dtype` below fp32 | A and B are rounded before D is formed: (5) holds for the broadcast; D has rank (k + 1) r |
| `upload_bits` | (5) holds for the decoded factors |
| secure aggregation | a site's vector includes B_i A_i, d_out x d_in per layer, because the products cannot be computed
  from summed factors. All sites get the whole R, in one message which the plan names, and keep no copy |
| `aggregate.rule = "median"` | (2) and the sum in (3) are the medians of A, of B and of the products |
| `fedveil audit` | the broadcasts reveal R, so a site's initial and trained models are known exactly |
| `final/` | one higher-rank pair per layer; the rank is at most the smaller of the layer's widths |

Differences from the paper: the optimizer is AdamW. The mean is over the round's cohort and weighted by n_i; the
paper takes the plain mean over all clients. The paper adds each D to the weights of every client. Here R is stored
separately from the base, which may be quantized and is never sent. The paper sends D to a fixed set of clients; here a
client that was absent gets R. The paper's text was not available, so the equations follow its abstract and other
authors' accounts of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from fedveil.adapters import residual_aggregation
from fedveil.adapters.residual_lora import ResidualLoraAdapter, factor_names
from fedveil.contract.contributions import AggregateSums, ClientContributions
from fedveil.contract.layout import MessageLayout, Payload
from fedveil.contract.method import FederatedState, RoundContext
from fedveil.contract.param_spec import Spec, Weights
from fedveil.contract.trainer import Trainer
from fedveil.ops.weight_averaging import WeightAveragingMethod
from fedveil.rng import RandomStream
from fedveil.wire.payloads import WireDtype, cast_to, payload_tensors

__all__ = ["FedExLoRA"]


@final
@dataclass(frozen=True)
class FedExLoRA(WeightAveragingMethod):
    """Every client shares both LoRA factors, and the server averages their products exactly.

    Attributes:
        adapter: LoRA with a residual; no other adapter has one.
        wire_dtype: dtype of A and B on the wire in both directions; sums and the residual are always fp32.
        upload_bits: bits per entry of the uploaded A and B, 2 to 8, with one scale per 256 entries; 0 disables
            quantization.
    """

    adapter: ResidualLoraAdapter = field(default_factory=ResidualLoraAdapter)
    wire_dtype: WireDtype = "float32"
    upload_bits: int = 0

    @property
    def server_optimizer_conflict(self) -> str:
        """Return why a server optimizer is refused: the base absorbs what exactly these mean factors lack."""
        return "would move the factors away from the residual that completes their mean"

    @property
    def stale_upload_conflict(self) -> str:
        """Return why late uploads are refused: the residual completes the mean of a single round's factors."""
        return "corrects the base for the mean of a single round's factors"

    @property
    def sends_same_broadcast(self) -> bool:
        """Return True: under secure aggregation every site gets the whole residual."""
        return True

    @property
    def keeps_private_state(self) -> bool:
        """Return True: in a run without secure aggregation, the residual stays at the site."""
        return True

    @property
    def has_bound_broadcast(self) -> bool:
        """Return True: under secure aggregation no site keeps the residual."""
        return True

    def init(self, spec: Spec, weights: Weights, rng: RandomStream) -> FederatedState:
        """Return (A_0, B_0), drawn once for all clients, and R_0, which is zero unless `weights` include it."""
        return residual_aggregation.start_state(spec, weights)

    def broadcast(self, server: FederatedState, ctx: RoundContext) -> Payload:
        """Return (A_t, B_t), the same for every client, and the part of R_t that this client lacks."""
        pairs = factor_names(residual_aggregation.server_model(server))
        return residual_aggregation.make_broadcast(server, cast_to(pairs, self.wire_dtype), ctx)

    def client(
        self, private: FederatedState | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[FederatedState | None, Payload]:
        """Apply eq. 1, send both factors, and keep R_t, because the server later sends only changes to it."""
        new_state, pairs = residual_aggregation.client_upload(private, down, trainer, payload_tensors(down), {}, ctx)
        return new_state, Payload(self._uploads.sent(pairs))

    def contributions(self, payload: Payload, num_examples: int, spec: Spec, ctx: RoundContext) -> ClientContributions:
        """Return A_i, B_i and B_i A_i, each times n_i, and n_i itself."""
        return ClientContributions(residual_aggregation.pairs_and_products(self._uploads.opened(payload), num_examples))

    def aggregate_shapes(self, spec: Spec, round_: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the factors and, under the names of R, of their products."""
        return dict.fromkeys(spec, ())

    def server_update(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> FederatedState:
        """Apply eqs. 2 to 4."""
        means = sums.means(factor_names(residual_aggregation.server_model(server)))
        pairs = {name: w.float() for name, w in cast_to(means, self.wire_dtype).items()}
        rounded = self.wire_dtype != "float32"  # a rounded product is not in the span of the clients' products
        ranks = (len(sums.clear) + rounded) * self.adapter.rank
        return residual_aggregation.settle_residual(server, sums, pairs, subtracted=True, ranks=ranks, ctx=ctx)

    def models(
        self, server: FederatedState, private: FederatedState | None = None, down: Payload | None = None
    ) -> Mapping[str, Weights]:
        """Return one model, the server's. Each site's copy of R is the same as the server's."""
        return {"server": residual_aggregation.server_model(server)}

    def layout(self, spec: Spec) -> MessageLayout:
        """Declare both factors in both directions; broadcasts may add R or the factors of its last change."""
        pairs = factor_names(spec)
        return MessageLayout(
            residual_aggregation.residual_fields(spec, pairs, self.wire_dtype) + self._uploads.fields(pairs)
        )
