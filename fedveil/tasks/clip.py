"""A frozen CLIP: its texts under given contexts, and its images as features.

A text is [SOS][context][class name].[EOS], the context given in the space of the token embeddings. The text tower is
causal, so [SOS] and context give the same in the text of every class. They are computed once: all texts go through
the tower as one sequence, and a token sees the context and its own class alone.

    [SOS] ctx_1 ... ctx_b | name_1 . [EOS] | name_2 . [EOS] | ...      positions restart after the bar
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fedveil.adapters import Prompt
from fedveil.config import RunConfig
from fedveil.errors import ConfigError, TaskError
from fedveil.tasks import models
from fedveil.tasks.library import quiet

GROUP = 128  # classes in one sequence: attention costs its square
PLACEHOLDER = "X"


def load(config: RunConfig, adapter: Prompt, device: torch.device) -> models.Base:
    """The CLIP of `config.task.model` with a prompt beside it, on `device`; nothing of the model itself is trained.

    Raises:
        TaskError: the model or its processor cannot be loaded whole, or is no CLIP with a causal text tower.
        ConfigError: a context that leaves no room for a name in the text tower.
    """
    name = config.task.model
    with quiet():
        from transformers import AutoProcessor, CLIPModel

        kind = "a CLIP with its processor"
        model, processor = models.loaded(config, adapter, device, CLIPModel, AutoProcessor, kind)
    if not hasattr(processor, "image_processor"):
        raise TaskError(f'task.model: expected a processor of images and text, found none in "{name}"; {models.NEXT}')
    if processor.tokenizer.bos_token_id is None:
        raise TaskError(
            f'task.model: expected a tokenizer with a start token, found none in "{name}"; set its bos_token'
        )
    model.requires_grad_(False)
    model.text_model.set_attn_implementation("eager")  # the others have no second level of torch.func
    model = model.to(device).eval()
    width: int = model.config.text_config.hidden_size
    trained = {n: nn.Parameter(torch.zeros(s, device=device)) for n, s in adapter.shapes(width).items()}
    context: int = model.config.text_config.max_position_embeddings
    if adapter.length > context - 3:
        raise ConfigError(
            f"adapter.length: expected at most {context - 3}, which leaves room for a name in a text of {context} tokens, "
            f"found {adapter.length}; lower it"
        )
    return replace(models.Base(model, processor.tokenizer, trained, context), processor=processor)


@dataclass(frozen=True)
class Seen:
    """One image as the frozen tower sees it, and its class.

    Attributes:
        points: (1, D) the image as a whole, and after it its patches where the prompt's form needs them; norm 1.
        label: its class.
    """

    points: Float[Tensor, "points D"]
    label: int

    @property
    def length(self) -> int:
        """1: all images are of one size."""
        return 1


@dataclass(frozen=True)
class Views:
    """A batch of images with their classes."""

    points: Float[Tensor, "rows points D"]
    labels: Int[Tensor, " rows"]

    @property
    def terms(self) -> int:
        """Images, the terms of the loss."""
        return len(self.labels)

    @property
    def tokens(self) -> int:
        """None."""
        return 0

    def pinned(self) -> Views:
        """The batch in page-locked memory, from which a copy to a GPU need not be waited for."""
        return Views(self.points.pin_memory(), self.labels.pin_memory())

    def to(self, device: torch.device) -> Views:
        """The batch on `device`; pinned memory is copied without waiting."""
        return Views(self.points.to(device, non_blocking=True), self.labels.to(device, non_blocking=True))


@dataclass(frozen=True)
class _Group:
    """The names of some classes as one sequence.

    Attributes:
        ids: tokens of all names, each with its stop and [EOS].
        owner: the class of each token.
        position: of each token in its name, from 0.
        ends: where the [EOS] of each class is.
    """

    ids: Int[Tensor, " tokens"]
    owner: Int[Tensor, " tokens"]
    position: Int[Tensor, " tokens"]
    ends: Int[Tensor, " classes"]


@final
class Texts:
    """The texts of a fixed list of classes, under any context.

    Raises:
        TaskError: no names, two equal ones, or one that has no room after `length` vectors.
    """

    def __init__(self, base: models.Base, names: Sequence[str], length: int) -> None:
        if len(set(names)) != len(names) or not names:
            double = sorted({name for name in names if names.count(name) > 1})
            raise TaskError(
                f"task.class-names: expected different names, at least one, found {double or 'none'}; correct them"
            )
        self._model, self._tokenizer = base.model, base.tokenizer
        self._device = base.model.device
        tokens = [[*self._tokens(f"{name}."), base.tokenizer.eos_token_id] for name in names]
        for name, ids in zip(names, tokens, strict=True):
            if base.context is not None and 1 + length + len(ids) > base.context:
                raise TaskError(
                    f"task.class-names: expected at most {base.context} tokens in [SOS], {length} vectors, name and [EOS], "
                    f'found {1 + length + len(ids)} with "{name}"; shorten the name, or lower adapter.length'
                )
        self._groups = [self._group(tokens[i : i + GROUP]) for i in range(0, len(tokens), GROUP)]

    def _tokens(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def _group(self, tokens: list[list[int]]) -> _Group:
        flat = [(token, i, at) for i, ids in enumerate(tokens) for at, token in enumerate(ids)]
        ids, owner, position = (torch.tensor(column, device=self._device) for column in zip(*flat, strict=True))
        ends = torch.tensor([len(ids) for ids in tokens], device=self._device).cumsum(0) - 1
        return _Group(ids, owner, position, ends)

    @torch.no_grad()
    def written(self, text: str) -> Float[Tensor, "b d"]:
        """The context that words make: the embeddings of their tokens."""
        found: Tensor = self._model.text_model.embeddings.token_embedding(
            torch.tensor(self._tokens(text), device=self._device)
        )
        return found.float()

    def features(self, contexts: Float[Tensor, "prompts b d"]) -> Float[Tensor, "prompts classes D"]:
        """Features of norm 1, fp32. Differentiable in the contexts."""
        found = torch.cat([self._of(group, contexts) for group in self._groups], dim=1).float()
        return torch.nn.functional.normalize(found, dim=-1)

    def _of(self, group: _Group, contexts: Tensor) -> Tensor:
        tower = self._model.text_model
        embeddings, prompts = tower.embeddings, contexts.shape[0]
        before = 1 + contexts.shape[1]
        start = torch.tensor([self._tokenizer.bos_token_id], device=self._device)
        first, names = (embeddings.token_embedding(ids).expand(prompts, -1, -1) for ids in (start, group.ids))
        position = torch.cat([torch.arange(before, device=self._device), before + group.position])
        whole = torch.cat([first, contexts.to(first.dtype), names], dim=1) + embeddings.position_embedding(position)
        hidden = tower.encoder(
            inputs_embeds=whole, attention_mask=self._mask(group, before, whole.dtype)
        ).last_hidden_state
        found: Tensor = self._model.text_projection(tower.final_layer_norm(hidden[:, before + group.ends]))
        return found

    def _mask(self, group: _Group, before: int, dtype: torch.dtype) -> Float[Tensor, "1 1 tokens tokens"]:
        """What is added to attention scores: 0 where a token sees another."""
        owner = torch.cat([torch.full((before,), -1, device=self._device), group.owner])
        sees = ((owner[None] == owner[:, None]) | (owner[None] == -1)).tril()
        zeros = torch.zeros(sees.shape, dtype=dtype, device=self._device)
        return zeros.masked_fill(~sees, torch.finfo(dtype).min)[None, None]


@torch.no_grad()
def images(base: models.Base, pictures: Sequence[Any], patches: bool) -> Float[Tensor, "rows points D"]:
    """Features of norm 1 on the CPU, fp32: of the image as a whole, and with `patches` of each of its patches after it."""
    model = base.model
    with quiet():
        pixels = base.processor.image_processor(images=list(pictures), return_tensors="pt")["pixel_values"]
    hidden = model.vision_model(pixel_values=pixels.to(model.device, model.dtype)).last_hidden_state
    points = model.visual_projection(model.vision_model.post_layernorm(hidden if patches else hidden[:, :1]))
    return torch.nn.functional.normalize(points.float(), dim=-1).cpu()
