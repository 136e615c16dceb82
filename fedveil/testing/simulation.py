"""The app on Flower's simulation engine; needs the extra `simulation`.

Not covered by compatibility.
"""

from __future__ import annotations

from fedveil.console.flower.simulation import LocalSimulation

__all__ = [
    "LocalSimulation",
]
