"""Random binary masks over tensors: their keys and their algebra.

    B ~ Bernoulli(keep) for every entry, keep = 1 - R            drawn once for each client and mask period

One key for each distinct `keep` determines a set of masks: the masks of all tensors with that `keep`, in the order of
their names, are one mask cut into pieces (`fedveil.wire.seeded.expand` of the key). Server and client expand a key in
the same way.

| case | result |
|---|---|
| keep = 0, keep = 1 | all False, all True, exactly |
| a masked value that is not finite | `pack` drops it |
| more or fewer values than the mask has ones | `unpack` raises WireError |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from fedveil.errors import ConfigError, WireError
from fedveil.rng import Stream
from fedveil.wire.seeded import KEY_BYTES

_BLOCK = 1 << 18  # entries at a time, which stay in the cache together with the positions of their ones
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

Rate = float | Mapping[str, float]  # R of all tensors, or by regular expression over names; the first match counts


def check_rate(field: str, rate: Rate) -> None:
    """Raises ConfigError unless every R is from 0 to 1 and every pattern is a regular expression."""
    for pattern, value in rate.items() if isinstance(rate, Mapping) else [("", rate)]:
        where = f"{field}.{pattern}" if pattern else field
        if not 0.0 <= value <= 1.0:
            raise ConfigError(f"{where}: expected a probability of zero from 0 to 1, found {value}")
        check_pattern(where, pattern)


def check_pattern(field: str, pattern: str) -> None:
    """Raises ConfigError unless `pattern` is a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{field}: expected a regular expression, found {pattern!r} ({error})") from None


def keeps(rate: Rate, names: Iterable[str]) -> dict[str, float]:
    """1 - R, the probability of a one, by tensor name; 1 for a name that no pattern of a map matches."""
    if not isinstance(rate, Mapping):
        return dict.fromkeys(names, 1.0 - rate)
    return {n: 1.0 - next((r for pattern, r in rate.items() if re.search(pattern, n)), 0.0) for n in names}


def is_random(keep: float) -> bool:
    """Whether a mask with this `keep` has to be drawn: it is neither all False nor all True."""
    return 0.0 < keep < 1.0


def draw_keys(stream: Stream, keep: Mapping[str, float]) -> dict[float, bytes]:
    """A new key for every distinct `keep` that needs one."""
    return {k: stream.bytes(KEY_BYTES) for k in sorted(set(filter(is_random, keep.values())))}


def expanded(
    keys: Mapping[float, bytes], keep: Mapping[str, float], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    """The masks that the keys stand for, one tensor at a time in the order of names; only for tensors that need one."""
    streams = {k: Stream(key) for k, key in keys.items()}
    for name in sorted(n for n, k in keep.items() if is_random(k)):
        yield name, streams[keep[name]].bernoulli(keep[name], shapes[name])


def pack(value: Float[Tensor, "*s"], mask: Bool[Tensor, "*s"]) -> Float[Tensor, " n"]:
    """The entries under the mask's ones, in row-major order."""
    if value.is_cuda:
        return value[mask.to(value.device)]
    source = _words(value)
    # numpy's memory comes in huge pages, torch's does not
    target = np.empty(int(torch.count_nonzero(mask)), source.dtype)
    for at, start, ones in _blocks(mask):
        np.take(source[start : start + _BLOCK], ones, out=target[at : at + len(ones)], mode="clip")
    return torch.from_numpy(target).view(value.dtype)


def check_count(name: str, values: Float[Tensor, " n"], mask: Bool[Tensor, "..."]) -> None:
    """Raises WireError unless there are as many values as the mask has ones."""
    if (ones := int(torch.count_nonzero(mask))) != len(values):
        raise WireError(f"{name}: expected {ones} values, as many as its mask has ones, found {len(values)}")


def unpack(name: str, values: Float[Tensor, " n"], mask: Bool[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """The values in their places, zeros elsewhere. Raises WireError unless there are as many as the mask has ones."""
    check_count(name, values, mask)
    if values.is_cuda:
        mask = mask.to(values.device)
        return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter_(mask, values)
    source = _words(values)
    target = np.zeros(mask.numel(), source.dtype)
    for at, start, ones in _blocks(mask):
        target[start : start + _BLOCK][ones] = source[at : at + len(ones)]
    return torch.from_numpy(target).view(values.dtype).reshape(mask.shape)


def _blocks(mask: Bool[Tensor, "..."]) -> Iterator[tuple[int, int, NDArray[np.intp]]]:
    """For every block: the number of ones before it, its start, and the positions of its ones within it."""
    entries, before = mask.reshape(-1).numpy(), 0
    for start in range(0, len(entries), _BLOCK):
        ones = np.flatnonzero(entries[start : start + _BLOCK])
        yield before, start, ones
        before += len(ones)


def _words(tensor: Tensor) -> NDArray[Any]:
    """The tensor, flat, as integers of the same width, for numpy has no bfloat16. Copied if it is not contiguous."""
    return tensor.reshape(-1).view(_INTEGERS[tensor.element_size()]).numpy()
