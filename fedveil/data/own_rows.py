"""Rows and batches for your own model. An item of the data set is read only when a batch needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final, overload

from torch import Tensor
from typing_extensions import override

from fedveil.contract.task import Example, Examples
from fedveil.errors import TaskError

__all__ = ["OwnBatch", "OwnExample", "OwnRow", "OwnRows", "describe_batch", "map_tensors"]


@dataclass(frozen=True)
class OwnExample(Example):
    """Row `values["row"]` of a data set that the model file returned."""

    dataset: Any = None


@dataclass(frozen=True)
class OwnRow:
    """One row, not yet read."""

    dataset: Any
    index: int
    where: str

    @property
    def length(self) -> int:
        """Return 1, so that bucketing keeps the rows in their order."""
        return 1


@final
class OwnRows(Sequence[OwnRow]):
    """The rows of the examples, in order; slicing returns a list."""

    def __init__(self, examples: Examples) -> None:
        rows = []
        for example in examples:
            if not isinstance(example, OwnExample):
                raise TaskError(
                    f"examples: {example.where} is not a row of your model's dataset(); use the rows of `Task.examples`"
                )
            rows.append(OwnRow(example.dataset, int(example.values["row"]), example.where))
        self._rows = rows

    @override
    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> OwnRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[OwnRow]: ...
    @override
    def __getitem__(self, index: int | slice) -> OwnRow | list[OwnRow]:
        return self._rows[index]


@dataclass(frozen=True)
class OwnBatch:
    """A batch of `count` rows from the file's collate(); the loss is a mean over these rows."""

    content: Any
    count: int

    @property
    def terms(self) -> int:
        """Return the number of rows."""
        return self.count

    @property
    def tokens(self) -> int:
        """Return 0, because FedVeil does not know the tokens of your own model."""
        return 0

    def pinned(self) -> OwnBatch:
        """Return the batch in page-locked memory."""
        return OwnBatch(map_tensors(self.content, lambda t: t.pin_memory()), self.count)

    def to(self, device: Any) -> OwnBatch:
        """Return the batch on `device`."""
        return OwnBatch(map_tensors(self.content, lambda t: t.to(device, non_blocking=True)), self.count)


def map_tensors(content: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the content with `change` applied to each tensor in its tuples, lists and mappings (returned as dicts)."""
    if isinstance(content, Tensor):
        return change(content)
    if isinstance(content, Mapping):
        return {name: map_tensors(value, change) for name, value in content.items()}
    if isinstance(content, tuple) and hasattr(content, "_fields"):
        return type(content)(*(map_tensors(value, change) for value in content))
    if isinstance(content, list | tuple):
        return type(content)(map_tensors(value, change) for value in content)
    return content


def describe_batch(content: Any) -> str:
    """Return the shapes and dtypes in a batch, without any values: (float32[16, 4], int64[16])."""
    if isinstance(content, Tensor):
        return f"{str(content.dtype).removeprefix('torch.')}{list(content.shape)}"
    if isinstance(content, Mapping):
        return "{" + ", ".join(f"{name}: {describe_batch(value)}" for name, value in content.items()) + "}"
    if isinstance(content, list | tuple):
        shown = ", ".join(describe_batch(value) for value in content[:8]) + (", ..." if len(content) > 8 else "")
        return f"({shown})" if isinstance(content, tuple) else f"[{shown}]"
    return type(content).__name__
