"""The address of a message. This module does not import torch, because a site's thin client process reads it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

__all__ = ["DIGEST_BYTES", "MessageAddress"]

DIGEST_BYTES = 16


@dataclass(frozen=True)
class MessageAddress:
    """The exchange that a message belongs to, known to both ends in advance. In one process, all fields are empty.

    Attributes:
        run: the run's name with its ID.
        attempt: number of the attempt at the round, from 0.
        site: the server's name for the site; empty in a broadcast, so that equal broadcasts are sent only once.
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
        """Return the 16 bytes in every message that let receivers refuse messages from another run, attempt or site."""
        text = json.dumps([self.run, self.attempt, self.site], separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
