"""The images that the bundled bases were pretrained on, and their captions.

Federated data used to test a bundled base must not contain these images. Not covered by the compatibility promise.
"""

from __future__ import annotations

import hashlib

__all__ = ["CHOICES", "PUBLIC_DIGITS", "caption", "is_public"]

CHOICES = 4  # number of choices in a question about an image
# Values modulo 10 of the SHA-256 of a training image's path, for the images that a tiny base has seen. Both bases have
# seen this fifth of Caltech-101. The tiny CLIP has seen this half of CIFAR-10, and the tiny LLaVA all of it.
PUBLIC_DIGITS = {"caltech101": frozenset({8, 9}), "cifar10": frozenset({5, 6, 7, 8, 9})}


def is_public(path: str, folder: str) -> bool:
    """Return whether the tiny CLIP has seen the training image with this path; federated data contains no such image.

    For Caltech-101, the tiny LLaVA has seen the same images. Folders with other names contain no public images.
    """
    return int(hashlib.sha256(path.encode()).hexdigest(), 16) % 10 in PUBLIC_DIGITS.get(folder, ())


def caption(name: str) -> str:
    """Return the caption for an image of this class."""
    return f"A photo of {'an' if name[0].lower() in 'aeiou' else 'a'} {name}."
