"""MaxRényi-K%.

Li, Wu, Chen, Tonglet, ..., Cevher: Membership Inference Attacks against Large Vision-Language Models. NeurIPS 2024.

The attack takes the Rényi entropy of the model's next-token distribution p at each position, and then the mean of the
largest K% of the entropies in a slice:

    H_alpha(p) = ln(sum_v p_v^alpha) / (1 - alpha),  H_1 = -sum_v p_v ln p_v,  H_inf = -ln max_v p_v
    score = -mean of the k largest H_alpha,  k = max(1, int(K / 100 * T))

An example with low entropies is classified as a member.

| case | result |
|---|---|
| K = 0 | only the largest entropy |
| T < 20, K = 10 | k = 1: the same as K = 0, no independent evidence |
| K = 100 | the mean over the slice |
| uniform p | ln V for every alpha |

Differences from the public code: entropies come from log-probabilities in double precision. The code clamps p at 1e-10,
which adds up to V * 1e-5 to the sum for alpha = 0.5 (`clamp = 1e-10` does the same here).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from fedveil.attacks.base import ModelAttack, ModelOutput

__all__ = ["PERCENTS", "MaxRenyiAttack", "max_k", "renyi_entropy"]

PERCENTS = (0, 10, 100)


def renyi_entropy(
    logits: Float[Tensor, "positions classes"], alpha: float, clamp: float = 0.0
) -> Float[Tensor, " positions"]:
    """Return H_alpha of each position, in nats, in double precision.

    Args:
        clamp: minimum probability. The public code has 1e-10; 0 means no minimum.

    Raises:
        ValueError: alpha is not above 0.
    """
    if not alpha > 0:
        raise ValueError(f"alpha: expected a number above 0 or infinity, found {alpha}")
    log_p: Tensor = torch.log_softmax(logits.double(), -1)
    if clamp:
        log_p = log_p.clamp_min(math.log(clamp))
    if math.isinf(alpha):
        return -log_p.amax(-1)
    if alpha == 1:
        shannon: Tensor = torch.special.entr(log_p.exp()).sum(-1)  # 0 ln 0 = 0, and a NaN stays a NaN
        return shannon
    entropies: Tensor = torch.logsumexp(alpha * log_p, -1) / (1 - alpha)
    return entropies


def max_k(entropies: NDArray[np.float64], percent: float) -> float:
    """Return the mean of the k largest of T entropies, k = max(1, int(percent / 100 * T)).

    Raises:
        ValueError: no entropies, or a percentage outside 0 to 100.
    """
    if not 0 <= percent <= 100 or not len(entropies):
        raise ValueError(
            f"the percentage must be from 0 to 100, of at least one entropy; found {percent} of {len(entropies)}"
        )
    k = max(1, int(percent * len(entropies) / 100))
    return float(np.sort(entropies)[-k:].mean())


@dataclass(frozen=True)
class MaxRenyiAttack(ModelAttack):
    """MaxRényi-K% on every slice of the model's output, for K = 0, 10 and 100; scores are named "<slice> <K>%".

    The slice "target" is called "caption" if the model reads images.

    Attributes:
        alpha: order of the entropy; we chose 0.5 before we saw any result.
    """

    alpha: float = 0.5

    @property
    @override
    def name(self) -> str:
        return "MaxRenyi"

    @override
    def score(self, answer: ModelOutput) -> dict[str, float]:
        slices = answer.prediction.logits
        scores: dict[str, float] = {}
        for name, logits in slices.items():
            label = "caption" if name == "target" and "image" in slices else name
            entropies = renyi_entropy(logits, self.alpha).numpy()
            scores |= {f"{label} {percent}%": -max_k(entropies, percent) for percent in PERCENTS}
        return scores
