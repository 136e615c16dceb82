"""Load a sequence classification model, whose head is drawn from the run's seed where the base has none.

| the base's head | what is used |
|---|---|
| none | a head drawn from a public stream of run.seed, so that all sites start from the same head |
| the same number of classes, unnamed ("LABEL_0") or with the run's names in the run's order | that head |
| the run's names in another order | refused, with the base's order |
| other classes | a new head, as if there were none; the log says so |
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedveil import rng
from fedveil.config import RunConfig
from fedveil.contract.adapter import Adapter
from fedveil.errors import ConfigError, TaskError
from fedveil.models import bundled, loading
from fedveil.models.library_logging import first_line, quiet_libraries
from fedveil.models.loaded_model import LoadedModel
from fedveil.models.param_locations import param_locations

__all__ = ["load_sequence_classifier"]

_POOLER = ".pooler."  # in the names of tensors that a base without a classification head may lack, such as BERT's
_UNNAMED = "LABEL_"  # before the number of a class to which transformers knows no name
_STD = 0.02  # of a new head's weights, where the base's config has no initializer_range
_ROUNDING = 1e-2  # relative to the largest value: above that of bf16, and below the effect of another token
log = logging.getLogger("fedveil.models")


def load_sequence_classifier(
    config: RunConfig, adapter: Adapter, device: torch.device, tiny_folder: Path | None, classes: Sequence[str]
) -> LoadedModel:
    """Load the base `config.task.model` as a classifier of texts into `classes`, with `adapter` attached, on `device`.

    Linear layers of the head are trained even where the adapter's targets do not include them.

    Raises:
        TaskError: the base cannot be loaded completely apart from its head, has the classes in another order, or
            gives other logits for a text that is padded on the right.
        ConfigError: the adapter fits no layer of the base, or the base does not support task.max-tokens.
    """
    name, found = config.task.model, loading.find_model(config.task.model, tiny_folder)
    if found[0] == "tiny":
        raise TaskError(
            f"task.model: expected the folder of the tiny base of text generation, found none; {bundled.HOW_TO_GET_IT}"
        )
    with quiet_libraries():
        model, tokenizer, absent = _load(config, adapter, device, found, classes)
        heads = _head_modules(model, name)
        _check_absent(name, absent, heads)
        _draw(model, absent, rng.initial_stream(config.run.seed, "classification head"))
        heads += sorted({key.rpartition(_POOLER)[0] + _POOLER.rstrip(".") for key in absent if _POOLER in key})
        is_causal = _check_reading(model, tokenizer, name)
        linear = [at for at, m in model.named_modules() if isinstance(m, nn.Linear) and _is_within(at, heads)]
        trained = adapter.including(linear).attach(model)
    context = context_of(model, tokenizer, config)
    model = loading.prepare_model(model, config, device)
    places = param_locations(model, trained) if adapter.trains_base else {}
    return LoadedModel(model, tokenizer, trained, context, heads=tuple(heads), is_causal=is_causal, places=places)


def _load(
    config: RunConfig, adapter: Adapter, device: torch.device, found: tuple[str, bool], classes: Sequence[str]
) -> tuple[Any, Any, set[str]]:
    """Return model, tokenizer, and the names of the tensors that are still to be drawn."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    name, (where, is_local) = config.task.model, found
    arguments = loading.library_arguments(is_local)
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **arguments)
        base = AutoConfig.from_pretrained(where, **arguments)
        is_kept = _has_head(base, classes, name)
        base.num_labels = len(classes)
        base.id2label, base.label2id = dict(enumerate(classes)), {each: i for i, each in enumerate(classes)}
        base.problem_type = "multi_label_classification" if config.task.multi_label else "single_label_classification"
        base.pad_token_id = _padding_token(tokenizer, name)
        model, info = AutoModelForSequenceClassification.from_pretrained(
            where, config=base, **arguments, output_loading_info=True, ignore_mismatched_sizes=True,
            **_precision(config, adapter, device, base),
        )  # fmt: skip
    except (TaskError, ConfigError):
        raise
    except Exception as error:  # as in `loading.load_model`
        raise TaskError(
            f'task.model: cannot load "{name}" as a sequence classification model with its tokenizer '
            f"({first_line(error)}); {loading.NEXT}"
        ) from None
    if getattr(base, "is_encoder_decoder", False):
        raise TaskError(
            f'task.model: expected an encoder (BERT) or a decoder (Llama), found an encoder-decoder in "{name}"; use '
            "another base"
        )
    absent = {*info["missing_keys"], *(str(key[0]) for key in info["mismatched_keys"])}
    if not is_kept:
        heads = _head_modules(model, name)
        absent |= {key for key, _ in model.named_parameters() if _is_within(key, heads)}
    tokenizer.truncation_side = "right"
    return model.eval(), tokenizer, absent


