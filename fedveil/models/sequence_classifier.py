"""Load a classifier of texts or of tokens, whose head may be drawn from the run's seed; see `classification_head`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedveil import rng
from fedveil.config import RunConfig
from fedveil.contract.adapter import Adapter
from fedveil.errors import ConfigError, TaskError
from fedveil.models import base_files, bundled, classification_head, loading
from fedveil.models.library_logging import first_line, quiet_libraries
from fedveil.models.loaded_model import LoadedModel
from fedveil.models.param_locations import param_locations

__all__ = ["OF_TEXTS", "OF_TOKENS", "ClassifierKind", "load_sequence_classifier"]

# Relative to the largest value: larger than bf16 rounding, and smaller than the effect of another token.
_ROUNDING = 1e-2


@dataclass(frozen=True)
class ClassifierKind:
    """A kind of classifier: of texts or of tokens.

    Attributes:
        auto_class: the transformers class that loads these models.
        head: the part that the architectures with this head have in their names.
        words: the words for such a model in an error.
    """

    auto_class: str
    head: str
    words: str

    @property
    def loader(self) -> Any:
        """Return transformers' class that loads such models."""
        import transformers

        return getattr(transformers, self.auto_class)


OF_TEXTS = ClassifierKind(
    "AutoModelForSequenceClassification", "ForSequenceClassification", "a sequence classification model"
)
OF_TOKENS = ClassifierKind("AutoModelForTokenClassification", "ForTokenClassification", "a token classification model")


def load_sequence_classifier(
    config: RunConfig,
    adapter: Adapter,
    device: torch.device,
    tiny_folder: Path | None,
    classes: Sequence[str],
    kind: ClassifierKind = OF_TEXTS,
) -> LoadedModel:
    """Load the base `config.task.model` as a classifier into `classes`, with `adapter` attached, on `device`.

    Linear layers of the head are trained even if the adapter's targets do not include them.

    Raises:
        TaskError: the base, apart from its head, cannot be loaded completely; it has the classes in a different order;
            or its logits change if a text is padded on the right.
        ConfigError: the adapter fits no layer of the base, or the base does not support task.max-tokens.
    """
    name, found = config.task.model, loading.find_model(config.task.model, tiny_folder)
    if found[0] == "tiny":
        raise TaskError(f"task.model: the tiny base of text generation is not installed; {bundled.HOW_TO_GET_IT}")
    with quiet_libraries():
        model, tokenizer, info, is_kept = _load(config, adapter, device, found, classes, kind)
        stream = rng.initial_stream(config.run.seed, "classification head")
        heads = classification_head.complete_head(model, info, is_kept, name, stream)
        base_files.check_loaded_base(name, model, tokenizer, adapter.trains_base)
        is_causal = _check_reading(model, tokenizer, name)
        trained = adapter.including(classification_head.linear_layers(model, heads)).attach(model)
    context = context_of(model, tokenizer, config)
    model = loading.prepare_model(model, config, device)
    places = param_locations(model, trained) if adapter.trains_base else {}
    return LoadedModel(model, tokenizer, trained, context, heads=tuple(heads), is_causal=is_causal, places=places)


def _load(
    config: RunConfig,
    adapter: Adapter,
    device: torch.device,
    found: tuple[str, bool],
    classes: Sequence[str],
    kind: ClassifierKind,
) -> tuple[Any, Any, dict[str, Any], bool]:
    """Return the model, tokenizer, the library's loading report, and whether the base's own head is used."""
    from transformers import AutoConfig, AutoTokenizer

    name, (where, is_local) = config.task.model, found
    arguments = loading.library_arguments(is_local)
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **arguments)
        base = AutoConfig.from_pretrained(where, **arguments)
        is_kept = classification_head.has_head(base, kind.head, classes, name)
        classification_head.name_classes(base, classes, config.task.multi_label)
        base.pad_token_id = _padding_token(tokenizer, name)
        model, info = kind.loader.from_pretrained(
            where, config=base, **arguments, output_loading_info=True, ignore_mismatched_sizes=True,
            **_precision(config, adapter, device, base, kind),
        )  # fmt: skip
    except (TaskError, ConfigError):
        raise
    except Exception as error:  # as in `loading.load_model`
        raise TaskError(
            f'task.model: cannot load "{name}" as {kind.words} with its tokenizer ({first_line(error)}); {loading.NEXT}'
        ) from None
    if getattr(base, "is_encoder_decoder", False):
        raise TaskError(f'task.model: "{name}" is an encoder-decoder; use an encoder (BERT) or a decoder (Llama)')
    tokenizer.truncation_side = "right"
    return model.eval(), tokenizer, info, is_kept


def _padding_token(tokenizer: Any, name: str) -> int:
    """Return the padding token, which a decoder also uses to find the end of a text."""
    token = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if token is None:
        raise TaskError(
            f'task.model: the tokenizer of "{name}" has neither a padding token nor an end token; set its pad_token'
        )
    return int(token)


def _precision(
    config: RunConfig, adapter: Adapter, device: torch.device, base: Any, kind: ClassifierKind
) -> dict[str, Any]:
    """Return `loading.precision_arguments`; in a quantized base, the head, which is exported, is not quantized."""
    arguments = loading.precision_arguments(config, adapter, device)
    if "quantization_config" in arguments:
        with torch.device("meta"):
            bare = kind.loader.from_config(base)
        arguments["quantization_config"].llm_int8_skip_modules = [
            *classification_head.find_heads(bare, config.task.model),
            "pooler",
        ]
    return arguments


@torch.no_grad()
def _check_reading(model: Any, tokenizer: Any, name: str) -> bool:
    """Return whether each token attends only to the tokens before it, as in a decoder.

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
    of_text = padded.logits[:, : len(text)] if padded.logits.ndim == 3 else padded.logits  # of tokens, or of the text
    if not _are_close(alone.logits, of_text):
        raise TaskError(
            f'task.model: the logits of {type(model).__name__} in "{name}" depend on padding at the end of a text; '
            "use another base"
        )
    return _are_close(short.hidden_states[-1][:, 0], alone.hidden_states[-1][:, 0])


def _are_close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.float(), b.float(), atol=_ROUNDING * float(a.abs().max()), rtol=0.0)


def accepted_inputs(model: Any, tokenizer: Any) -> tuple[str, ...]:
    """Return the inputs, besides token IDs and mask, that both tokenizer and model support: token types."""
    taken: Mapping[str, Any] = inspect.signature(model.forward).parameters
    return tuple(name for name in ("token_type_ids",) if name in tokenizer.model_input_names and name in taken)


def context_of(model: Any, tokenizer: Any, config: RunConfig) -> int | None:
    """Return the maximum number of tokens. Raises ConfigError if it is below task.max-tokens.

    The tokenizer's limit also applies, because RoBERTa has positions for two tokens fewer than its config says.
    """
    text = model.config.get_text_config()
    limits = [getattr(text, "max_position_embeddings", None), getattr(text, "n_positions", None)]
    known = [limit for limit in (*limits, tokenizer.model_max_length) if type(limit) is int and 0 < limit < 1 << 30]
    context = min(known, default=None)
    if context is not None and config.task.max_tokens > context:
        raise ConfigError(
            f"task.max-tokens: expected at most {context}, the context of {config.task.model}, found "
            f"{config.task.max_tokens}; lower it"
        )
    return context
