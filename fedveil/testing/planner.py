"""Memory planning for a site, and the locations by which methods address a model's parameters.

Not covered by the compatibility promise.
"""

from __future__ import annotations

from fedveil.models.param_locations import param_locations
from fedveil.models.planning.memory import plan_memory
from fedveil.models.planning.model_config import read_model_config

__all__ = [
    "param_locations",
    "plan_memory",
    "read_model_config",
]
