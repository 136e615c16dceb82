"""An optimizer finds the image only if it knows the mask; it fails if it treats zeros as data."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import interpolate

from fedveil.attacks.reconstruction.gradient_matching import (
    coarser_sizes,
    first_order,
    levenberg_marquardt,
    total_variation,
)
from fedveil.attacks.reconstruction.gradient_residual import residual_of
from fedveil.attacks.reconstruction.image_metrics import mean_image, peak_signal_to_noise
from fedveil.attacks.reconstruction.observed_gradients import ObservedGradient, observe_all_entries
from tests.attacks.reconstruction.small_vit import LABEL, gradients, masked, masks, smooth, vit

IMAGES = smooth(6, 8)
BASELINE = peak_signal_to_noise(mean_image(IMAGES, without=0), IMAGES[0], 2)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def twice(small):
    return interpolate(small, scale_factor=2, mode="bilinear", align_corners=False)


def observed(sent, rate, seed=161803):
    return ObservedGradient(masked(sent, rate, seed), masks(sent, rate, seed))


@pytest.fixture(scope="module")
def model():
    """8 x 8 pixels, 16 patches of 2 x 2, pre-norm, D above both 16 and the 12 pixels of a patch."""
    return vit(size=8, patch=2, hidden=20, layers=2, heads=2)


@pytest.fixture(scope="module")
def sent(model):
    return gradients(model, IMAGES[:1])


@pytest.fixture(scope="module")
def small(model):
    """An image of 4 x 4, and the gradients of what the client trains on: the same upsampled."""
    image = smooth(1, 4)
    return image, gradients(model, twice(image))


@pytest.mark.long
def test_a_mask_that_is_known_does_not_hide_the_image(model, sent):
    match = levenberg_marquardt(
        model, [observed(sent, 0.2)], LABEL, (1, 3, 8, 8), generator=seeded(), starts=4, coarse=0
    )
    assert peak_signal_to_noise(match.image[0], IMAGES[0], 2) > 40
    assert match.residual < 1e-8


@pytest.mark.long
def test_zeros_taken_as_data_do(model, sent):
    match = levenberg_marquardt(
        model,
        [observe_all_entries(masked(sent, 0.2))],
        LABEL,
        (1, 3, 8, 8),
        generator=seeded(),
        starts=1,
        iterations=12,
    )
    assert peak_signal_to_noise(match.image[0], IMAGES[0], 2) < BASELINE
    assert match.residual > 0.1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rate", [0.2, 0.5])
def test_sixteen_pixels_a_side(rate):
    """768 unknowns, without a known enlargement, of a width above the 48 pixels of a patch.

    A start may fail (one of two did at a width of 52). At a width of 24, which mixes the pixels of a patch before
    anything reads them, six starts ended at 19 to 21 dB.
    """
    true = smooth(1, 16)
    model = vit(size=16, patch=4, hidden=64)
    match = levenberg_marquardt(
        model, [observed(gradients(model, true), rate)], LABEL, true.shape, generator=seeded(), starts=4
    )
    assert peak_signal_to_noise(match.image[0], true[0], 2) > 40
    assert match.residual < 1e-8


@pytest.mark.long
def test_a_batch_s_jacobian_image_by_image_is_that_of_all_at_once(model):
    """Two exchanges, the second at weights of its own, and a known upsampling; against torch's own of the whole."""
    other = vit(size=8, patch=2, hidden=20, layers=2, heads=2, seed=1)
    true, labels = smooth(3, 4), torch.tensor([1, 0, 2])
    exchanges = []
    for of, rate, weights in ((model, 0.5, None), (other, 0.9, {n: t.clone() for n, t in other.state_dict().items()})):
        sent = gradients(of, twice(true), labels)
        exchanges.append(ObservedGradient(masked(sent, rate, 7), masks(sent, rate, 7), weights))
    residual = residual_of(model, exchanges, labels, twice, torch.float64)
    assert residual(true).norm() < 1e-10
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        at = true + 0.1
        whole = torch.func.jacfwd(residual)(at).flatten(1)
        torch.testing.assert_close(residual.jacobian(at), whole, rtol=1e-9, atol=1e-12)


def test_a_start_is_of_ever_finer_images():
    assert coarser_sizes((1, 3, 8, 8)) == [(1, 1), (2, 2), (4, 4)]
    assert coarser_sizes((2, 3, 4, 6)) == [(1, 1), (2, 3)]
    assert coarser_sizes((1, 3, 1, 5)) == []


@pytest.mark.long
def test_a_coarse_image_is_found_before_the_first_step_of_the_fine_ones(model):
    """Half of its pixels a side say all of it; from grey noise nothing is found in no step."""
    true = twice(smooth(1, 4))
    exchange = observed(gradients(model, true), 0.2)

    def found(coarse):
        match = levenberg_marquardt(
            model, [exchange], LABEL, true.shape, generator=seeded(), starts=1, iterations=0, coarse=coarse
        )
        return peak_signal_to_noise(match.image[0], true[0], 2)

    assert found(coarse=30) > 40 > 20 > found(coarse=0)


