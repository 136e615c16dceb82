"""LA-LoRA.

Liu, Miao, Xi, Liu: Rethinking LoRA for Privacy-Preserving Federated Learning in Large Models. ICLR 2026.
https://arxiv.org/abs/2602.19926

A client alternates steps on its two LoRA factors, and shares both.

| paper | code | shape, unit |
|---|---|---|
| k | the local step in a participation, from 0 | local steps |
| A_i, B_i | `<module>.lora_A`, `<module>.lora_B` | r x d_in and d_out x r, weights; A random, B zero at first |
| n_i, m_t | `num_examples`, their sum over the cohort | examples |

    k even: B_i <- B_i - step only on B,  A_i unchanged                                (1, client)
    k odd:  A_i <- A_i - step only on A,  B_i unchanged                                (2, client)
    A_{t+1} = sum_i (n_i / m_t) A_i,  B_{t+1} = sum_i (n_i / m_t) B_i                  (3, server)

RoLoRA alternates over rounds, so the mean of the products is exact. LA-LoRA alternates within a round, so the mean is
not exact: `aggregation_gap` of `fedveil.ops.lora_algebra` measures the difference. With `dp.*`, each step's noise is in
one factor, and the bound C clips only that factor's gradient: a step never multiplies noise in A by noise in B.

A client shares: both LoRA factors, trained in alternating steps. A client keeps: nothing.

The client learns: (A_t, B_t) of every round it takes part in.
The server learns: each client's trained A and B in full, and n_i, as under FedAvg.

Formal guarantees: none by itself (epsilon is infinite); with `dp.*`, see `fedveil.privacy.dp_sgd`.

| case | result |
|---|---|
| train.max-steps = 1 | only B is ever trained, as in FFA-LoRA, but A is still sent |
| an odd number of steps | B gets one more step than A; the next participation begins with B again |
| in a step | the other factor has no gradient and no weight decay; its AdamW state does not change |
| no upload | both factors stay unchanged, bit for bit |

Differences from the paper: this file omits the low-pass filter over noisy gradients. The published code filters with an
FFT and then adds the raw gradient once more, while the text reportedly uses a fixed Gaussian kernel. The code also
clips the gradient of a batch, one tensor at a time, to a bound that depends on the examples, and no accountant gives an
epsilon for that. Here `dp.*` clips per example, over all tensors of the step. The published code begins with A, which
has no gradient while B is zero; here B comes first. It trains B at twice A's learning rate; here the rates are equal.
The optimizer is AdamW; the mean is weighted by n_i. We had only the paper's abstract and that code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from fedveil.adapters.lora import LoraAdapter
from fedveil.contract.contributions import AggregateSums
from fedveil.contract.layout import Payload
from fedveil.contract.method import FederatedState, RoundContext
from fedveil.contract.trainer import Trainer
from fedveil.ops.lora_algebra import held_factors
from fedveil.ops.weight_averaging import LoraAveragingMethod
from fedveil.wire.payloads import WireDtype, as_spec, payload_tensors

__all__ = ["LALoRA"]


@final
@dataclass(frozen=True)
class LALoRA(LoraAveragingMethod):
    """Every client trains B and A in alternating steps and shares both.

    Attributes:
        adapter: LoRA; no other adapter has factors.
        wire_dtype: dtype on the wire in both directions; sums are always fp32.
        upload_bits: bits per entry of the uploaded factor, 2 to 8, with one scale per 256 entries; 0 disables
            quantization.
    """

    adapter: LoraAdapter = field(default_factory=LoraAdapter)
    wire_dtype: WireDtype = "float32"
    upload_bits: int = 0

    def client(
        self, private: FederatedState | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[FederatedState | None, Payload]:
        """Alternate eq. 1 and 2, send both factors, and keep no state."""
        spec = trainer.spec
        trained = trainer.train(
            as_spec(payload_tensors(down), spec), [held_factors(spec, "A"), held_factors(spec, "B")]
        ).weights
        return None, Payload(self._uploads.sent(trained))

    def server_update(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> FederatedState:
        """Apply eq. 3."""
        return FederatedState(sums.means(server.tensors))
