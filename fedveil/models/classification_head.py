"""The classification head, which is drawn from the run's seed if the base has none for the run's classes.

| the base's head | result |
|---|---|
| no head | a head drawn from a public stream of run.seed, so that all sites start from the same head |
| the same number of classes, unnamed ("LABEL_0") or with the run's names in the run's order | that head is used |
| the run's names in a different order | an error that shows the base's order |
| other classes | a new head, as if the base had none; the log says so |
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fedveil import rng
from fedveil.data.class_names import format_class_names
from fedveil.errors import TaskError
from fedveil.models import loading

__all__ = ["complete_head", "find_heads", "has_head", "linear_layers", "name_classes"]

_POOLER = ".pooler."  # in the names of tensors that a base without a classification head may lack, such as BERT's
_UNNAMED = "LABEL_"  # transformers' prefix for the number of an unnamed class
_STD = 0.02  # standard deviation of a new head's weights, if the base's config has no initializer_range
log = logging.getLogger("fedveil.models")


def has_head(base: Any, kind: str, classes: Sequence[str], name: str) -> bool:
    """Return whether the base's head is meant for `classes`.

    Args:
        base: the base's config.
        kind: the part of an architecture's name that shows that it has such a head.
        name: task.model, for errors.

    Raises:
        TaskError: the head has the same classes in a different order.
    """
    if not any(kind in each for each in base.architectures or ()):
        return False
    own = [str(label) for _, label in sorted(base.id2label.items())]
    if own == list(classes) or (len(own) == len(classes) and all(label.startswith(_UNNAMED) for label in own)):
        return True
    if sorted(own) == sorted(classes):
        raise TaskError(
            f'task.class-names: expected the class names in the order of "{name}", found a different order; set '
            f"{format_class_names(own)}"
        )
    log.warning(
        'task.model: the classes of "%s" (%s) are not those of task.class-names; its head is replaced by a new one',
        name, loading.name_some(own),
    )  # fmt: skip
    return False


def name_classes(base: Any, classes: Sequence[str], multi_label: bool) -> None:
    """Set the classes in a base's config, before the base is loaded with it."""
    base.num_labels = len(classes)
    base.id2label, base.label2id = dict(enumerate(classes)), {each: i for i, each in enumerate(classes)}
    base.problem_type = "multi_label_classification" if multi_label else "single_label_classification"


def complete_head(model: Any, info: Mapping[str, Any], is_kept: bool, name: str, stream: rng.RandomStream) -> list[str]:
    """Draw the head tensors missing from the model's files; return the modules of the head and any drawn pooler.

    Args:
        info: the library's loading report.
        is_kept: whether to use the base's own head, as far as its files contain it.
        name: task.model, for errors.

    Raises:
        TaskError: the model has no head, or lacks more than its head and a pooler.
    """
    heads = find_heads(model, name)
    absent = {*info["missing_keys"], *(str(key[0]) for key in info["mismatched_keys"])}
    if not is_kept:
        absent |= {key for key, _ in model.named_parameters() if _is_within(key, heads)}
    _check_absent(name, absent, heads)
    _draw(model, absent, stream)
    return heads + sorted({key.rpartition(_POOLER)[0] + _POOLER.rstrip(".") for key in absent if _POOLER in key})


def linear_layers(model: Any, heads: Sequence[str]) -> list[str]:
    """Return the names of the linear layers inside `heads`."""
    return [at for at, m in model.named_modules() if isinstance(m, nn.Linear) and _is_within(at, heads)]


def find_heads(model: Any, name: str) -> list[str]:
    """Return the modules that have weights but are not part of the base model itself."""
    parts = dict(model.named_children())
    base = model.base_model if model.base_model is not model else parts.get("vision_model")  # CLIP's and SigLIP's
    heads = [at for at, m in parts.items() if m is not base and next(m.parameters(), None) is not None]
    if base is None or not heads:
        raise TaskError(
            f'task.model: expected a model with a classification head, found {type(model).__name__} in "{name}" '
            f"without one; {loading.NEXT}"
        )
    return heads


def _is_within(name: str, modules: Sequence[str]) -> bool:
    """Return whether a module or tensor is one of `modules` or belongs to one of them."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _check_absent(name: str, absent: Collection[str], heads: Sequence[str]) -> None:
    """Raise TaskError for a base that lacks more than a head and its pooler."""
    lacking = sorted(key for key in absent if not _is_within(key, heads) and _POOLER not in key)
    if lacking:
        raise TaskError(
            f'task.model: expected all weights of the model apart from its head, but "{name}" lacks '
            f"{loading.name_some(lacking)} or has them in another shape; {loading.NEXT}"
        )


@torch.no_grad()
def _draw(model: Any, names: Collection[str], stream: rng.RandomStream) -> None:
    """Draw tensors in order of their names, initialized as in BERT: normal weights, zero biases, norm gains of 1."""
    generator = stream.torch_generator()
    std = getattr(model.config, "initializer_range", None) or _STD
    for name in sorted(names):
        parameter = model.get_parameter(name)
        if name.endswith("bias"):
            drawn = torch.zeros(parameter.shape)
        elif parameter.ndim < 2:
            drawn = torch.ones(parameter.shape)
        else:
            drawn = torch.randn(parameter.shape, generator=generator) * std
        parameter.copy_(drawn)
