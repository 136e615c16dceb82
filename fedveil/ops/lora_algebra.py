"""LoRA factors by name: `<module>.lora_A` (r x d_in) and `<module>.lora_B` (d_out x r); W = W_0 + scale * B A.

As in the papers, "A" is the randomly initialized factor and "B" the factor that starts at zero.
An adapter of kind "hadamard-lora" has a second pair per module, `<module>.private_A` and `<module>.private_B`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from fedveil.errors import ConfigError
from fedveil.ops.running_sums import RunningSums

Factor = Literal["A", "B"]
T = TypeVar("T")
FACTORS: tuple[Factor, Factor] = ("A", "B")
PRIVATE = (".private_A", ".private_B")


def factor_name(name: str) -> Factor:
    """Return which factor a tensor's name denotes. Raises ConfigError for a tensor that is not a factor."""
    for side in FACTORS:
        if name.endswith(f".lora_{side}"):
            return side
    raise ConfigError(f'{name}: expected a LoRA factor ("<module>.lora_A" or ".lora_B"); use an adapter of kind "lora"')


def parse_factor_name(tensors: Mapping[str, T], side: Factor) -> dict[str, T]:
    """Return the entries for one factor."""
    return {name: value for name, value in tensors.items() if factor_name(name) == side}


def factor_modules(names: Iterable[str]) -> list[str]:
    """Return the modules that have a pair, in order. Raises ConfigError for a module with only one factor."""
    by_side = {side: [n.removesuffix(f".lora_{side}") for n in names if factor_name(n) == side] for side in FACTORS}
    alone = set(by_side["A"]) ^ set(by_side["B"])
    if alone:
        raise ConfigError(f"{sorted(alone)[0]}: expected both LoRA factors, found only one; share the whole adapter")
    return by_side["A"]


def held_factors(names: Iterable[str], side: Factor) -> dict[str, Tensor]:
    """Return masks that freeze these factors in training (`Trainer.train`)."""
    return {name: torch.tensor(True) for name in names if factor_name(name) == side}


def drop_private_factors(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the entries that do not belong to a private pair."""
    return {name: value for name, value in tensors.items() if not name.endswith(PRIVATE)}


def factor_product(weights: Mapping[str, Tensor], module: str) -> Float[Tensor, "d_out d_in"]:
    """Return B A for one module, without the scale."""
    return weights[f"{module}.lora_B"] @ weights[f"{module}.lora_A"]


def aggregation_gap(clients: Sequence[Mapping[str, Tensor]], num_examples: Sequence[int]) -> float:
    """Return how far averaging the factors separately deviates from averaging the products.

    ||mean(BA) - mean(B) mean(A)|| / ||mean(BA)||, Frobenius over all modules; 0 if every product is zero.
    It needs every client's pair, so a simulation can compute it, but the server never can. Private pairs
    do not count, because they are not averaged.
    """
    clients = [drop_private_factors(client) for client in clients]
    sums = RunningSums()
    for client, n in zip(clients, num_examples, strict=True):
        for name, value in [*client.items(), *((m, factor_product(client, m)) for m in factor_modules(client))]:
            sums.fold(name, value, n)
    mean_factors = sums.means(clients[0])
    gap = norm = 0.0
    for module in factor_modules(clients[0]):
        of_products = sums.mean(module)
        gap += float((of_products - factor_product(mean_factors, module)).square().sum())
        norm += float(of_products.square().sum())
    return (gap / norm) ** 0.5 if norm else 0.0
