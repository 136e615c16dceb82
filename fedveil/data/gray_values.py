"""Map the gray values of an image to 8 bits, by a declared range or by a window. No range is computed from pixels."""

from __future__ import annotations

import numpy as np

__all__ = ["ImageError", "RangeError", "apply_range", "apply_window", "name_range", "name_window"]

INVERTED = "inverted, because 0 is white"
FIRST_FRAME = "first of several frames"
MOST_PIXELS = 1 << 25  # of a gray DICOM or NIfTI image: a pixel takes about 32 bytes while its values are scaled
LARGEST = 1e15  # of a number in a header: with more, its products with pixels could overflow


class ImageError(Exception):
    """The reason why an image cannot be read, and what to do. Neither contains a value from the file."""

    def __init__(self, reason: str, remedy: str = "correct or drop the row") -> None:
        super().__init__(reason)
        self.remedy = remedy


class RangeError(ImageError):
    """Pixel values without a declared range, or outside the declared range."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, "save it with 8 or 16 bits, or set task.image-window")


def require_size(pixels: int) -> None:
    """Raise ImageError for more than `MOST_PIXELS` pixels."""
    if pixels > MOST_PIXELS:
        raise ImageError(f"it has more than {MOST_PIXELS:,} gray pixels", "save it smaller, or in pieces")


def name_range(low: float, high: float, kind: str = "grey") -> str:
    """Return the name of the conversion that `apply_range` makes."""
    return f"{kind} from {low:g} to {high:g} scaled to 8 bits"


def name_window(low: float, high: float) -> str:
    """Return the name of the conversion that `apply_window` makes with task.image-window."""
    return f"grey window from {low:g} to {high:g} to 8 bits"


def apply_range(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Return gray values, float64, as values from 0 (`low`) to 1 (`high`).

    Raises:
        RangeError: the range is empty, or a value is not finite or lies outside the range.
    """
    if not low < high:
        raise RangeError("its declared range is empty")
    if not np.isfinite(values).all() or values.min() < low or values.max() > high:
        raise RangeError(f"it has values outside of its declared range from {low:g} to {high:g}")
    return np.asarray((values - low) / (high - low))


def apply_window(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Return gray values, float64, as values from 0 (up to `low`) to 1 (from `high`); equal bounds are a threshold.

    Raises:
        RangeError: a value is not finite.
    """
    if not np.isfinite(values).all():
        raise RangeError("it has values that are not finite")
    if low == high:
        return np.asarray(values > low, dtype=np.float64)
    return np.asarray(np.clip((values - low) / (high - low), 0, 1))


def to_bytes(shares: np.ndarray) -> np.ndarray:
    """Return values from 0 to 1 as 8-bit gray values."""
    return np.asarray(np.rint(shares * 255), dtype=np.uint8)
