"""Define how the fleet port rejects a site's call, with fixed text for each reason.

| raised | answer to the site | its SuperNode |
|---|---|---|
| `FleetCallRefused` | PERMISSION_DENIED / 403, code 2007 | drops this message or reply and continues |
| `FleetCallRefused` for a heartbeat or activation | INVALID_ARGUMENT / 400, code 2003 | (never an honest SuperNode) |
| `FleetCallDeferred` | UNAVAILABLE / 503 | asks again after 1 to 20 s |

Any other status code permanently ends the loop or the heartbeats of an honest SuperNode.
"""

from __future__ import annotations

from enum import Enum


class RefusalReason(Enum):
    """Reason for a refusal. Its text goes to the control log and the site, and contains nothing that a site sent."""

    HEARTBEAT_INTERVAL = "heartbeat interval out of bounds"
    FOREIGN_RUN = "no instruction of this run for this site"
    FOREIGN_BUNDLE = "not the bundle of this run"
    FOREIGN_OBJECT = "object belongs to no instruction for this site"
    PULLED_TOO_OFTEN = "object pulled too often"
    FOREIGN_INSTRUCTION = "no open instruction for this site"
    ANSWERED = "instruction already has a reply"
    ENDED = "instruction has ended"
    DROPPED = "reply was dropped: late, idle or replaced"
    SHAPE = "expected exactly one message with one tree"
    SENDER = "wrong source or destination"
    FIELDS = "run, type or group of another instruction"
    MESSAGE_ID = "message id is not the tree's root"
    TIMES = "invalid created_at or ttl"
    CONTENT = "content outside the tree"
    TREE_FORM = "malformed tree"
    TREE_SIZE = "tree too large"
    TREE_TWICE = "object listed twice in the tree"
    SESSION = "unknown session"
    NOT_ANNOUNCED = "object not announced"
    HASH = "object does not match its hash"
    HEAD = "malformed object head"
    OBJECT_TYPE = "object of an unexpected type"
    CHILDREN = "object with unexpected children"
    ROOT = "message object is not what was announced"
    BODY = "malformed object body"
    BODY_SIZE = "object too large"
    REPLY_SIZE = "reply too large"
    UPLOADED_TOO_OFTEN = "too many bytes for one instruction"
    STORAGE = "reply could not be stored"
    OWN_ERROR = "server error"

    @property
    def can_be_honest(self) -> bool:
        """Return whether an honest site can get this refusal: if its reply was late or dropped, or the disk failed."""
        return self in _OF_HONEST_SITES


_OF_HONEST_SITES = (RefusalReason.ANSWERED, RefusalReason.ENDED, RefusalReason.DROPPED, RefusalReason.STORAGE)


class DeferralReason(Enum):
    """Reason why a site must ask again."""

    RATE = "too many calls"
    NO_ROOM = "no room for the reply"
    STORAGE = "database or disk failure"
    OWN_ERROR = "server error"
    NOT_IN_DATABASE = (  # fedveil/guard/flower/retries.py shows this text to the site
        "fedveil: this key is registered, but the server's database lacks it, as after a loss or a restore; "
        "the operator runs fedveil members sync, and this site then connects by itself"
    )


class FleetCallRefused(Exception):
    """Raised for a refused call. `value` is the value that the site sent; only the log contains it."""

    def __init__(self, reason: RefusalReason, value: str = "") -> None:
        super().__init__(reason.value)
        self.reason, self.value = reason, value


class FleetCallDeferred(Exception):
    """Raised for a call that the site must repeat."""

    def __init__(self, reason: DeferralReason) -> None:
        super().__init__(reason.value)
        self.reason = reason
