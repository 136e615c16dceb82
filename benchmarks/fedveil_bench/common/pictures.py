"""The images for the FedRand presets, as examples for the task vision-language.

| name | rows | columns in addition to `image` | folder in the data folder |
|---|---|---|---|
| caltech-caption | Caltech-101, unseen by the tiny base | caption, label | caltech101 |
| caltech-choice | the same, with four choices per image | question, choices, answer, label | caltech101 |
| cifar-choice, cifar-caption | CIFAR-10's test images | the same | cifar10 |
| coco-caption | COCO 2017, five captions per image | caption (a list), label | coco_captions_mini |
| any other | the user's train.parquet and test.parquet | as above, depending on the kind | a folder with that name |
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedveil.data import tables
from fedveil.data.split_files import split_files
from fedveil.testing.pretraining import CHOICES, caption, is_public
from fedveil_bench.common import data

QUESTION = "What is in the image?"
# Categories that are frequent in COCO captions; the first one that occurs in an image's captions is its label.
_OBJECT = re.compile(
    r"\b(person|man|woman|people|boy|girl|child|baby|dog|cat|horse|sheep|cow|elephant|bear|zebra|giraffe|bird|car|bus|train"
    r"|truck|boat|plane|motorcycle|bicycle|bike|pizza|cake|sandwich|food|table|kitchen|bathroom|toilet|bed|couch|clock|sign"
    r"|hydrant|bench|umbrella|kite|surfboard|skateboard|snowboard|tennis|baseball|laptop)s?\b"
)

Example = Mapping[str, Any]


def build_column_keys(name: str) -> dict[str, str]:
    """Return the column keys of the task section for the examples with this name."""
    chosen = {"task.choices-column": "choices", "task.source-column": "question", "task.target-column": "answer"}
    return {"task.label-column": "label", **(chosen if is_choice(name) else {"task.target-column": "caption"})}


def is_choice(name: str) -> bool:
    """Return whether the examples with this name are multiple-choice questions rather than captions."""
    return name.endswith("-choice")


def find_source(name: str, split: str) -> tuple[str, str]:
    """Return the folder and split that contain the examples with this name."""
    match name:
        case "caltech-caption" | "caltech-choice":
            return "caltech101", split
        case "cifar-choice" | "cifar-caption":
            return "cifar10", "test"
        case "coco-caption":
            return "coco_captions_mini", "train"
    return name, split


def load_examples(name: str, split: str) -> list[Example]:
    """Return all examples of "train" or "test". Raises ConfigError or TaskError if the data are missing."""
    folder, part = find_source(name, split)
    found = _parquet(folder, part)
    if folder == name:
        return found
    match folder:
        case "caltech101":
            found = [row for row in found if part != "train" or not is_public(row["source_path"], folder)]
            return _of_classes(found, [row["class_name"] for row in found], name)
        case "cifar10":
            names = _class_names(folder, part)
            return _of_classes(found, [names[row["label"]] for row in found], name)
    return [_coco(row) for row in found]


def _parquet(folder: str, split: str) -> list[Example]:
    table = tables.read_table(split_files(data.find_data_folder(folder), split), ("image",))
    found: list[Example] = table.to_list()
    return found


def _class_names(folder: str, split: str) -> list[str]:
    table = tables.read_table(split_files(data.find_data_folder(folder), split), ("label",))
    return list(table.features["label"].names)


def _of_classes(found: Sequence[Example], names: Sequence[str], form: str) -> list[Example]:
    distinct = sorted(set(names))
    shown: list[Example] = []
    for row, name in zip(found, names, strict=True):
        example: dict[str, Any] = {"image": row["image"], "label": name}
        if is_choice(form):
            # An image has the same choices in every run, because they are part of the data.
            rng = random.Random(hashlib.sha256(row["source_path"].encode()).digest())
            choices = [name, *rng.sample([other for other in distinct if other != name], CHOICES - 1)]
            rng.shuffle(choices)
            example |= {"question": QUESTION, "choices": choices, "answer": choices.index(name)}
        else:
            example["caption"] = caption(name)
        shown.append(example)
    return shown


def _coco(row: Example) -> Example:
    named = _OBJECT.search(" ".join(row["captions"]).lower())
    return {"image": row["image"], "caption": row["captions"], "label": named[1] if named else "none"}


def write_colored_pictures(at: Path, names: Sequence[str], each: int) -> Path:
    """Write a folder with `each` images per class and split, colored by class. The result is reproducible."""
    from PIL import Image

    draw = random.Random(3)
    for split in ("train", "test"):
        for number, name in enumerate(names):
            (at / split / name).mkdir(parents=True)
            for i in range(each):
                pixels = [draw.randrange(90) + 40 * number * (c == number % 3) for _ in range(1600) for c in range(3)]
                Image.frombytes("RGB", (40, 40), bytes(pixels)).save(at / split / name / f"{i}.png")
    return at
