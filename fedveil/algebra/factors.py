"""LoRA factors by name: `<module>.lora_A` (r x d_in) and `<module>.lora_B` (d_out x r); W = W_0 + scale * B A.

The papers' "A" is the randomly initialised factor and their "B" the one that starts at zero; so are ours.
An adapter of kind "hadamard-lora" has a second pair a module, `<module>.private_A` and `<module>.private_B`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from fedveil.algebra.sums import RunningSums
from fedveil.errors import ConfigError

Factor = Literal["A", "B"]
T = TypeVar("T")
FACTORS: tuple[Factor, Factor] = ("A", "B")
PRIVATE = (".private_A", ".private_B")


def factor(name: str) -> Factor:
    """The factor that a tensor's name says. Raises ConfigError for a tensor that is none."""
    for side in FACTORS:
        if name.endswith(f".lora_{side}"):
            return side
    raise ConfigError(f'{name}: expected a LoRA factor ("<module>.lora_A" or ".lora_B"); use an adapter of kind "lora"')


def of_factor(tensors: Mapping[str, T], side: Factor) -> dict[str, T]:
    """The entries of one factor."""
    return {name: value for name, value in tensors.items() if factor(name) == side}


def modules(names: Iterable[str]) -> list[str]:
    """Modules that carry a pair, in order. Raises ConfigError where a factor stands alone."""
    by_side = {side: [n.removesuffix(f".lora_{side}") for n in names if factor(n) == side] for side in FACTORS}
    alone = set(by_side["A"]) ^ set(by_side["B"])
    if alone:
        raise ConfigError(f"{sorted(alone)[0]}: expected both LoRA factors, found one; share the adapter as a whole")
    return by_side["A"]


def held(names: Iterable[str], side: Factor) -> dict[str, Tensor]:
    """What a training leaves as it is (`Trainer.train`) so that it moves the other factor alone."""
    return {name: torch.tensor(True) for name in names if factor(name) == side}


def without_private(tensors: Mapping[str, T]) -> dict[str, T]:
    """The entries that belong to no private pair."""
    return {name: value for name, value in tensors.items() if not name.endswith(PRIVATE)}


def product(weights: Mapping[str, Tensor], module: str) -> Float[Tensor, "d_out d_in"]:
    """B A of one module, without the scale."""
    return weights[f"{module}.lora_B"] @ weights[f"{module}.lora_A"]


def aggregation_gap(clients: Sequence[Mapping[str, Tensor]], num_examples: Sequence[int]) -> float:
    """How far averaging the factors separately is from averaging the products.

    ||mean(BA) - mean(B) mean(A)|| / ||mean(BA)||, Frobenius over all modules; 0 where every product is zero.
    Only someone who holds every client's pair can compute it: a simulation, never the server. A private pair counts
    for nothing here: it is not averaged.
    """
    clients = [without_private(client) for client in clients]
    sums = RunningSums()
    for client, n in zip(clients, num_examples, strict=True):
        for name, value in [*client.items(), *((m, product(client, m)) for m in modules(client))]:
            sums.fold(name, value, n)
    mean_factors = sums.means(clients[0])
    gap = norm = 0.0
    for module in modules(clients[0]):
        of_products = sums.mean(module)
        gap += float((of_products - product(mean_factors, module)).square().sum())
        norm += float(of_products.square().sum())
    return (gap / norm) ** 0.5 if norm else 0.0
