"""Load an image classification model: with its weights, with a new head, or from scratch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedveil import rng
from fedveil.config import RunConfig
from fedveil.contract.adapter import Adapter
from fedveil.errors import ConfigError, TaskError
from fedveil.models import base_files, classification_head, from_scratch, loading
from fedveil.models.library_logging import first_line, quiet_libraries
from fedveil.models.loaded_model import LoadedModel

__all__ = ["load_image_classifier"]

_PREPROCESSOR = "preprocessor_config.json"


def load_image_classifier(
    config: RunConfig, adapter: Adapter, device: torch.device, tiny_vit: Mapping[str, int]
) -> LoadedModel:
    """Load the image classification model `config.task.model` with `adapter` attached, on `device`.

    Two kinds of models start from scratch with task.num-classes classes: "tiny", a ViT with the sizes `tiny_vit`, and
    with task.from-scratch, a folder that has config.json but no weights. If such a model gets an adapter, its frozen
    weights are drawn from a public stream of run.seed, so they are the same at all sites. The head is drawn in the same
    way if a model with weights has none for task.class-names; see `classification_head`. The linear layers of a new
    head are trained even if the adapter's targets do not include them.

    Raises:
        TaskError: the model is of a different kind, is incomplete, cannot start from scratch, or has the run's classes
            in a different order.
        ConfigError: the adapter fits none of its layers, or a model without weights is to be quantized.
    """
    name, heads = config.task.model, list[str]()
    with quiet_libraries():
        from transformers import AutoImageProcessor

        where, is_local = loading.find_model(name, None)
        try:
            bare = from_scratch.model_config_of(where, is_local, config, tiny_vit)
            processor = None
            if not is_local or (where != "tiny" and (Path(where) / _PREPROCESSOR).is_file()):
                processor = AutoImageProcessor.from_pretrained(where, **loading.library_arguments(is_local))
            if bare is None:
                model, heads = _load(config, adapter, device, where, is_local)
            else:
                if classes := config.task.class_list:
                    classification_head.name_classes(bare, classes, config.task.multi_label)
                model = from_scratch.draw_model(bare, rng.initial_stream(config.run.seed, "base model"))
        except (TaskError, ConfigError):
            raise
        except Exception as error:  # as in `loading.load_model`
            raise TaskError(
                f'task.model: cannot load "{name}" as an image classification model ({first_line(error)}); '
                f"{loading.NEXT}"
            ) from None
        draw = None
        if bare is not None:
            _check_bare(model, config)
            model = model.to(loading.precision_arguments(config, adapter, device)["dtype"])
            draw = partial(from_scratch.draw_tensors, bare)
        trained = adapter.including(classification_head.linear_layers(model, heads)).attach(model)
    model = loading.prepare_model(model, config, device)
    return LoadedModel(model, None, trained, None, processor, draw=draw, heads=tuple(heads))


def _load(
    config: RunConfig, adapter: Adapter, device: torch.device, where: str, is_local: bool
) -> tuple[Any, list[str]]:
    """Return a model with weights, and the modules of its new head; there are none if its own head is used."""
    from transformers import AutoConfig, AutoModelForImageClassification

    name, classes = config.task.model, config.task.class_list
    arguments: dict[str, Any] = loading.library_arguments(is_local)
    precision = loading.precision_arguments(config, adapter, device)
    base = AutoConfig.from_pretrained(where, **arguments)
    is_kept = not classes or classification_head.has_head(base, "ForImageClassification", classes, name)
    if classes:
        classification_head.name_classes(base, classes, config.task.multi_label)
    if not is_kept:
        if "quantization_config" in precision:
            with torch.device("meta"):
                skipped = classification_head.find_heads(AutoModelForImageClassification.from_config(base), name)
            precision["quantization_config"].llm_int8_skip_modules = skipped
        arguments["ignore_mismatched_sizes"] = True
    model, info = AutoModelForImageClassification.from_pretrained(
        where, config=base, **arguments, output_loading_info=True, **precision
    )
    heads = list[str]()
    if is_kept:
        loading.check_whole(name, info)
    else:
        stream = rng.initial_stream(config.run.seed, "classification head")
        heads = classification_head.complete_head(model, info, False, name, stream)
    base_files.check_loaded_base(name, model, trains_base=adapter.trains_base)
    return model, heads


def _check_bare(model: Any, config: RunConfig) -> None:
    """Raise an error for a model that cannot start from scratch."""
    if config.train.quantized_base != "none":
        raise ConfigError(
            f'train.quantized-base: a model without weights cannot be quantized ("{config.train.quantized_base}"); '
            'set it to "none"'
        )
    if any(at.endswith("running_mean") for at, _ in model.named_buffers()):
        raise TaskError(
            f'task.model: {type(model).__name__} in "{config.task.model}" has batch normalization, so it cannot '
            "start from scratch; use a model with weights, or a ViT"
        )
