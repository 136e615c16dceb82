"""The attack is exact on the block that it is made for; its failure on other blocks is no evidence of a defense."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from fedveil.attacks.reconstruction.april import AprilBlock, ImageUpsampling, april_closed_form, replace_first_block
from fedveil.attacks.reconstruction.image_metrics import mean_image, peak_signal_to_noise
from tests.attacks.reconstruction.small_vit import LABEL, POSITION, gradients, masked, smooth, vit

IMAGES = smooth(6, 32)
TRUE = IMAGES[0]
BASELINE = peak_signal_to_noise(mean_image(IMAGES, without=0), TRUE, 2)


@pytest.fixture(scope="module")
def model():
    return replace_first_block(vit())


@pytest.fixture(scope="module")
def sent(model):
    return gradients(model, IMAGES[:1])


def found(sent, model):
    return peak_signal_to_noise(april_closed_form(sent, model), TRUE, 2)


def test_the_modified_block_is_read_exactly(sent, model):
    assert found(sent, model) > 60


@pytest.mark.parametrize("rate", [0.05, 0.2, 0.5, 0.8])
def test_zeros_of_a_mask_taken_as_data_defeat_it(sent, model, rate):
    assert found(masked(sent, rate), model) < BASELINE


def test_a_mask_of_nothing_is_no_mask(sent, model):
    assert torch.equal(april_closed_form(masked(sent, 0.0), model), april_closed_form(sent, model))


def test_without_the_position_gradient_the_image_says_nothing_of_the_truth(model):
    """The zeros stand for z = 0, whoever the client is."""
    images = []
    for image in IMAGES[:2]:
        sent = gradients(model, image[None])
        images.append(april_closed_form({**sent, POSITION: torch.zeros_like(sent[POSITION])}, model))
    assert torch.equal(*images)
    assert peak_signal_to_noise(images[0], TRUE, 2) < 20


def test_the_standard_block_is_not_read_even_undefended():
    model = vit()
    assert found(gradients(model, IMAGES[:1]), model) < min(15, BASELINE)


def test_two_images_in_a_batch_are_not_read(model):
    mixed = april_closed_form(gradients(model, IMAGES[:2], torch.tensor([3, 5])), model)
    assert max(peak_signal_to_noise(mixed, image, 2) for image in IMAGES[:2]) < 15


def test_fewer_features_than_pixels_of_a_patch_blur():
    """D = 40 < 48 = C P^2; D must still be at least the 17 tokens."""
    true = smooth(1, 16)
    model = replace_first_block(vit(size=16, hidden=40))
    blurred = peak_signal_to_noise(april_closed_form(gradients(model, true), model), true[0], 2)
    model = replace_first_block(vit(size=16, hidden=48))
    assert blurred < 50 < 60 < peak_signal_to_noise(april_closed_form(gradients(model, true), model), true[0], 2)


def enlargement(side, size):
    def apply(images):
        return functional.interpolate(images, size, mode="bilinear", align_corners=False)

    return ImageUpsampling(apply, (3, side, side))


def test_a_known_enlargement_reads_what_a_narrow_model_blurs():
    """D = 40 < 48 = C P^2, but 16 tokens of 40 are more than the 192 values of the small picture."""
    known = enlargement(8, 16)
    true = known.apply(smooth(1, 8))
    model = replace_first_block(vit(size=16, hidden=40))
    sent = gradients(model, true)
    assert peak_signal_to_noise(april_closed_form(sent, model), true[0], 2) < 50
    assert peak_signal_to_noise(april_closed_form(sent, model, enlargement=known), true[0], 2) > 60
    assert (
        peak_signal_to_noise(april_closed_form(sent, model, enlargement=enlargement(4, 16)), true[0], 2) < 50
    )  # of another size
    assert peak_signal_to_noise(april_closed_form(masked(sent, 0.5), model, enlargement=known), true[0], 2) < 20


def test_modified_is_attention_then_mlp(model):
    plain, block = vit(), model.vit.layers[0]
    names = {n for n, _ in plain.named_parameters()} - {n for n, _ in model.named_parameters()}
    assert names == {
        f"vit.layers.0.layernorm_{side}.{kind}" for side in ("before", "after") for kind in ("weight", "bias")
    }
    assert isinstance(block, AprilBlock)
    tokens = torch.randn(1, 5, 96, dtype=torch.float64)
    original = plain.vit.layers[0]
    assert torch.equal(block(tokens, None), original.mlp(original.attention(tokens)[0]))
    assert not isinstance(model.vit.layers[1], AprilBlock)


@pytest.mark.parametrize("name", [POSITION, "vit.layers.0.attention.k_proj.weight"])
def test_a_missing_gradient_is_named(sent, model, name):
    with pytest.raises(ValueError, match="tensors must be named .*(position|k_proj).*, found none"):
        april_closed_form({n: g for n, g in sent.items() if n != name}, model)


def test_values_are_clipped(sent, model):
    assert april_closed_form(sent, model, -0.25, 0.5).aminmax() == (-0.25, 0.5)


def test_the_label_is_not_needed(model):
    assert found(gradients(model, IMAGES[:1], LABEL - 3), model) > 60
