"""Bounds on the values of an upload. A module of its own, so that a run's settings need no Flower."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UploadLimits:
    """Bounds on an upload.

    Attributes:
        max_examples: maximum number of examples that one site may claim.
        max_norm: maximum Euclidean norm of one field's values.
    """

    max_examples: int = 100_000_000
    max_norm: float = 1e6
