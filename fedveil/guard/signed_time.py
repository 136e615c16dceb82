"""Check the signature in every call of a site: its node key signs the time."""

from __future__ import annotations

import binascii
from datetime import datetime

from cryptography.exceptions import UnsupportedAlgorithm
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

# Errors that an untrusted key, time or signature can raise in the functions below.
ERRORS = (ValueError, TypeError, AttributeError, UnsupportedAlgorithm, binascii.Error)


def check_signed_time(key: bytes, stamp: str, signature: bytes) -> None:
    """Raise one of ERRORS unless the key (PEM) signed this time within Flower's tolerance of now."""
    age = (now() - datetime.fromisoformat(stamp)).total_seconds()
    if not -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
        raise ValueError("time outside the tolerance")
    if not verify_signature(bytes_to_public_key(key), stamp.encode("ascii"), signature):
        raise ValueError("signature does not match")
