"""Pictures whose class is a position, and a ViT that cannot see positions."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.tests.random_binary.small import bare_task
from fedveil import rng
from fedveil.data import images
from fedveil.data.image_decoding import decode_image
from fedveil_bench.common import data
from fedveil_bench.random_binary import position_task


def test_a_picture_is_faint_and_has_a_square_whose_cell_is_the_label():
    task = bare_task()
    examples = list(task.examples(data.find_data_folder("noise"), "train"))
    found = position_task.mark_positions(examples, 3, 4, 5)
    for example, before in zip(found, examples, strict=True):
        pixels = np.array(decode_image(images.image_bytes(example, "image"), "", "RGB")).astype(int)
        cells = pixels.reshape(4, 2, 4, 2, 3).transpose(0, 2, 1, 3, 4).reshape(16, 4, 3)
        label = example.values["label"]
        assert (cells[label] == position_task._COLOUR).all()
        whole = np.array(decode_image(images.image_bytes(before, "image"), "", "RGB")).astype(int)
        difference = np.abs(pixels - (128 + 0.1 * (whole - 128))).reshape(4, 2, 4, 2, 3).max((1, 3, 4)).flatten()
        assert (np.delete(difference, label) <= 1).all()
    assert {example.values["label"] for example in found} == {0, 1, 2}


def test_labels_are_those_of_the_seed_and_no_other():
    examples = list(bare_task().examples(data.find_data_folder("noise"), "train"))
    labels = [[e.values["label"] for e in position_task.mark_positions(examples, 3, 4, seed)] for seed in (1, 1, 2)]
    assert labels[0] == labels[1] != labels[2]


def test_without_positions_no_order_of_patches_changes_an_answer():
    """With them one does."""
    task = bare_task()
    weights = task.initial(rng.initial_stream(3, "weights"))
    examples = list(task.examples(data.find_data_folder("noise"), "train"))
    rows = task.encode(position_task.mark_positions(examples, 3, 4, 5)[:6])
    pixels = torch.stack([row.pixels() for row in rows])
    moved = pixels.roll((2, 4), (2, 3))  # by whole patches
    assert not torch.equal(pixels, moved)
    for given, blind in ((weights, False), (position_task.without_positions(weights), True)):
        task.put(given)
        with torch.no_grad():
            before, after = (task.base.model(pixel_values=p).logits for p in (pixels, moved))
        assert torch.allclose(before, after, atol=1e-6) == blind