@pytest.mark.long
def test_two_images_of_a_batch_are_found(model):
    labels = torch.tensor([1, 0])
    sent = gradients(model, IMAGES[:2], labels)
    match = levenberg_marquardt(
        model, [observed(sent, 0.2)], labels, (2, 3, 8, 8), generator=seeded(), starts=4, tolerance=1e-8, coarse=0
    )
    assert min(peak_signal_to_noise(image, true, 2) for image, true in zip(match.image, IMAGES[:2], strict=True)) > 40


@pytest.mark.long
def test_a_known_upsampling_leaves_fewer_unknowns(model, small):
    """48 unknowns: a tenth of the entries is enough."""
    true, sent = small
    match = levenberg_marquardt(
        model, [observed(sent, 0.9)], LABEL, true.shape, generator=seeded(), starts=8, upsample=twice
    )
    assert match.image.shape == true.shape
    assert peak_signal_to_noise(match.image[0], true[0], 2) > 40


@pytest.mark.long
def test_each_exchange_is_taken_at_its_own_weights(model, small):
    """The second gradient is of other weights; told so, both fit one image, untold they cannot."""
    true, sent = small
    other = vit(size=8, patch=2, hidden=20, layers=2, heads=2, seed=1)
    state = {n: t.clone() for n, t in other.state_dict().items()}
    second = gradients(other, twice(true))
    first, second_gradient = observed(sent, 0.5), observed(second, 0.5, seed=7)
    second_gradient = ObservedGradient(second_gradient.values, second_gradient.seen, state)

    def residual(exchanges, starts):
        return levenberg_marquardt(
            model, exchanges, LABEL, true.shape, generator=seeded(), starts=starts, iterations=20, upsample=twice
        ).residual

    assert residual([first, second_gradient], starts=6) < 1e-8
    assert residual([first, ObservedGradient(second_gradient.values, second_gradient.seen)], starts=1) > 0.1


@pytest.mark.long
def test_adam_comes_nearer_with_the_mask_than_with_the_zeros(model, small):
    true, sent = small

    def run(exchange):
        match = first_order(
            model, [exchange], LABEL, true.shape,
            generator=seeded(), iterations=150, learning_rate=0.05, variation=1e-5, upsample=twice,
        )  # fmt: skip
        return match.residual, peak_signal_to_noise(match.image[0], true[0], 2)

    (known, near), (zeros, far) = run(observed(sent, 0.5)), run(observe_all_entries(masked(sent, 0.5)))
    assert known < 0.05 < zeros
    assert near > far + 3


@pytest.mark.long
def test_a_withheld_entry_is_not_read(model, small):
    """NaN behind the mask changes nothing."""
    true, sent = small
    exchange = observed(sent, 0.5)
    hidden = {n: v.masked_fill(~exchange.seen[n], math.nan) for n, v in exchange.values.items()}
    runs = [
        levenberg_marquardt(
            model, [each], LABEL, true.shape, generator=seeded(), starts=1, iterations=2, upsample=twice
        )
        for each in (exchange, ObservedGradient(hidden, exchange.seen))
    ]
    assert torch.equal(runs[0].image, runs[1].image)


def test_the_model_is_left_as_it_was(model, sent, small):
    before = {n: t.clone() for n, t in model.state_dict().items()}
    first_order(model, [observed(sent, 0.5)], LABEL, (1, 3, 8, 8), generator=seeded(), iterations=2)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_total_variation_by_hand():
    image = torch.tensor([[[[0.0, 1.0], [3.0, 3.0]]]])
    assert total_variation(image).item() == pytest.approx((1 + 0) / 2 + (3 + 2) / 2)


def test_refusals(model, sent):
    nothing = {n: torch.zeros_like(g, dtype=torch.bool) for n, g in sent.items()}
    for exchanges in ([], [ObservedGradient(sent, nothing)]):
        with pytest.raises(ValueError, match="no entry of the gradient was observed"):
            first_order(model, exchanges, LABEL, (1, 3, 8, 8), generator=seeded())
    with pytest.raises(
        ValueError, match=r"a Jacobian of \d+ x \d+ exceeds the limit of .* entries; match fewer tensors"
    ):
        levenberg_marquardt(model, [observe_all_entries(sent)], LABEL, (1, 3, 1024, 1024), generator=seeded())
    with pytest.raises(ValueError, match="starts: expected at least 1"):
        levenberg_marquardt(model, [observe_all_entries(sent)], LABEL, (1, 3, 8, 8), generator=seeded(), starts=0)
