"""PSNR and SSIM compared with values by hand and a slow reference; patches as the convolution sees them; the sheet."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch
from PIL import Image

from fedveil.attacks.reconstruction.image_metrics import (
    contact_sheet,
    join_patches,
    mean_image,
    peak_signal_to_noise,
    structural_similarity,
)
from tests.attacks.reconstruction.small_vit import smooth


def constant(value, size=13):
    return torch.full((2, size, size), value, dtype=torch.float64)


@pytest.mark.parametrize(
    "error,data_range,expected", [(0.5, 1, 20 * math.log10(2)), (0.01, 1, 40), (0.2, 2, 20), (2, 2, 0)]
)
def test_psnr_by_hand(error, data_range, expected):
    assert peak_signal_to_noise(constant(0.25 + error), constant(0.25), data_range) == pytest.approx(expected)


def test_psnr_of_one_wrong_pixel():
    """MSE = 0.3^2 / (2 * 169)."""
    mine = constant(0.25)
    mine[1, 3, 7] += 0.3
    assert peak_signal_to_noise(mine, constant(0.25), 1) == pytest.approx(10 * math.log10(338 / 0.09))


def test_identical_images():
    image = smooth(1, 16)[0]
    assert peak_signal_to_noise(image, image, 2) == math.inf
    assert structural_similarity(image, image, 2, low=-1) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("a,b,data_range", [(0.5, 0.25, 1), (0, 1, 1), (100, 180, 255)])
def test_ssim_of_constants_by_hand(a, b, data_range):
    c1 = (0.01 * data_range) ** 2
    expected = (2 * a * b + c1) / (a * a + b * b + c1)
    assert structural_similarity(constant(float(a)), constant(float(b)), data_range) == pytest.approx(
        expected, abs=1e-9
    )


def test_ssim_of_a_negative_about_its_mean_by_hand():
    """x = m + d, y = m - d, weights w: means m + e, m - e with e = E d; spread v = E d^2 - e^2, covariance -v."""
    generator = torch.Generator().manual_seed(57721)
    d = torch.rand(1, 11, 11, generator=generator, dtype=torch.float64) * 0.2
    line = torch.tensor([math.exp(-((i - 5) ** 2) / 4.5) for i in range(11)], dtype=torch.float64)
    w = torch.outer(line, line) / line.sum() ** 2
    e = float((w * d).sum())
    v = float((w * d * d).sum()) - e * e
    c1, c2, m = 1e-4, 9e-4, 0.5
    means = (2 * (m + e) * (m - e) + c1) / ((m + e) ** 2 + (m - e) ** 2 + c1)
    assert structural_similarity(m + d, m - d, 1) == pytest.approx(means * (c2 - 2 * v) / (2 * v + c2), abs=1e-12)


def test_ssim_equals_a_slow_twin():
    mine, true = smooth(2, 15)
    at = np.arange(11) - 5
    w = np.exp(-(at[:, None] ** 2 + at[None] ** 2) / (2 * 1.5**2))
    w /= w.sum()
    values = []
    for x, y in zip((mine + 1).numpy(), (true + 1).numpy(), strict=True):
        for i in range(5):
            for j in range(5):
                p, q = x[i : i + 11, j : j + 11], y[i : i + 11, j : j + 11]
                mp, mq = (w * p).sum(), (w * q).sum()
                vp, vq, c = (w * (p - mp) ** 2).sum(), (w * (q - mq) ** 2).sum(), (w * (p - mp) * (q - mq)).sum()
                values.append(
                    (2 * mp * mq + 0.0004) * (2 * c + 0.0036) / ((mp**2 + mq**2 + 0.0004) * (vp + vq + 0.0036))
                )
    assert structural_similarity(mine, true, 2, low=-1) == pytest.approx(np.mean(values), abs=1e-12)


def test_low_is_where_intensities_start():
    mine, true = smooth(2, 15)
    assert structural_similarity(mine, true, 2, low=-1) == pytest.approx(
        structural_similarity(mine + 1, true + 1, 2), abs=1e-12
    )
    assert structural_similarity(mine, true, 2, low=-1) != pytest.approx(structural_similarity(mine, true, 2), abs=1e-3)


def test_a_nan_is_never_a_good_image():
    broken = constant(0.5)
    broken[0, 0, 0] = math.nan
    assert math.isnan(peak_signal_to_noise(broken, constant(0.5), 1))
    assert math.isnan(structural_similarity(broken, constant(0.5), 1))


def test_refusals():
    with pytest.raises(ValueError, match=r"the same shape .* found \(2, 13, 13\) and \(2, 12, 12\)"):
        peak_signal_to_noise(constant(0.0), constant(0.0, 12), 1)
    with pytest.raises(ValueError, match="data_range: expected a width above 0, found 0"):
        peak_signal_to_noise(constant(0.0), constant(0.0), 0)
    with pytest.raises(ValueError, match="at least 11 pixels"):
        structural_similarity(constant(0.0, 10), constant(0.0, 10), 1)
    with pytest.raises(ValueError, match="expected 4 patches of 12"):
        join_patches(torch.zeros(4, 13), 3, 4, 4, 2)
    with pytest.raises(ValueError, match="no image is left without number 0 of 1"):
        mean_image(torch.zeros(1, 1, 2, 2), without=0)
    with pytest.raises(ValueError, match="found 1 images and 2 labels"):
        contact_sheet([constant(0.0)], ["a", "b"])


def test_a_patch_is_what_the_convolution_sees():
    """A strided convolution = flattened patches times the flattened kernel, on an image that is not square."""
    image = torch.randn(3, 8, 12, dtype=torch.float64)
    convolution = torch.nn.Conv2d(3, 7, 4, stride=4, bias=False).double()
    expected = convolution(image[None]).flatten(2)[0].T
    patches = torch.nn.functional.unfold(image[None], 4, stride=4)[0].T
    torch.testing.assert_close(patches @ convolution.weight.flatten(1).T, expected)
    assert torch.equal(join_patches(patches, 3, 8, 12, 4), image)


def test_mean_image_leaves_out_the_image_under_attack():
    images = torch.stack([constant(v) for v in (1.0, 2.0, 6.0)])
    assert torch.equal(mean_image(images), constant(3.0))
    assert torch.equal(mean_image(images, without=2), constant(1.5))


def test_the_sheet_shows_the_images_in_rows():
    grey = torch.full((1, 5, 5), 0.5)
    red = torch.tensor([1.0, 0.0, 0.0])[:, None, None].expand(3, 8, 8) * 3 - 1  # outside [-1, 1]: clipped
    png = contact_sheet([grey * 0, red, torch.full((3, 4, 4), math.nan)], ["a", "b", "c"], low=-1, high=1, columns=2)
    sheet = Image.open(io.BytesIO(png))
    assert sheet.format == "PNG"
    assert sheet.size == (2 * 100 + 4, 2 * 114 + 4)
    assert sheet.getpixel((50, 60)) == (128, 128, 128)
    assert sheet.getpixel((150, 60)) == (255, 0, 0)
    assert sheet.getpixel((50, 180)) == (0, 0, 0)
    assert sheet.getpixel((150, 180)) == (255, 255, 255)
    assert png == contact_sheet([grey * 0, red, torch.full((3, 4, 4), math.nan)], ["a", "b", "c"], -1, 1, 2)
