"""Pictures whose class is a place, and a ViT that is blind to places."""

from __future__ import annotations

import numpy as np
import torch

from fedveil import rng
from fedveil.benchmarks.common import data
from fedveil.benchmarks.random_binary import marked
from fedveil.rows import decoding
from tests.benchmarks.random_binary.small import bare_task


def test_a_picture_is_faint_and_has_a_square_whose_cell_is_the_label():
    task = bare_task()
    examples = list(task.examples(data.folder("noise"), "train"))
    found = marked.marked(examples, 3, 4, 5)
    for example, before in zip(found, examples, strict=True):
        pixels = np.array(decoding.decoded(decoding.encoded(example, "image"), "", "RGB")).astype(int)
        cells = pixels.reshape(4, 2, 4, 2, 3).transpose(0, 2, 1, 3, 4).reshape(16, 4, 3)
        label = example.values["label"]
        assert (cells[label] == marked._COLOUR).all()
        whole = np.array(decoding.decoded(decoding.encoded(before, "image"), "", "RGB")).astype(int)
        difference = np.abs(pixels - (128 + 0.1 * (whole - 128))).reshape(4, 2, 4, 2, 3).max((1, 3, 4)).flatten()
        assert (np.delete(difference, label) <= 1).all()
    assert {example.values["label"] for example in found} == {0, 1, 2}


def test_labels_are_those_of_the_seed_and_no_other():
    examples = list(bare_task().examples(data.folder("noise"), "train"))
    labels = [[e.values["label"] for e in marked.marked(examples, 3, 4, seed)] for seed in (1, 1, 2)]
    assert labels[0] == labels[1] != labels[2]


def test_without_positions_no_order_of_patches_changes_an_answer():
    """With them one does."""
    task = bare_task()
    weights = task.initial(rng.initial(3, "weights"))
    examples = list(task.examples(data.folder("noise"), "train"))
    rows = task.encode(marked.marked(examples, 3, 4, 5)[:6])
    pixels = torch.stack([row.pixels() for row in rows])
    moved = pixels.roll((2, 4), (2, 3))  # by whole patches
    assert not torch.equal(pixels, moved)
    for given, blind in ((weights, False), (marked.without_positions(weights), True)):
        task.put(given)
        with torch.no_grad():
            before, after = (task.base.model(pixel_values=p).logits for p in (pixels, moved))
        assert torch.allclose(before, after, atol=1e-6) == blind
