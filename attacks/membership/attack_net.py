"""The attack network of `shadow_models`: Linear(n, 32) - ReLU - Linear(32, 2), trained with cross entropy on logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedveil.attacks.statistics import Scores

__all__ = ["HIDDEN", "AttackNet", "fit_attack_net"]

HIDDEN = 32


@dataclass(frozen=True)
class AttackNet:
    """A trained network, Linear - ReLU - Linear, that standardizes its inputs."""

    weights: Sequence[Tensor]
    mean: Tensor
    std: Tensor

    def logits(self, inputs: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Return the logits of "out" and "in" under `weights`, shape (rows, 2); `inputs` is (rows, n)."""
        first, first_bias, second, second_bias = weights
        return ((inputs - self.mean) / self.std @ first + first_bias).relu() @ second + second_bias

    @torch.no_grad()
    def scores(self, inputs: Tensor) -> Scores:
        """Return logit("in") - logit("out"), shape (rows,); `inputs` is (rows, n)."""
        logits = self.logits(inputs, self.weights)
        return np.asarray((logits[:, 1] - logits[:, 0]).double().numpy())


def fit_attack_net(
    known: tuple[Tensor, Tensor],
    held: tuple[Tensor, Tensor],
    learning_rate: float,
    epochs: int,
    patience: int,
    generator: torch.Generator,
) -> AttackNet:
    """Train a network with full-batch Adam, and return its version with the lowest held-out loss.

    Args:
        known, held: training and held-out records: inputs (rows, n) and labels (rows,), 0 for "out" or 1 for "in".
        patience: training ends after this many epochs without a lower held-out loss.
        generator: random generator for the initial weights.
    """
    inputs, labels = known
    net = AttackNet((), inputs.mean(0), inputs.std(0).clamp_min(1e-6))
    sizes = ((inputs.shape[1], HIDDEN), (HIDDEN, 2))
    weights = [
        ((torch.rand(shape, generator=generator) * 2 - 1) / size[0] ** 0.5).requires_grad_()
        for size in sizes
        for shape in (size, size[1:])
    ]
    optimiser = torch.optim.Adam(weights, lr=learning_rate)
    best, best_weights, since = float("inf"), [w.detach().clone() for w in weights], 0
    for _ in range(epochs):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(net.logits(inputs, weights), labels).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        with torch.no_grad():
            loss = float(torch.nn.functional.cross_entropy(net.logits(held[0], weights), held[1]))
        if loss < best:
            best, best_weights, since = loss, [w.detach().clone() for w in weights], 0
        elif (since := since + 1) == patience:
            break
    return AttackNet(best_weights, net.mean, net.std)
