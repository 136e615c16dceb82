"""The head of a classifier, which is drawn from the run's seed where the base has none for the run's classes.

| the base's head | what is used |
|---|---|
| none | a head drawn from a public stream of run.seed, so that all sites start from the same head |
| the same number of classes, unnamed ("LABEL_0") or with the run's names in the run's order | that head |
| the run's names in another order | refused, with the base's order |
| other classes | a new head, as if there were none; the log says so |
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
_UNNAMED = "LABEL_"  # before the number of a class to which transformers knows no name
_STD = 0.02  # of a new head's weights, where the base's config has no initializer_range
log = logging.getLogger("fedveil.models")


def has_head(base: Any, kind: str, classes: Sequence[str], name: str) -> bool:
    """Return whether the base's head is one for `classes`.

    Args:
        base: the config of the base.
        kind: the part that the architectures with such a head have in their names.
        name: task.model, for errors.

    Raises:
        TaskError: the head has the same classes in another order.
    """
    if not any(kind in each for each in base.architectures or ()):
        return False
    own = [str(label) for _, label in sorted(base.id2label.items())]
    if own == list(classes) or (len(own) == len(classes) and all(label.startswith(_UNNAMED) for label in own)):
        return True
    if sorted(own) == sorted(classes):
        raise TaskError(
            f'task.class-names: expected the class names in the order of "{name}", found another order; set '
            f"{format_class_names(own)}"
        )
    log.warning(
        'task.model: the classes of "%s" (%s) are not those of task.class-names; its head is replaced by a new one',
        name, loading.name_some(own),
    )  # fmt: skip
    return False


def name_classes(base: Any, classes: Sequence[str], multi_label: bool) -> None:
    """Set the classes of the config of a base, before it is loaded with them."""
    base.num_labels = len(classes)
    base.id2label, base.label2id = dict(enumerate(classes)), {each: i for i, each in enumerate(classes)}
    base.problem_type = "multi_label_classification" if multi_label else "single_label_classification"


def complete_head(model: Any, info: Mapping[str, Any], is_kept: bool, name: str, stream: rng.RandomStream) -> list[str]:
    """Draw the tensors of a model's head that its files lack, and return the head's modules and those that were drawn.

    Args:
        info: the library's report of loading.
        is_kept: whether the base's own head is used, as far as its files have it.
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
    """Return the modules with weights that are not part of the base model itself."""
    parts = dict(model.named_children())
    base = model.base_model if model.base_model is not model else parts.get("vision_model")  # CLIP's and SigLIP's
    heads = [at for at, m in parts.items() if m is not base and next(m.parameters(), None) is not None]
    if base is None or not heads:
        raise TaskError(
            f'task.model: expected a model with a classification head, found {type(model).__name__} in "{name}" '
            f"without; {loading.NEXT}"
        )
    return heads


def _is_within(name: str, modules: Sequence[str]) -> bool:
    """Return whether a module or tensor is one of `modules`, or inside one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _check_absent(name: str, absent: Collection[str], heads: Sequence[str]) -> None:
    """Refuse a base that lacks more than a head and its pooler."""
    lacking = sorted(key for key in absent if not _is_within(key, heads) and _POOLER not in key)
    if lacking:
        raise TaskError(
            f'task.model: expected all weights of the model apart from its head, but "{name}" lacks '
            f"{loading.name_some(lacking)} or has them in another shape; {loading.NEXT}"
        )


@torch.no_grad()
def _draw(model: Any, names: Collection[str], stream: rng.RandomStream) -> None:
    """Draw tensors by sorted name, as BERT's authors do: weights normal, biases 0, the gains of a norm 1."""
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
