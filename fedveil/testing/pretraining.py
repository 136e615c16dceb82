"""The pictures that the bundled bases were pre-trained on, and their sentences. Not covered by compatibility.

Federated data that tests a bundled base must have none of these pictures.
"""

from __future__ import annotations

import hashlib

__all__ = ["CHOICES", "PUBLIC_DIGITS", "caption", "is_public"]

CHOICES = 4  # of a question about a picture
# Of the SHA-256 of a training picture's path, modulo 10: what a tiny base has seen. Both have seen this fifth of
# Caltech-101; of CIFAR-10 the tiny CLIP has seen this half, and the tiny LLaVA all.
PUBLIC_DIGITS = {"caltech101": frozenset({8, 9}), "cifar10": frozenset({5, 6, 7, 8, 9})}


def is_public(path: str, folder: str) -> bool:
    """Return whether the tiny CLIP has seen the training picture of this path. The federated data have no such picture.

    Of Caltech-101 it is what the tiny LLaVA has seen too. A folder of another name has no public picture.
    """
    return int(hashlib.sha256(path.encode()).hexdigest(), 16) % 10 in PUBLIC_DIGITS.get(folder, ())


def caption(name: str) -> str:
    """Return the sentence about a picture of one class."""
    return f"A photo of {'an' if name[0].lower() in 'aeiou' else 'a'} {name}."