def _has_head(base: Any, classes: Sequence[str], name: str) -> bool:
    """Return whether the base's head is one for `classes`. Raises TaskError for the same classes in another order."""
    if not any("ForSequenceClassification" in each for each in base.architectures or ()):
        return False
    own = [str(label) for _, label in sorted(base.id2label.items())]
    if own == list(classes) or (len(own) == len(classes) and all(label.startswith(_UNNAMED) for label in own)):
        return True
    if sorted(own) == sorted(classes):
        raise TaskError(
            f'task.class-names: expected the order of the classes of "{name}", {", ".join(own)}, found '
            f"{', '.join(classes)}; give them in that order"
        )
    log.warning(
        'task.model: the classes of "%s" (%s) are not those of task.class-names; its head is replaced by a new one',
        name, loading.name_some(own),
    )  # fmt: skip
    return False


def _padding_token(tokenizer: Any, name: str) -> int:
    """Return the token that fills up a batch: a decoder finds the end of a text by it."""
    token = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if token is None:
        raise TaskError(
            f'task.model: expected a tokenizer with a padding or an end token, found none in "{name}"; set its '
            "pad_token"
        )
    return int(token)


def _precision(config: RunConfig, adapter: Adapter, device: torch.device, base: Any) -> dict[str, Any]:
    """Return `loading.precision_arguments`; a quantized base keeps its head, which is exported whole, as it is."""
    arguments = loading.precision_arguments(config, adapter, device)
    if "quantization_config" in arguments:
        from transformers import AutoModelForSequenceClassification

        with torch.device("meta"):
            bare = AutoModelForSequenceClassification.from_config(base)
        arguments["quantization_config"].llm_int8_skip_modules = [*_head_modules(bare, config.task.model), "pooler"]
    return arguments


def _head_modules(model: Any, name: str) -> list[str]:
    """Return the modules with weights that are not part of the base model itself."""
    parts = dict(model.named_children())
    heads = [at for at, m in parts.items() if m is not model.base_model and next(m.parameters(), None) is not None]
    if model.base_model is model or not heads:
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


@torch.no_grad()
def _check_reading(model: Any, tokenizer: Any, name: str) -> bool:
    """Return whether a token reads only those before it, as in a decoder.

    Raises TaskError for a model whose logits change with padding at the end of a text, such as XLNet.
    """
    device, padding = next(model.parameters()).device, model.config.pad_token_id
    text = [int(padding == i) + i for i in range(1, 4)]
    ids = torch.tensor([text + [padding] * 3], device=device)
    mask = (torch.arange(ids.shape[1], device=device) < len(text)).long()[None]
    short, alone, padded = (
        model(input_ids=ids[:, :k], attention_mask=mask[:, :k], output_hidden_states=True)
        for k in (len(text) - 1, len(text), ids.shape[1])
    )
    if not _are_close(alone.logits, padded.logits):
        raise TaskError(
            "task.model: expected a model whose logits do not depend on padding at the end of a text, found "
            f'{type(model).__name__} in "{name}"; use another base'
        )
    return _are_close(short.hidden_states[-1][:, 0], alone.hidden_states[-1][:, 0])


def _are_close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.float(), b.float(), atol=_ROUNDING * float(a.abs().max()), rtol=0.0)


def accepted_inputs(model: Any, tokenizer: Any) -> tuple[str, ...]:
    """Return the further inputs, besides token ids and mask, that tokenizer and model share: token types."""
    taken: Mapping[str, Any] = inspect.signature(model.forward).parameters
    return tuple(name for name in ("token_type_ids",) if name in tokenizer.model_input_names and name in taken)


def context_of(model: Any, tokenizer: Any, config: RunConfig) -> int | None:
    """Return the maximum number of tokens. Raises ConfigError if it is below task.max-tokens.

    The tokenizer's limit counts too: RoBERTa has positions for two tokens fewer than its config says.
    """
    text = model.config.get_text_config()
    limits = [getattr(text, "max_position_embeddings", None), getattr(text, "n_positions", None)]
    known = [limit for limit in (*limits, tokenizer.model_max_length) if type(limit) is int and limit < 1 << 30]
    context = min(known, default=None)
    if context is not None and config.task.max_tokens > context:
        raise ConfigError(
            f"task.max-tokens: expected at most {context}, the context of {config.task.model}, found "
            f"{config.task.max_tokens}; lower it"
        )
    return context
