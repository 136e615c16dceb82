"""A base model with its adapter, as a task holds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fedveil.contract.spec import Place, Weights
from fedveil.errors import TaskError
from fedveil.rng import Stream


@dataclass(frozen=True)
class LoadedModel:
    """A base model with its adapter.

    Attributes:
        model: in eval mode (4-bit layers apart, which drop nothing), so nothing is dropped out; only `trained` asks
            for gradients.
        tokenizer: has an end token. None for a classifier of images.
        trained: the adapter's parameters by their canonical names, fp32, in the model's order.
        context: longest sequence of tokens; None where the model sets no limit.
        processor: of a model that sees: images (and text) to its inputs. None where a model comes without one.
        image_token: of a model that sees: the token id that stands for a part of an image.
        places: of a language model whose own tensors are trained: where they stand in it.
        draw: of a model that came without weights: all its parameters drawn from a stream.
    """

    model: Any
    tokenizer: Any
    trained: Mapping[str, nn.Parameter]
    context: int | None
    processor: Any = None
    image_token: int | None = None
    draw: Callable[[Stream], Weights] | None = None
    places: Mapping[str, Place] = field(default_factory=dict)

    def put(self, weights: Weights) -> None:
        """Copies `weights` into the trained parameters.

        Raises:
            TaskError: a tensor is missing, unknown or of another shape; then nothing was copied.
        """
        for name in self.trained:
            if name not in weights:
                raise TaskError(f"weights: expected {name}, found no such tensor; send every tensor of the spec")
        for name, weight in weights.items():
            if name not in self.trained:
                raise TaskError(
                    f"weights: expected the tensors of the spec, found {name}; use one adapter on both sides"
                )
            if weight.shape != self.trained[name].shape:
                raise TaskError(
                    f"weights: expected {name} of shape {tuple(self.trained[name].shape)}, found "
                    f"{tuple(weight.shape)}; use one base and one adapter on both sides"
                )
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(weights[name])
