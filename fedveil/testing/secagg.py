"""The client and server sides of secure aggregation: masks, the ring, and unmasking at the server.

Not covered by the compatibility promise.
"""

from __future__ import annotations

from fedveil.contract.entry_table import fewest_senders
from fedveil.federation.secagg.fixed_point import FixedPointRing
from fedveil.federation.secagg.flatten import VectorLayout
from fedveil.federation.secagg.in_process import InProcessSecureSums
from fedveil.federation.secagg.mask_streams import KEY_BYTES, MaskStream, add_masks
from fedveil.federation.secagg.messages import (
    AgreeRequest,
    AgreeResponse,
    OpenRequest,
    OpenResponse,
    sign_statement,
)
from fedveil.federation.secagg.plan import quorum_of
from fedveil.federation.secagg.server import SecAggConfig
from fedveil.federation.secagg.unmasking import UnmaskingAttempt

__all__ = [
    "KEY_BYTES",
    "AgreeRequest",
    "AgreeResponse",
    "FixedPointRing",
    "InProcessSecureSums",
    "MaskStream",
    "OpenRequest",
    "OpenResponse",
    "SecAggConfig",
    "UnmaskingAttempt",
    "VectorLayout",
    "add_masks",
    "fewest_senders",
    "quorum_of",
    "sign_statement",
]
