"""Images whose class is the position of a square, which a ViT without position embeddings cannot learn."""

from __future__ import annotations

import io
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from PIL import Image
from torch import Tensor

from fedveil.contract.task import Example
from fedveil.data import images
from fedveil.data.image_decoding import decode_image

_COLOUR = (255, 0, 255)
_GREY = (128, 128, 128)
_CONTRAST = 0.1  # of the image behind the square: at 1, the square's position is not learned in 300 steps


def mark_positions(examples: Sequence[Example], classes: int, grid: int, seed: int) -> list[Example]:
    """Make each image in the column `image` almost gray, and cover one of its first `classes` cells.

    The index of the covered cell in the grid x grid, counted by rows from the upper left, becomes the `label`; it is
    drawn from `seed`. If `grid` is a ViT's image_size / patch_size, cells are its patches, and images of all classes
    have the same patches in a different order.
    """
    drawn = random.Random(seed)
    return [_covered(example, drawn.randrange(classes), grid) for example in examples]


def _covered(example: Example, cell: int, grid: int) -> Example:
    picture = decode_image(images.image_bytes(example, "image"), example.where, "RGB")
    faint = Image.blend(Image.new("RGB", picture.size, _GREY), picture, _CONTRAST)
    across, down = picture.width // grid, picture.height // grid
    left, top = cell % grid * across, cell // grid * down
    faint.paste(_COLOUR, (left, top, left + across, top + down))
    held = io.BytesIO()
    faint.save(held, format="png")
    return replace(example, values={**example.values, "image": {"bytes": held.getvalue(), "path": None}, "label": cell})


def without_positions(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Set the position embedding to zeros, so that the ViT's output does not depend on the order of patches."""
    return {name: torch.zeros_like(w) if "position_embeddings" in name else w for name, w in weights.items()}
