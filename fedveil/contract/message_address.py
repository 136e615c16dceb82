"""The address of a message. It needs no torch, because a site's thin client process reads it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

__all__ = ["DIGEST_BYTES", "MessageAddress"]

DIGEST_BYTES = 16


@dataclass(frozen=True)
class MessageAddress:
    """The exchange that a message belongs to; both ends know it in advance. All fields are empty in one process.

    Attributes:
        run: the run's name with its id.
        attempt: number of the attempt at the round, from 0.
        site: the name by which the server knows the site; empty in a broadcast, so that equal ones are sent once.
    """

    run: str = ""
    attempt: int = 0
    site: str = ""

    @property
    def of_broadcast(self) -> MessageAddress:
        """Return the address of the attempt, for all of its sites."""
        return MessageAddress(self.run, self.attempt)

    @property
    def digest(self) -> bytes:
        """Return 16 bytes that every message carries, so that messages of another run, attempt or site are refused."""
        text = json.dumps([self.run, self.attempt, self.site], separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
