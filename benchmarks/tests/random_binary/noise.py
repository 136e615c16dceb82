"""Noise pictures, and a ViT for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from datasets import Dataset, Features, Image, Value
from PIL import Image as Pillow

VIT = {"image_size": 8, "patch_size": 2, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def write(data: Path) -> None:
    """Twelve pictures of noise of 8 x 8, of three classes, in `data`/noise."""
    rng = np.random.default_rng(57721)
    made = [Pillow.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)) for _ in range(12)]
    rows = [{"image": picture, "label": i % 3} for i, picture in enumerate(made)]
    folder = data / "noise"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        table = Dataset.from_list(rows, features=Features({"image": Image(), "label": Value("int64")}))
        table.to_parquet(str(folder / f"{split}.parquet"))
