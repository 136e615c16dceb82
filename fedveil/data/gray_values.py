"""Map the gray values of an image to 8 bits, by a declared range or by a window. No range is computed from pixels."""

from __future__ import annotations

import numpy as np

__all__ = ["ImageError", "RangeError", "apply_range", "apply_window", "name_range", "name_window"]

INVERTED = "inverted, because 0 is white"
FIRST_FRAME = "first of several frames"
MOST_PIXELS = 1 << 25  # maximum for a gray DICOM or NIfTI image, where scaling takes about 32 bytes per pixel
LARGEST = 1e15  # maximum of a number in a header; products of larger numbers with pixels could overflow


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
        raise ImageError(f"it has more than {MOST_PIXELS:,} gray pixels", "reduce its size, or divide it")


def name_range(low: float, high: float, kind: str = "grey") -> str:
    """Return a name for the conversion that `apply_range` makes."""
    return f"{kind} from {low:g} to {high:g} scaled to 8 bits"


def name_window(low: float, high: float) -> str:
    """Return a name for the conversion that `apply_window` makes with task.image-window."""
    return f"grey window from {low:g} to {high:g} to 8 bits"


def apply_range(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Map gray values to float64 values from 0 (at `low`) to 1 (at `high`).

    Raises:
        RangeError: the range is empty, or a value is not finite or lies outside the range.
    """
    if not low < high:
        raise RangeError("its declared range is empty")
    if not np.isfinite(values).all() or values.min() < low or values.max() > high:
        raise RangeError(f"it has values outside its declared range from {low:g} to {high:g}")
    return np.asarray((values - low) / (high - low))


def apply_window(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Map gray values to float64 values from 0 (up to `low`) to 1 (from `high` on); equal bounds act as a threshold.

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
