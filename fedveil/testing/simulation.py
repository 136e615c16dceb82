"""The app on Flower's simulation engine; requires the extra `simulation`.

Not covered by the compatibility promise.
"""

from __future__ import annotations

from fedveil.console.flower.simulation import LocalSimulation

__all__ = [
    "LocalSimulation",
]
