"""A device that is none: its tensors say that they are not on the CPU, and are computed there all the same.

Inside `Pretended`, what is made on `DEVICE` or moved there is a `There`. As on a GPU, an operation with a tensor on
either side is an error, `numpy()` fails, and only a copy brings values back, which is counted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

DEVICE = torch.device("meta")
_CROSSING = {"aten::_to_copy", "aten::copy_", "aten::index", "aten::index_put_", "aten::index_put"}


class There(torch.Tensor):
    """A tensor on `DEVICE`."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> There:
        made = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), dtype=values.dtype, device=DEVICE
        )
        made.values = values
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func}: a tensor left the device that it is on")


class _Literals(TorchFunctionMode):
    """`torch.tensor`, which no dispatch sees."""

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and kwargs.get("device") == DEVICE:
            return func(*args, **kwargs | {"device": "cpu"}).to(DEVICE)
        return func(*args, **kwargs)


class Pretended(TorchDispatchMode):
    """The mode in which there is such a device. `back`: the bytes of every tensor that was copied to the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.back: list[int] = []
        self._literals = _Literals()

    def __enter__(self) -> Pretended:
        self._literals.__enter__()
        return super().__enter__()

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        self._literals.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs, name, tensors = dict(kwargs or {}), func._schema.name, []
        tree_map(lambda a: tensors.append(a) if isinstance(a, torch.Tensor) else None, (args, kwargs))
        there = [isinstance(a, There) for a in tensors]
        mixed = any(there) and any(not t and a.dim() for t, a in zip(there, tensors, strict=True))
        assert not mixed or name in _CROSSING, f"{func}: expected tensors on one device, found {tensors}"
        target = kwargs.get("device")
        if target is not None and torch.device(target) == DEVICE:
            kwargs["device"] = "cpu"
        result = func(*_values(args), **_values(kwargs))
        written = [
            given
            for declared, given in zip(func._schema.arguments, args, strict=False)
            if declared.alias_info is not None and declared.alias_info.is_write
        ]
        if written or "out" in kwargs:
            return written[0] if written else kwargs["out"]
        if name == "aten::_to_copy" and target is not None and torch.device(target).type == "cpu" and any(there):
            self.back.append(result.nbytes)
            return result.clone()
        if any(there) if target is None else torch.device(target) == DEVICE:
            return tree_map(lambda r: There(r) if isinstance(r, torch.Tensor) else r, result)
        return result


def _values(given: Any) -> Any:
    return tree_map(lambda a: a.values if isinstance(a, There) else a, given)
