"""The plan of a site's memory, and the names by which methods address a model's parameters.

Not covered by compatibility.
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
