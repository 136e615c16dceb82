"""Checks of a decoded image, shared by the tests of all image formats."""

from __future__ import annotations

import numpy as np

from fedveil.data.image_decoding import decode_image, image_conversions


def check_decoded(image: bytes, said: tuple[str, ...], gray: np.ndarray) -> None:
    """An image is decoded to these gray values in both modes, and its conversions are said."""
    assert image_conversions(image, "x") == said
    for mode, wanted in (("RGB", np.dstack([gray] * 3)), ("L", gray)):
        picture = decode_image(image, "x", mode)
        assert picture.mode == mode
        assert np.array_equal(np.asarray(picture).astype(int), wanted)
