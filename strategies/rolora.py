"""RoLoRA.

Chen, Guo, Ju, Dalal, Zhu, Khisti: Robust Federated Finetuning of LLMs via Alternating Optimization of LoRA. NeurIPS
2025. https://arxiv.org/abs/2502.01755

Clients train and share one LoRA factor in each round: B in even rounds, A in odd ones.

| paper | code | shape, unit |
|---|---|---|
| t | `ctx.round` | 0-based here, from 1 in the paper |
| B_t, A_t | `<module>.lora_B`, `<module>.lora_A` | d_out x r and r x d_in, weights |
| n_i, m_t | `num_examples`, their sum over the cohort | examples |

    t even: B_i <- local epochs only on B, from (A_t, B_t);  B_{t+1} = sum_i (n_i / m_t) B_i,  A_{t+1} = A_t     (1)
    t odd:  A_i <- local epochs only on A, from (A_t, B_t);  A_{t+1} = sum_i (n_i / m_t) A_i,  B_{t+1} = B_t     (2)
    t even: sum_i (n_i / m_t) B_i A_t = B_{t+1} A_{t+1};  t odd: sum_i (n_i / m_t) B_t A_i = B_{t+1} A_{t+1}      (3)

By (3), the mean of the products is exact in every round, as in FFA-LoRA, but both factors are learned over two rounds.
All clients train the same factor in a round, whereas FedRand's clients draw a factor and keep the other.

A client shares: the LoRA factor that the round trains: B, then A. A client keeps: nothing.

The client learns: (A_t, B_t) of every round it takes part in.
The server learns: each client's trained factor of the round in full, and n_i. It sent the other factor, so it knows
the client's whole model.

Formal guarantees: none by itself (epsilon is infinite); with `dp.*`, see `fedveil.privacy.dp_sgd`. By construction,
no upload contains both factors, or the factor that is not trained in that round.

| case | result |
|---|---|
| round 0 | B is trained, because A has no gradient while B is zero |
| in a step | the other factor has no gradient, optimizer state or weight decay, and does not count in gradient norms |
| an upload with the factor of another round | the mean ignores it |
| no upload | both factors stay unchanged, bit for bit; the next round still trains the other factor |
| a site that skipped rounds, or lost its files | no effect: a site keeps no state |

Differences from the paper: the optimizer is AdamW; the mean is over the round's cohort and weighted by n_i. Both
factors are in every broadcast, although a site from the last round lacks only one. So a site keeps no state. The
paper's text was not available. B comes first, as in code published by others, and because A has no gradient at B = 0;
accounts of the paper disagree about which factor it calls A.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from fedveil.adapters.lora import LoraAdapter
from fedveil.contract.contributions import AggregateSums, ClientContributions, weighted_contributions
from fedveil.contract.layout import MessageLayout, Payload
from fedveil.contract.method import FederatedState, RoundContext
from fedveil.contract.param_spec import Spec
from fedveil.contract.trainer import Trainer
from fedveil.ops.lora_algebra import FACTORS, Factor, factor_name, held_factors, parse_factor_name
from fedveil.ops.weight_averaging import LoraAveragingMethod
from fedveil.wire.payloads import WireDtype, as_spec, dense_fields, payload_tensors

__all__ = ["RoLoRA"]


@final
@dataclass(frozen=True)
class RoLoRA(LoraAveragingMethod):
    """Every client trains and shares B in even rounds, and A in odd ones.

    Attributes:
        adapter: LoRA; no other adapter has factors.
        wire_dtype: dtype on the wire in both directions; sums are always fp32.
        upload_bits: bits per entry of the uploaded factor, 2 to 8, with one scale per 256 entries; 0 disables
            quantization.
    """

    adapter: LoraAdapter = field(default_factory=LoraAdapter)
    wire_dtype: WireDtype = "float32"
    upload_bits: int = 0

    @property
    def stale_upload_conflict(self) -> str:
        """Return why late uploads are refused: the next step uses only the other factor."""
        return "trains one factor in even rounds and the other in odd rounds, so a late upload has the wrong factor"

    def client(
        self, private: FederatedState | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[FederatedState | None, Payload]:
        """Apply eq. 1 or 2: train and send one factor, and keep no state."""
        side, start = _trained(ctx.round), as_spec(payload_tensors(down), trainer.spec)
        trained = trainer.train(start, held_factors(trainer.spec, "B" if side == "A" else "A")).weights
        return None, Payload(self._uploads.sent(parse_factor_name(trained, side)), side)

    def contributions(self, payload: Payload, num_examples: int, spec: Spec, ctx: RoundContext) -> ClientContributions:
        """Return the round's factor times n_i, and n_i itself."""
        return weighted_contributions(
            parse_factor_name(self._uploads.opened(payload), _trained(ctx.round)), num_examples
        )

    def aggregate_shapes(self, spec: Spec, round_: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of the round's factor."""
        return {name: () for name in spec if factor_name(name) == _trained(round_)}

    def server_update(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> FederatedState:
        """Apply eq. 1 or 2; the other factor does not change."""
        return FederatedState({**server.tensors, **sums.means(parse_factor_name(server.tensors, _trained(ctx.round)))})

    def layout(self, spec: Spec) -> MessageLayout:
        """Declare both factors down, and the round's factor up."""
        fields = dense_fields(spec, "down", self.wire_dtype)
        for side, when in zip(FACTORS, ("odd rounds", "even rounds, from 0"), strict=True):
            fields += self._uploads.fields(parse_factor_name(spec, side), (side,), when)
        return MessageLayout(fields)


def _trained(round_: int) -> Factor:
    return "A" if round_ % 2 else "B"
