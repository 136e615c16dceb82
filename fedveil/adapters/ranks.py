"""Ranks by site: pairs of factors of which a site trains and sends its first rows of A and columns of B alone.

The run says which site has which rank, from 1 to the adapter's. All sites have the adapter's shapes, and what lies
beyond a site's rank is zero there and stays so: the same as pairs of that rank. It saves bytes on the way up and
nothing of the computing. A site cannot choose: an upload of another rank is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from fedveil.algebra.factors import factor, modules
from fedveil.contract.codec import Coded
from fedveil.contract.layout import Field, Payload
from fedveil.contract.spec import Spec
from fedveil.errors import ConfigError, WireError
from fedveil.foreign import shown

Ranks = Mapping[str, int]
T = TypeVar("T")


def check(ranks: Ranks, most: int) -> None:
    """Raises ConfigError for a rank that is below 1 or above the adapter's."""
    for site, rank in ranks.items():
        if not 1 <= rank <= most:
            raise ConfigError(
                f"ranks.{shown(site, 80)}: expected an integer from 1 to adapter.rank, {most}, found {rank}"
            )


def of(ranks: Ranks, site: str, most: int) -> int:
    """A site's rank: the adapter's, where the run names no other."""
    return ranks.get(site, most)


def beyond(spec: Spec | Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """True for what a site of this rank does not train (`Trainer.train`'s `frozen`); nothing where it trains all."""
    found: dict[str, Tensor] = {}
    for name, tensor in spec.items():
        side = factor(name)
        rows = torch.arange(tensor.shape[0 if side == "A" else 1]) >= rank
        if bool(rows.any()):
            found[name] = rows[:, None] if side == "A" else rows[None]
    return found


def cut(factors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The first rows of A and columns of B."""
    return {name: w[:rank] if factor(name) == "A" else w[:, :rank] for name, w in factors.items()}


def padded(factors: Mapping[str, Tensor], spec: Spec) -> dict[str, Tensor]:
    """The factors in the spec's shapes, with zeros beyond their rank."""
    found: dict[str, Tensor] = {}
    for name, w in factors.items():
        whole = w.new_zeros(spec[name].shape)
        whole[: w.shape[0], : w.shape[1]] = w
        found[name] = whole
    return found


def fields(up: tuple[Field, ...], ranks: Ranks) -> tuple[Field, ...]:
    """Fields of an upload whose inner width is the site's; as they are where all sites have one rank."""
    return tuple(map(_open, up)) if ranks else up


def _open(field: Field) -> Field:
    a, b = field.largest
    return replace(field, shape=(None, b) if factor(field.name) == "A" else (a, None), most=(a, b))


def check_upload(payload: Payload, ranks: Ranks, site: str, most: int) -> None:
    """Raises WireError unless every factor of an upload has the rank that the run gives this site.

    Where no site is named: one rank for all factors, from 1 to the adapter's.
    """
    shapes = {name: _shape(value) for name, value in payload.fields.items()}
    first = f"{modules(shapes)[0]}.lora_A"
    wanted = of(ranks, site, most) if site else shapes[first][0]
    for name, shape in shapes.items():
        found = shape[0 if factor(name) == "A" else 1]
        if found != wanted or not 1 <= found <= most:
            whose = f"the rank of site {shown(site, 80)}" if site else f"one rank for all factors, 1 to {most}"
            raise WireError(f"{name}: expected rank {wanted}, {whose}, found {found}; see ranks in method.fields")


def _shape(value: object) -> tuple[int, ...]:
    tensor = value.codes if isinstance(value, Coded) else value
    if not isinstance(tensor, Tensor):
        raise WireError(f"upload: expected factors, found {type(tensor).__name__}")
    return tuple(tensor.shape)
