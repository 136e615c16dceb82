"""A randomly initialized ViT, which is trained for both tables of random binary weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import ViTConfig


def from_scratch(model: Mapping[str, Any], classes: int, home: Path) -> dict[str, Any]:
    """Return the task section for a ViT with this configuration. `home` becomes its folder, without weights."""
    ViTConfig(**model, num_labels=classes).save_pretrained(home)
    return {
        "task.name": "image-classification",
        "task.model": str(home),
        "task.from-scratch": True,
        "task.target-column": "label",
        "task.num-classes": classes,
    }
