"""The parts of a client's training: its loop, threads and private state, and what its guard measures.

Not covered by the compatibility promise.
"""

from __future__ import annotations

from fedveil.client_app.guards.broadcast_guard import BroadcastReference, weights_norm
from fedveil.models.library_logging import quiet_libraries
from fedveil.records.tensor_state import load_state
from fedveil.training.local_training import LocalTraining
from fedveil.training.threads import limit_threads

__all__ = [
    "BroadcastReference",
    "LocalTraining",
    "limit_threads",
    "load_state",
    "quiet_libraries",
    "weights_norm",
]
