"""A frozen CLIP: its text features for given contexts, and its image features.

A text is [SOS][context][class name].[EOS]; the context is given in the token embedding space. The text tower is causal,
so [SOS] and the context have the same hidden states in the texts of all classes. These are computed once. The names
attend to them, in groups of names with the same length.

    hidden(name) = layer(name; keys and values of [SOS], context and name)      each group: classes x tokens, no padding
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fedveil.adapters import load as saved
from fedveil.adapters import prompt_tensors
from fedveil.adapters.prompt import PromptAdapter
from fedveil.config import RunConfig
from fedveil.contract.adapter import Adapter
from fedveil.errors import StateError, TaskError
from fedveil.models import base_files, loading
from fedveil.models.library_logging import quiet_libraries
from fedveil.models.loaded_model import LoadedModel

__all__ = ["ClassTexts", "EncodedImage", "class_features", "encode_images", "load_clip"]

PLACEHOLDER = "X"


def load_clip(config: RunConfig, adapter: Adapter, device: torch.device, tiny_folder: Path | None) -> LoadedModel:
    """Load the CLIP model `config.task.model` with a prompt, on `device`; the model itself is not trained.

    Raises:
        TaskError: the model or its processor cannot be loaded completely, or is not a CLIP with a causal text tower.
        ConfigError: the context leaves no room for a class name in the text tower.
    """
    name = config.task.model
    with quiet_libraries():
        from transformers import AutoProcessor, CLIPModel

        kind, where = "a CLIP with its processor", loading.find_model(name, tiny_folder)
        model, processor = loading.load_model(config, adapter, device, where, CLIPModel, AutoProcessor, kind)
    if not hasattr(processor, "image_processor"):
        raise TaskError(f'task.model: expected a processor of images and text, found none in "{name}"; {loading.NEXT}')
    if processor.tokenizer.bos_token_id is None:
        raise TaskError(f'task.model: the tokenizer of "{name}" has no start token; set its bos_token')
    base_files.check_loaded_base(name, model, processor.tokenizer)
    model = model.to(device).eval()
    context: int = model.config.text_config.max_position_embeddings
    return LoadedModel(model, processor.tokenizer, adapter.attach(model), context, processor)


@dataclass(frozen=True)
class EncodedImage:
    """Features of one image from the frozen tower, and its class.

    Attributes:
        points: (1, D) the whole image, followed by its patches if the prompt's form needs them; norm 1.
        label: the image's class.
    """

    points: Float[Tensor, "points D"]
    label: int

    @property
    def length(self) -> int:
        """Return 1, because all images have the same size."""
        return 1


@final
class ClassTexts:
    """The texts for a fixed list of classes, with any context vectors.

    Raises:
        TaskError: there are no names, or duplicates, or a name does not fit after `length` vectors.
    """

    def __init__(self, base: LoadedModel, names: Sequence[str], length: int) -> None:
        if len(set(names)) != len(names) or not names:
            double = sorted({name for name in names if names.count(name) > 1})
            raise TaskError(
                f"task.class-names: there must be at least one name and no duplicates, found {double or 'none'}; "
                "correct them"
            )
        self._model, self._tokenizer = base.model, base.tokenizer
        self._device = base.model.device
        tokens = [[*self._tokens(f"{name}."), base.tokenizer.eos_token_id] for name in names]
        for name, ids in zip(names, tokens, strict=True):
            if base.context is not None and 1 + length + len(ids) > base.context:
                raise TaskError(
                    f'task.class-names: with "{name}", [SOS], {length} vectors, name and [EOS] take '
                    f"{1 + length + len(ids)} tokens, but the model supports {base.context}; shorten the name, or "
                    "lower adapter.length"
                )
        by_length = sorted(range(len(names)), key=lambda i: len(tokens[i]))
        self._groups: list[Int[Tensor, "classes tokens"]] = [
            torch.tensor([tokens[i] for i in alike], device=self._device)
            for _, alike in groupby(by_length, key=lambda i: len(tokens[i]))
        ]
        self._order = torch.tensor(by_length, device=self._device).argsort()

    def _tokens(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return token_ids

    @torch.no_grad()
    def written(self, text: str) -> Float[Tensor, "b d"]:
        """Return the context for a text: the embeddings of its tokens."""
        ids = torch.tensor(self._tokens(text), device=self._device)
        embeddings: Tensor = self._model.text_model.embeddings.token_embedding(ids)
        return embeddings.float()

    def features(self, contexts: Float[Tensor, "prompts b d"]) -> Float[Tensor, "prompts classes D"]:
        """Return unit-norm fp32 features. They are differentiable in the contexts, also by torch.func."""
        tower = self._model.text_model
        token, position = tower.embeddings.token_embedding, tower.embeddings.position_embedding.weight
        prompts, before = contexts.shape[0], 1 + contexts.shape[1]
        start = token(torch.tensor([[self._tokenizer.bos_token_id]], device=self._device)).expand(prompts, -1, -1)
        first = torch.cat([start, contexts.to(start.dtype)], dim=1) + position[:before]
        names = [token(ids) + position[before : before + ids.shape[1]] for ids in self._groups]
        names = [name.expand(prompts, -1, -1, -1) for name in names]
        for layer in tower.encoder.layers:
            first, names = _through(layer, first, names)
        ends = torch.cat([name[:, :, -1] for name in names], dim=1)[:, self._order]
        text_features: Tensor = self._model.text_projection(tower.final_layer_norm(ends))
        return torch.nn.functional.normalize(text_features.float(), dim=-1)


def class_features(
    folder: Path, model: Any, tokenizer: Any, names: Sequence[str]
) -> Float[Tensor, "prompts classes D"]:
    """Return the class texts' features of norm 1, for the prompt that a run wrote to `folder`, its final/ folder.

    The logits for an image with features f of norm 1, from the same model, are
    `model.logit_scale.exp() * f @ class_features(...)[0].T`. A prompt of the form "transport" has two texts per class;
    see `fedveil.adapters.prompt_tensors.class_similarities`.

    Raises:
        StateError, ConfigError: like `load.load_adapter`; also an adapter that is not a prompt.
        TaskError: like `ClassTexts`.
    """
    adapter, trained = saved.load_adapter(folder, model)
    if not isinstance(adapter, PromptAdapter):
        raise StateError(f'{folder}: expected an adapter of kind "prompt", found "{adapter.kind}"; use load_adapter')
    base = LoadedModel(model, tokenizer, trained, model.config.text_config.max_position_embeddings)
    with torch.no_grad():
        return ClassTexts(base, names, adapter.length).features(prompt_tensors.context_vectors(adapter, trained))


def _through(
    layer: Any, first: Float[Tensor, "prompts m d"], names: list[Tensor]
) -> tuple[Float[Tensor, "prompts m d"], list[Tensor]]:
    """Apply one text-tower layer to [SOS] and context, which attend only to themselves, and to the groups of names.

    Each group has shape (prompts, classes, n, d).
    """
    attention = layer.self_attn

    def seen(hidden: Tensor, context: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        normed = layer.layer_norm1(hidden)
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        q, k, v = (p(normed).unflatten(-1, (attention.num_heads, -1)).transpose(-3, -2) for p in projections)
        scores = q @ k.mT
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
        if context is not None:  # einsum, because a broadcasting product would copy the context for every class
            scores = torch.cat([torch.einsum("pchne,phme->pchnm", q, context[0]), scores], dim=-1)
        weights = (scores * attention.scale).float().softmax(-1).to(v.dtype)
        if context is None:
            mixed = weights @ v
        else:
            m = context[1].shape[-2]
            mixed = torch.einsum("pchnm,phme->pchne", weights[..., :m], context[1]) + weights[..., m:] @ v
        hidden = hidden + attention.out_proj(mixed.transpose(-3, -2).flatten(-2))
        return hidden + layer.mlp(layer.layer_norm2(hidden)), k, v

    new, k, v = seen(first, None)
    return new, [seen(group, (k, v))[0] for group in names]


@torch.no_grad()
def encode_images(base: LoadedModel, pictures: Sequence[Any], patches: bool) -> Float[Tensor, "rows points D"]:
    """Return each whole image's features, then those of its patches if `patches`; norm 1, fp32, on the CPU."""
    model = base.model
    with quiet_libraries():
        pixels = base.processor.image_processor(images=list(pictures), return_tensors="pt")["pixel_values"]
    hidden = model.vision_model(pixel_values=pixels.to(model.device, model.dtype)).last_hidden_state
    points = model.visual_projection(model.vision_model.post_layernorm(hidden if patches else hidden[:, :1]))
    return torch.nn.functional.normalize(points.float(), dim=-1).cpu()
