"""The address of a message. It needs no torch, because a site's thin client process reads it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

__all__ = ["DIGEST_BYTES", "MessageAddress"]

DIGEST_BYTES = 16


@dataclass(frozen=True)
class MessageAddress:
    """The exchange that a message is part of; both ends know it before the message comes. All empty in one process.

    Attributes:
        run: the run's name with its id.
        attempt: at the round, from 0.
        site: the name by which the server knows the site; empty in a broadcast, so that equal ones are sent once.
    """

    run: str = ""
    attempt: int = 0
    site: str = ""

    @property
    def of_broadcast(self) -> MessageAddress:
        """The address of the attempt, for all of its sites."""
        return MessageAddress(self.run, self.attempt)

    @property
    def digest(self) -> bytes:
        """16 bytes in every message, so that a message of another run, attempt or site is refused."""
        text = json.dumps([self.run, self.attempt, self.site], separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
