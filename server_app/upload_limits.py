"""Bounds on an upload's values. A separate module, so that run settings do not import Flower."""

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
