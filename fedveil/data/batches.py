"""Encoded examples, their batches, the order within an epoch, and the transfer of batches to the device."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["EncodedExample", "ExampleBatch", "LabelledBatch", "TokenBatch", "TokenExample", "epoch_order"]

WINDOW = 32  # batches within which bucketing sorts: enough for batches of similar length, but far from a sorted epoch

_In = TypeVar("_In")
_Out = TypeVar("_Out")
_Same = TypeVar("_Same")  # not Self, because the tests' shape checker does not support it


@runtime_checkable
class ExampleBatch(Protocol):
    """The interface that local training needs from a batch, whatever the task."""

    @property
    def terms(self) -> int:
        """Return the number of terms in the loss: target tokens or images."""
        ...

    @property
    def tokens(self) -> int:
        """Return the number of tokens in all examples, without padding; 0 for a task without tokens."""
        ...

    def pinned(self: _Same) -> _Same:
        """Return the batch in page-locked memory."""
        ...

    def to(self: _Same, device: torch.device) -> _Same:
        """Return the batch on `device`."""
        ...


@dataclass(frozen=True)
class LabelledBatch:
    """A batch of images or image features, with their classes (int64) or with 1.0 or 0.0 for each class."""

    inputs: Float[Tensor, "rows ..."]
    labels: Tensor

    @property
    def terms(self) -> int:
        """Return the number of images, which is the number of terms in the loss."""
        return len(self.labels)

    @property
    def tokens(self) -> int:
        """Return 0, because images have no tokens."""
        return 0

    def pinned(self) -> LabelledBatch:
        """Return the batch in page-locked memory, whose copy to a GPU is asynchronous."""
        return LabelledBatch(self.inputs.pin_memory(), self.labels.pin_memory())

    def to(self, device: torch.device) -> LabelledBatch:
        """Return the batch on `device`; pinned memory is copied asynchronously."""
        return LabelledBatch(self.inputs.to(device, non_blocking=True), self.labels.to(device, non_blocking=True))


@runtime_checkable
class EncodedExample(Protocol):
    """The interface that `epoch_order` needs from an example."""

    @property
    def length(self) -> int:
        """Return the length that bucketing sorts by."""
        ...


_Batch = TypeVar("_Batch", bound=ExampleBatch)


@dataclass(frozen=True)
class TokenExample:
    """One encoded example: token `ids`, with the target starting at position `start`.

    `gaps`: the ranges of positions after `start` that are not targets, in order; these are the questions between
    answers.
    `cut`: what the length limit truncated: 0 nothing, 1 the end of the source, 2 also the end of the target.
    `whole`: the number of tokens before truncation; 0 if unknown.
    """

    ids: list[int]
    start: int
    gaps: tuple[tuple[int, int], ...] = field(default=(), kw_only=True)
    cut: int = field(default=0, compare=False, kw_only=True)
    whole: int = field(default=0, compare=False, kw_only=True)

    @property
    def length(self) -> int:
        """Return the number of tokens."""
        return len(self.ids)

    def targets(self, whole: bool = False) -> list[int]:
        """Return the positions of the target tokens or, if `whole`, of all tokens but the first."""
        if whole:
            return list(range(1, len(self.ids)))
        starts = (max(1, self.start), *(end for _, end in self.gaps))
        ends = (*(start for start, _ in self.gaps), len(self.ids))
        return [at for start, end in zip(starts, ends, strict=True) for at in range(start, end)]


@dataclass(frozen=True)
class TokenBatch:
    """A batch of examples padded on the right.

    Attributes:
        ids, mask: the token ids, and a mask that is 1 except at padding.
        positions: the positions in the flattened `ids` at which the model predicts a target token.
        wanted: the target token for each of these positions.
        tokens: the number of tokens in all examples, without padding.
        inputs: additional model inputs, such as the images of all examples for a vision model.
    """

    ids: Int[Tensor, "rows length"]
    mask: Int[Tensor, "rows length"]
    positions: Int[Tensor, " terms"]
    wanted: Int[Tensor, " terms"]
    tokens: int
    inputs: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def terms(self) -> int:
        """Return the number of target tokens, which is the number of terms in the loss."""
        return len(self.wanted)

    def pinned(self) -> TokenBatch:
        """Return the batch in page-locked memory, whose copy to a GPU is asynchronous."""
        return self._each(Tensor.pin_memory)

    def to(self, device: torch.device) -> TokenBatch:
        """Return the batch on `device`; pinned memory is copied asynchronously."""
        return self._each(lambda t: t.to(device, non_blocking=True))

    def _each(self, change: Callable[[Tensor], Tensor]) -> TokenBatch:
        inputs = {name: change(value) for name, value in self.inputs.items()}
        ids, mask, positions, wanted = map(change, (self.ids, self.mask, self.positions, self.wanted))
        return TokenBatch(ids, mask, positions, wanted, self.tokens, inputs)


def round_up(length: int, multiple: int, limit: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `length`. If that exceeds `limit`, return the larger
    of `length` and `limit`."""
    return max(length, min(-(-length // multiple) * multiple, limit))


def collate_batch(
    rows: Sequence[TokenExample],
    padding: int,
    whole: bool = False,
    width: Callable[[int], int] = lambda longest: longest,
) -> TokenBatch:
    """Return one batch of `rows`, padded with `padding` to the longest row.

    If `whole`, the target of an example is all its tokens except the first. `width` maps the length of the longest
    example to the length of the batch.

    Positions are computed here, on the CPU: counting the target tokens of a mask on the GPU would mean waiting for the
    GPU.
    """
    length = width(max(len(row.ids) for row in rows))
    ids = [row.ids + [padding] * (length - len(row.ids)) for row in rows]
    mask = [[1] * len(row.ids) + [0] * (length - len(row.ids)) for row in rows]
    targets = [row.targets(whole) for row in rows]
    positions = [i * length + at - 1 for i, each in enumerate(targets) for at in each]
    wanted = [row.ids[at] for row, each in zip(rows, targets, strict=True) for at in each]
    tokens = sum(len(row.ids) for row in rows)
    # torch would create a float tensor from an empty list.
    where, target = (torch.tensor(values, dtype=torch.int64) for values in (positions, wanted))
    return TokenBatch(torch.tensor(ids), torch.tensor(mask), where, target, tokens)


def epoch_order(
    rows: Sequence[EncodedExample], batch_size: int, generator: torch.Generator, bucketing: bool
) -> list[int]:
    """Return the indices for one epoch, with every example once: shuffled, or in shuffled batches of similar length.

    With `bucketing`, the examples are shuffled, sorted by length within windows of WINDOW batches, and split into
    batches, which are then shuffled. Only the last batch may be short; its examples are random.
    """
    shuffled: list[int] = torch.randperm(len(rows), generator=generator).tolist()
    if not bucketing:
        return shuffled
    window, full = WINDOW * batch_size, len(shuffled) // batch_size
    whole, short = shuffled[: full * batch_size], shuffled[full * batch_size :]
    alike = [
        index
        for i in range(0, len(whole), window)
        for index in sorted(whole[i : i + window], key=lambda j: rows[j].length)
    ]
    cuts: list[int] = torch.randperm(full, generator=generator).tolist()
    batched = [index for cut in cuts for index in alike[cut * batch_size : (cut + 1) * batch_size]]
    return batched + short


def load_batches(
    steps: Iterable[_In], collated: Callable[[_In], list[_Batch]], device: torch.device
) -> Generator[list[_Batch]]:
    """Yield the batches of each step on `device`; for a GPU, they are collated one step ahead into pinned memory."""
    if device.type != "cuda":
        for rows in steps:
            yield [batch.to(device) for batch in collated(rows)]
        return
    for batches in prefetch(steps, lambda rows: [batch.pinned() for batch in collated(rows)]):
        yield [batch.to(device) for batch in batches]


def prefetch(items: Iterable[_In], work: Callable[[_In], _Out]) -> Iterator[_Out]:
    """Yield `work(item)` in order, computed one item ahead in a thread; exceptions are also raised in order."""
    with ThreadPoolExecutor(1, "batches") as pool:
        pending = None
        for item in items:
            following = pool.submit(work, item)
            if pending is not None:
                yield pending.result()
            pending = following
        if pending is not None:
            yield pending.result()
