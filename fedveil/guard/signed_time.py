"""Check the signature in every call from a site: its node key signs the time."""

from __future__ import annotations

import binascii
from datetime import datetime

from cryptography.exceptions import UnsupportedAlgorithm
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

# Errors that an untrusted key, time or signature can raise in the functions below.
ERRORS = (ValueError, TypeError, AttributeError, UnsupportedAlgorithm, binascii.Error)


class ClockDifferenceError(ValueError):
    """The key signed the time, but the site's and the server's clocks are too far apart. The text is for the site."""


def check_signed_time(key: bytes, stamp: str, signature: bytes) -> None:
    """Raise one of ERRORS unless the key (PEM) signed this time within Flower's tolerance of now.

    Raises ClockDifferenceError if only the time is wrong: one of the two clocks is wrong, perhaps only briefly. So the
    server tells the site, which retries.
    """
    signed = datetime.fromisoformat(stamp)
    here = now()
    age = (here - signed).total_seconds()  # checked before the costlier signature; raises without a time zone
    if not verify_signature(bytes_to_public_key(key), stamp.encode("ascii"), signature):
        raise ValueError("signature does not match")
    if not -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
        raise ClockDifferenceError(describe_clock_difference(-age, here))


def describe_clock_difference(ahead: float, here: datetime) -> str:
    """Describe a site's clock that is `ahead` seconds before the server's, which shows `here`; negative: behind it."""
    way = "ahead of" if ahead > 0 else "behind"
    return (
        f"the site's clock is {abs(ahead):,.0f} s {way} the server's, which shows {here:%Y-%m-%d %H:%M:%S} UTC; "
        "correct the one that is wrong"
    )
