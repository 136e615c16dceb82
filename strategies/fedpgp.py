"""FedPGP.

Cui, Li, Wang, Shi: Harmonizing Generalization and Personalization in Federated Prompt Learning. ICML 2024.
https://arxiv.org/abs/2405.09771

Each client trains a shared prompt, which the server averages, plus a low-rank part that stays with the client. A
contrastive term keeps the shared prompt general.

| paper | code | shape, unit |
|---|---|---|
| p_G | `prompt` | b x d (length x width), entries of token embeddings |
| U_i, V_i | `prompt.u`, `prompt.v` | b x k and k x d; stay with client i |
| mu, tau | `adapter.contrast`, `adapter.temperature` | weight and temperature of the contrastive term |
| n_i, n | `num_examples`, their sum over the cohort | examples |

    p_i = p_G + U_i V_i                                                                         (1)
    loss = cross entropy of p_i + mu R                                                          (2)
    (p_G, U_i, V_i) <- local epochs from (the round's p_G, the stored U_i and V_i)              (3, client)
    p_G <- sum_i (n_i / n) p_G^i                                                                (4, server)

(1), (2) and R are in `fedveil.adapters.prompt_tensors`, (3) and (4) in `fedveil.adapters.shared_prompt`.

With `adapter = {form = "factored", contrast = 0.0}` the contrastive term is absent, as in the runs of Tran et al.
(DP-FPL, ICLR 2025).

A client shares: one prompt. A client keeps: a low-rank part that is added to it.

The client learns: the shared prompt of every round it takes part in.
The server learns: each client's trained shared prompt, in full, and n_i. It never gets U_i or V_i.

Formal guarantees: none (epsilon is infinite). By construction, no message has a field for U_i or V_i.

| case | result |
|---|---|
| newcomer, or a site that lost its private state | the site draws U_i and V_i from N(0, std^2) |
| server's own model | p_G, with zeros for U_i and V_i |
| no upload | p_G stays unchanged, bit for bit |

Differences from the paper: the optimizer is AdamW instead of SGD. The mean is over the round's cohort; with
cohort.fraction = 1 that is all clients, as in the paper's round 0. The gradient of R flows through both of its trained
texts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from fedveil.adapters import prompt_tensors
from fedveil.adapters.prompt import PromptAdapter
from fedveil.adapters.shared_prompt import SharedPromptMethod
from fedveil.wire.payloads import WireDtype

__all__ = ["FedPGP"]


@final
@dataclass(frozen=True)
class FedPGP(SharedPromptMethod):
    """Every client trains a shared prompt and keeps a low-rank part.

    Attributes:
        adapter: a prompt of form "factored". Its contrast (mu) defaults to 1 if no adapter is given.
        wire_dtype: dtype on the wire in both directions; sums are always fp32.
        upload_bits: bits per entry of the uploaded prompt, 2 to 8, with one scale per 256 entries; 0 disables
            quantization.
    """

    adapter: PromptAdapter = field(default_factory=lambda: PromptAdapter(form="factored", contrast=1.0))
    wire_dtype: WireDtype = "float32"
    upload_bits: int = 0

    def __post_init__(self) -> None:
        prompt_tensors.check_form(self.adapter, ("factored",))
        self._uploads  # noqa: B018  # this access checks upload_bits
