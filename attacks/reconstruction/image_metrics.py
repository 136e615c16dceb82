"""Image metrics, patches, the mean-image baseline, and contact sheets.

| function | source |
|---|---|
| `peak_signal_to_noise` | 10 log10(L^2 / MSE), L = the width of the range of values |
| `structural_similarity` | Wang, Bovik, Sheikh, Simoncelli 2004, Image Quality Assessment, section III-B and III-C |
| `mean_image` | the guess of an adversary that saw no messages |

Every image is (channels, height, width) with values in [low, high].

| case | result |
|---|---|
| psnr of identical images | infinity |
| psnr or ssim with a NaN | NaN |
| ssim of identical images | 1 |
| ssim of constants a and b | (2 a b + C1) / (a^2 + b^2 + C1) |
| ssim of an image below 11 pixels | ValueError |
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from PIL import Image as Pillow
from PIL import ImageDraw
from torch import Tensor
from torch.nn import functional

__all__ = [
    "Image",
    "Patches",
    "contact_sheet",
    "join_patches",
    "mean_image",
    "peak_signal_to_noise",
    "structural_similarity",
]

Image = Float[Tensor, "channels height width"]
Patches = Float[Tensor, "patches pixels"]

_WINDOW, _SIGMA, _K1, _K2 = 11, 1.5, 0.01, 0.03  # Wang et al., section III-C
_THUMB, _TEXT, _GAP = 96, 14, 4  # sizes in a contact sheet, in pixels


def peak_signal_to_noise(mine: Image, true: Image, data_range: float) -> float:
    """Return the peak signal-to-noise ratio in dB; `data_range` = high - low, 2 for values in [-1, 1]."""
    _check(mine, true, data_range)
    error = (mine.double() - true.double()).square().mean().item()
    return math.inf if error == 0 else 10 * math.log10(data_range**2 / error)


def structural_similarity(mine: Image, true: Image, data_range: float, low: float = 0.0) -> float:
    """Return the mean structural similarity over windows inside the image and over channels.

        SSIM = (2 mx my + C1)(2 sxy + C2) / ((mx^2 + my^2 + C1)(sx^2 + sy^2 + C2)),  C1 = (0.01 L)^2,  C2 = (0.03 L)^2

    Intensities are measured from `low`: the formula is for values in [0, L], and an offset would change its result.
    """
    _check(mine, true, data_range)
    if min(true.shape[1:]) < _WINDOW:
        raise ValueError(f"an image needs at least {_WINDOW} pixels per side, found {tuple(true.shape[1:])}")
    x, y = (image.double().cpu()[:, None] - low for image in (mine, true))
    at = torch.arange(_WINDOW, dtype=torch.float64) - (_WINDOW - 1) / 2
    line = torch.exp(-at.square() / (2 * _SIGMA**2))
    window = torch.outer(line, line)[None, None] / line.sum() ** 2
    # One convolution computes all moments: E x, E y, E x^2, E y^2, E xy.
    mx, my, xx, yy, xy = (functional.conv2d(of, window) for of in (x, y, x * x, y * y, x * y))
    c1, c2 = (_K1 * data_range) ** 2, (_K2 * data_range) ** 2
    means = (2 * mx * my + c1) / (mx * mx + my * my + c1)
    spread = (2 * (xy - mx * my) + c2) / (xx - mx * mx + yy - my * my + c2)
    return float((means * spread).mean())


def join_patches(patches: Patches, channels: int, height: int, width: int, patch: int) -> Image:
    """Join patches in row order, each flattened like a convolution kernel, into an image.

    Raises:
        ValueError: the number or size of the patches is wrong.
    """
    rows, columns = height // patch, width // patch
    if patches.shape != (rows * columns, channels * patch * patch):
        raise ValueError(
            f"expected {rows * columns} patches of {channels * patch * patch} values, found the shape "
            f"{tuple(patches.shape)}"
        )
    tiles = patches.reshape(rows, columns, channels, patch, patch)
    return tiles.permute(2, 0, 3, 1, 4).reshape(channels, height, width)


def mean_image(images: Float[Tensor, "images channels height width"], without: int | None = None) -> Image:
    """Return the mean image: an attack that scores below it has learned nothing from the message.

    `without` excludes the image under attack, which the adversary lacks. Raises ValueError if no image remains.
    """
    indices = [i for i in range(len(images)) if i != without]
    if not indices:
        raise ValueError(f"no image is left without number {without} of {len(images)}")
    return images[indices].mean(0)


def contact_sheet(
    images: Sequence[Image], labels: Sequence[str], low: float = 0.0, high: float = 1.0, columns: int = 8
) -> bytes:
    """Return a PNG of the images in rows, each under its label. Values are clipped to [low, high]; a NaN is black.

    Raises:
        ValueError: no images, or a different number of labels.
    """
    if len(images) != len(labels) or not images:
        raise ValueError(f"each image needs one label, found {len(images)} images and {len(labels)} labels")
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    width, height = _THUMB + _GAP, _THUMB + _TEXT + _GAP
    sheet = Pillow.new("RGB", (columns * width + _GAP, rows * height + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for place, (image, label) in enumerate(zip(images, labels, strict=True)):
        left, top = _GAP + place % columns * width, _GAP + place // columns * height
        values = ((image.double() - low) / (high - low)).nan_to_num(0.0, 1.0, 0.0).clamp(0, 1).mul(255).round()
        pixels = values.byte().cpu().expand(3, -1, -1).permute(1, 2, 0).contiguous()
        # Nearest neighbor: smoothing would hide the artifacts of a bad reconstruction.
        thumb = Pillow.fromarray(pixels.numpy()).resize((_THUMB, _THUMB), Pillow.Resampling.NEAREST)
        draw.text((left, top), label, fill="black")
        sheet.paste(thumb, (left, top + _TEXT))
    png = io.BytesIO()
    sheet.save(png, "PNG")
    return png.getvalue()


def _check(mine: Tensor, true: Tensor, data_range: float) -> None:
    if mine.shape != true.shape or mine.ndim != 3:
        raise ValueError(
            f"both images must have the same shape (channels, height, width), found {tuple(mine.shape)} and "
            f"{tuple(true.shape)}"
        )
    if not data_range > 0:
        raise ValueError(f"data_range: expected a width above 0, found {data_range}")
