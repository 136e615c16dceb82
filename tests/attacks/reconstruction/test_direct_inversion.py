"""Exact on the unmodified ViT at batch size 1; fails on batches, on zeros, and without the position gradient."""

from __future__ import annotations

import pytest
import torch

from fedveil.attacks.reconstruction.april import replace_first_block
from fedveil.attacks.reconstruction.direct_inversion import direct_inversion
from fedveil.attacks.reconstruction.image_metrics import mean_image, peak_signal_to_noise
from tests.attacks.reconstruction.small_vit import POSITION, gradients, masked, smooth, vit

IMAGES = smooth(6, 32)
TRUE = IMAGES[0]
BASELINE = peak_signal_to_noise(mean_image(IMAGES, without=0), TRUE, 2)


@pytest.fixture(scope="module")
def model():
    return vit()


@pytest.fixture(scope="module")
def sent(model):
    return gradients(model, IMAGES[:1])


def found(sent, model):
    return peak_signal_to_noise(direct_inversion(sent, model), TRUE, 2)


def test_the_standard_block_is_read_exactly(sent, model):
    assert found(sent, model) > 60


def test_so_is_the_modified_one():
    model = replace_first_block(vit())
    assert found(gradients(model, IMAGES[:1]), model) > 60


@pytest.mark.parametrize("rate", [0.05, 0.2, 0.5, 0.8])
def test_zeros_of_a_mask_taken_as_data_defeat_it(sent, model, rate):
    assert found(masked(sent, rate), model) < BASELINE


def test_without_the_position_gradient_there_is_nothing(sent, model):
    withheld = {**sent, POSITION: torch.zeros_like(sent[POSITION])}
    assert not direct_inversion(withheld, model).any()
    assert found(withheld, model) < 20  # of the zero image


def test_two_images_in_a_batch_are_not_read(model):
    mixed = direct_inversion(gradients(model, IMAGES[:2], torch.tensor([3, 5])), model)
    assert max(peak_signal_to_noise(mixed, image, 2) for image in IMAGES[:2]) < 15


def test_features_need_only_outnumber_the_patches():
    """D = 20 is below the 48 pixels of a patch and above the 16 patches; D = 12 is below both."""
    true = smooth(1, 16)
    wide, narrow = vit(size=16, hidden=20), vit(size=16, hidden=12)
    assert peak_signal_to_noise(direct_inversion(gradients(wide, true), wide), true[0], 2) > 60
    assert peak_signal_to_noise(direct_inversion(gradients(narrow, true), narrow), true[0], 2) < 40


def test_a_missing_gradient_is_named(sent, model):
    with pytest.raises(ValueError, match="position_embeddings, found none"):
        direct_inversion({n: g for n, g in sent.items() if n != POSITION}, model)
