"""A base model with its adapter, as used by a task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedveil.contract.param_spec import ParamLocation, Weights
from fedveil.errors import TaskError
from fedveil.rng import RandomStream

_ALIGNED = 64  # bytes, as torch aligns its tensors; with less, kernels may sum in a different order


@dataclass(frozen=True)
class LoadedModel:
    """A base model with its adapter.

    Attributes:
        model: the model in eval mode, so that there is no dropout (except in 4-bit layers, which have none);
            only `trained` requires gradients.
        tokenizer: has an end token. None for an image classifier.
        trained: the adapter's parameters by their canonical names, fp32, in the model's order.
        end_tokens: the tokens that end a text: the tokenizer's end token, and those in the base's generation config.
        context: maximum sequence length in tokens; None if the model sets no limit.
        processor: for a vision model, the object that converts images (and text) to its inputs; otherwise None.
        image_token: for a vision model, the token ID that stands for a part of an image.
        places: for a language model whose own tensors are trained, their locations in it.
        draw: for a model without weights, the function that draws all its parameters from a stream.
        heads: modules with no weights in the base's files, or that belong only to the task, such as a classification
            head. Exported adapters contain them in full.
        is_causal: for a text classifier, whether each token attends only to the tokens before it.
        lent: names of trained parameters that are temporarily the caller's tensors and must not be written to.
    """

    model: Any
    tokenizer: Any
    trained: Mapping[str, nn.Parameter]
    context: int | None
    processor: Any = None
    image_token: int | None = None
    draw: Callable[[RandomStream], Weights] | None = None
    places: Mapping[str, ParamLocation] = field(default_factory=dict)
    heads: tuple[str, ...] = ()
    is_causal: bool = False
    lent: set[str] = field(default_factory=set)
    end_tokens: tuple[int, ...] = ()

    def put(self, weights: Weights) -> None:
        """Copy `weights` into the trained parameters.

        Raises:
            TaskError: a tensor is missing or unknown, or has the wrong shape; in that case nothing has been copied.
        """
        self._check_names(weights)
        absent = {name: p for name, p in self.trained.items() if name in self.lent or _is_absent(p)}
        new = {name: _copied(self._fitting(weights, name), p) for name, p in absent.items()}
        for name in [] if len(absent) == len(self.trained) else weights:
            self._fitting(weights, name)
        for name, tensor in new.items():
            self.trained[name].data = tensor
        self.lent.clear()
        with torch.no_grad():
            for name, parameter in self.trained.items():
                if name not in new:
                    parameter.copy_(weights[name])

    def lend(self, weights: Weights) -> None:
        """Use `weights` as the trained parameters, read-only until other weights are loaded or they are dropped.

        Tensors that are not on the device, in fp32 and aligned are copied. Raises TaskError like `put`.
        """
        self._check_names(weights)
        tensors = {name: self._fitting(weights, name).detach() for name in self.trained}
        self.drop()
        for name, parameter in self.trained.items():
            parameter.data = tensors[name] if _is_like(tensors[name], parameter) else _copied(tensors[name], parameter)
        self.lent.update(self.trained)

    def take(self) -> dict[str, Tensor]:
        """Hand the trained tensors over to the caller; the model has no trained tensors until others are loaded."""
        tensors = {name: parameter.detach() for name, parameter in self.trained.items()}
        self.drop()
        return tensors

    def drop(self) -> None:
        """Free the trained parameters: until others are loaded, all entries are NaN and share one entry's memory."""
        for parameter in self.trained.values():
            parameter.data = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device).expand(
                parameter.shape
            )
        self.lent.clear()

    def _check_names(self, weights: Weights) -> None:
        for name in self.trained:
            if name not in weights:
                raise TaskError(f"weights: the tensor {name} is missing; send every tensor of the spec")
        for name in weights:
            if name not in self.trained:
                raise TaskError(f"weights: {name} is not a tensor of the spec; use the same adapter on both sides")

    def _fitting(self, weights: Weights, name: str) -> Tensor:
        weight = weights[name]
        if weight.shape != self.trained[name].shape:
            raise TaskError(
                f"weights: expected {name} of shape {tuple(self.trained[name].shape)}, found "
                f"{tuple(weight.shape)}; use the same base and adapter on both sides"
            )
        return weight


def _is_absent(parameter: Tensor) -> bool:
    """Return whether `drop` freed the parameter."""
    return parameter.numel() * parameter.itemsize > parameter.untyped_storage().nbytes()


def _copied(weight: Tensor, parameter: Tensor) -> Tensor:
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device).copy_(weight)


def _is_like(weight: Tensor, parameter: Tensor) -> bool:
    """Return whether a model computes bit-identical results with this tensor and with a copy of it."""
    same = weight.device == parameter.device and weight.dtype == parameter.dtype
    return same and weight.is_contiguous() and weight.data_ptr() % _ALIGNED == 0
