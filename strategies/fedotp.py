"""FedOTP.

Li, Huang, Wang, Shi: Global and Local Prompts Cooperation via Optimal Transport for Federated Learning. CVPR 2024.
https://arxiv.org/abs/2403.00041

Each client trains two prompts: a shared prompt, which the server averages, and a local prompt. An image is scored by
optimal transport between its patches and the texts of the two prompts.

| paper | code | shape, unit |
|---|---|---|
| p_g | `prompt` | length x width, entries of token embeddings |
| p_{l,i} | `prompt.local` | same shape and unit; stays with client i |
| T, gamma | `prompt_tensors.transport_plan`, `adapter.mass` | patches x 2; the fraction of the patches' mass that is
  transported |
| n_i, n | `num_examples`, their sum over the cohort | examples |

    logit_c = s sum T o <patches, texts of c>,  T by unbalanced transport                       (1, 2)
    (p_g, p_{l,i}) <- local epochs on both from (the round's p_g, the stored p_{l,i})           (3, client)
    p_g <- sum_i (n_i / n) p_g^i                                                                (4, server)

(1) and (2) are in `fedveil.adapters.prompt_tensors`, (3) and (4) in `fedveil.adapters.shared_prompt`.

With `adapter = {form = "sum"}` there is no transport: the text's context is p_g + p_{l,i}, and the image is a single
feature. Tran et al. (DP-FPL, ICLR 2025) ran this form under the name FedOTP.

A client shares: one of two prompts. A client keeps: the other prompt.

The client learns: the shared prompt of every round it takes part in.
The server learns: each client's trained shared prompt, in full, and n_i. It never gets a local prompt.

Formal guarantees: none (epsilon is infinite). By construction, no message has a field for a local prompt.

| case | result |
|---|---|
| newcomer, or a site that lost its private state | the site draws its local prompt from N(0, std^2) |
| server's own model, with transport | uses the shared prompt as both prompts, so the transport only selects patches |
| server's own model, without transport | the shared prompt |
| no upload | the shared prompt stays unchanged, bit for bit |

Differences from the paper: the optimizer is AdamW instead of SGD. The mean is over the round's cohort; with
cohort.fraction = 1 that is all clients, as in the paper's round 0. A patch may give less than its share but never more
(T 1 <= 1 / M).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from fedveil.adapters import prompt_tensors
from fedveil.adapters.prompt import PromptAdapter
from fedveil.adapters.shared_prompt import SharedPromptMethod
from fedveil.wire.payloads import WireDtype

__all__ = ["FedOTP"]


@final
@dataclass(frozen=True)
class FedOTP(SharedPromptMethod):
    """Every client trains a shared prompt and keeps a local one.

    Attributes:
        adapter: a prompt of form "transport", or of form "sum" to run without transport.
        wire_dtype: dtype on the wire in both directions; sums are always fp32.
        upload_bits: bits per entry of the uploaded prompt, 2 to 8, with one scale per 256 entries; 0 disables
            quantization.
    """

    adapter: PromptAdapter = field(default_factory=lambda: PromptAdapter(form="transport"))
    wire_dtype: WireDtype = "float32"
    upload_bits: int = 0

    def __post_init__(self) -> None:
        prompt_tensors.check_form(self.adapter, ("transport", "sum"))
        self._uploads  # noqa: B018  # this access checks upload_bits
