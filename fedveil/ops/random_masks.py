"""Random binary masks over tensors: their keys and their algebra.

    B ~ Bernoulli(keep) for every entry, keep = 1 - R            drawn once for each client and mask period

One key for each distinct `keep` determines a set of masks: the tensors with that `keep` are numbered from 0 in name
order, and each has its own keystream (`chacha20`). Server and client expand a key in the same way, each on its own
device.

| case | result |
|---|---|
| keep = 0, keep = 1 | all False, all True, exactly |
| 0-d mask | one draw |
| a larger shape, same key and number | its first entries equal those of the smaller shape |
| a masked value that is not finite | `pack_masked` drops it |
| more or fewer values than the mask has ones | `unpack_masked` raises WireError |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from fedveil.errors import ConfigError, WireError
from fedveil.ops import chacha20, triton_available
from fedveil.rng import RandomStream
from fedveil.wire.seeded_masks import KEY_BYTES

_BLOCK = 1 << 18  # entries at a time, which stay in the cache together with the positions of their ones
_CPU = torch.device("cpu")
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

Rate = float | Mapping[str, float]  # R for all tensors, or by regular expression over names; the first match counts


def check_rate(field: str, rate: Rate) -> None:
    """Raise ConfigError unless every R is from 0 to 1 and every pattern is a regular expression."""
    for pattern, value in rate.items() if isinstance(rate, Mapping) else [("", rate)]:
        where = f"{field}.{pattern}" if pattern else field
        if not 0.0 <= value <= 1.0:
            raise ConfigError(f"{where}: expected the probability of a zero, from 0 to 1, found {value}")
        check_pattern(where, pattern)


def check_pattern(field: str, pattern: str) -> None:
    """Raise ConfigError unless `pattern` is a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{field}: expected a regular expression, found {pattern!r} ({error})") from None


def keep_probability(rate: Rate, names: Iterable[str]) -> dict[str, float]:
    """Return 1 - R, the probability of a one, by tensor name; 1 for a name that matches no pattern."""
    if not isinstance(rate, Mapping):
        return dict.fromkeys(names, 1.0 - rate)
    return {n: 1.0 - next((r for pattern, r in rate.items() if re.search(pattern, n)), 0.0) for n in names}


def is_random(keep: float) -> bool:
    """Return whether a mask with this `keep` must be drawn, because it is neither all False nor all True."""
    return 0.0 < keep < 1.0


def draw_mask_keys(stream: RandomStream, keep: Mapping[str, float]) -> dict[float, bytes]:
    """Draw a new key for every distinct `keep` that needs one."""
    return {k: stream.bytes(KEY_BYTES) for k in sorted(set(filter(is_random, keep.values())))}


def expand_mask(
    key: bytes, keep: float, shape: tuple[int, ...], number: int = 0, device: torch.device | None = None
) -> Bool[Tensor, "..."]:
    """Return the mask for a key's tensor `number`: each entry is True with probability `keep`, equal on all devices.

    The mask is on `device`, by default the CPU. Raises ValueError like `chacha20.draw_mask`.
    """
    return chacha20.draw_mask(key, number, keep, shape, device or _CPU)


def expand_masks(
    keys: Mapping[float, bytes],
    keep: Mapping[str, float],
    shapes: Mapping[str, tuple[int, ...]],
    device: torch.device | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the keys' masks, one tensor at a time in name order, for the tensors that need one."""
    numbers = dict.fromkeys(keys, 0)
    for name in sorted(n for n, k in keep.items() if is_random(k)):
        k = keep[name]
        yield name, expand_mask(keys[k], k, shapes[name], numbers[k], device)
        numbers[k] += 1


def pack_masked(value: Float[Tensor, "*s"], mask: Bool[Tensor, "*s"]) -> Float[Tensor, " n"]:
    """Return the entries where the mask is True, in row-major order, on the value's device."""
    if value.device.type != "cpu":
        flat, there = value.reshape(-1), mask.to(value.device).reshape(-1)
        kernels = triton_available.load_kernels(value.device)
        return kernels.pack_masked(_integers(flat), there).view(value.dtype) if kernels else flat[there]
    source = _integers(value.reshape(-1)).numpy()
    # numpy allocates memory in huge pages, but torch does not
    target = np.empty(_ones(mask), source.dtype)
    for at, start, ones_at in _blocks(mask):
        np.take(source[start : start + _BLOCK], ones_at, out=target[at : at + len(ones_at)], mode="clip")
    return torch.from_numpy(target).view(value.dtype)


def check_count(name: str, values: Float[Tensor, " n"], mask: Bool[Tensor, "..."]) -> None:
    """Raise WireError unless there are as many values as the mask has ones."""
    _check(name, values, _ones(mask))


def unpack_masked(name: str, values: Float[Tensor, " n"], mask: Bool[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Return a tensor with the values where the mask is True and zeros elsewhere, on the values' device.

    Raises WireError unless there are as many values as the mask has ones.
    """
    if values.device.type != "cpu":
        return _unpacked_there(name, values, mask.to(values.device).reshape(-1)).view(mask.shape)
    check_count(name, values, mask)
    source = _integers(values).numpy()
    target = np.zeros(mask.numel(), source.dtype)
    for at, start, ones_at in _blocks(mask):
        target[start : start + _BLOCK][ones_at] = source[at : at + len(ones_at)]
    return torch.from_numpy(target).view(values.dtype).reshape(mask.shape)


def _unpacked_there(name: str, values: Tensor, mask: Tensor) -> Tensor:
    """Unpack flat values and a flat mask that are on a GPU."""
    if kernels := triton_available.load_kernels(values.device):
        ends, ones = kernels.count_masked(mask)
        _check(name, values, ones)
        return kernels.unpack_masked(_integers(values), mask, ends).view(values.dtype)
    _check(name, values, _ones(mask))
    return torch.zeros(len(mask), dtype=values.dtype, device=values.device).masked_scatter_(mask, values)


def _check(name: str, values: Tensor, ones: int) -> None:
    if ones != len(values):
        raise WireError(f"{name}: expected {ones} values, as many as its mask has ones, found {len(values)}")


def _ones(mask: Bool[Tensor, "..."]) -> int:
    return int(torch.count_nonzero(mask))


def _blocks(mask: Bool[Tensor, "..."]) -> Iterator[tuple[int, int, NDArray[np.intp]]]:
    """Yield, for every block, the number of ones before it, its start, and the positions of the ones within it."""
    entries, before = mask.reshape(-1).numpy(), 0
    for start in range(0, len(entries), _BLOCK):
        ones = np.flatnonzero(entries[start : start + _BLOCK])
        yield before, start, ones
        before += len(ones)


def _integers(flat: Tensor) -> Tensor:
    """View the tensor as integers of the same width, because numpy has no bfloat16, and NaN bits must not change."""
    return flat.view(_INTEGERS[flat.element_size()])
