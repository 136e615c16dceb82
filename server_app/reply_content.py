"""The content of a reply: an upload with the head of its site's log and a signature, or an error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedveil.contract.codec import Buffer
from fedveil.errors import StateError, WireError
from fedveil.records.audit_log import LogHead


@dataclass(frozen=True)
class ReplyContent:
    """An upload.

    Attributes:
        data: its bytes; in a file in the run folder if the upload is long.
        site_log: the head of the site's audit log; "" if the reply has none.
        signature: the signature record as received; None if the reply has none.
    """

    data: Buffer
    site_log: str
    signature: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ReplyError:
    """The reason for a missing upload, as given by the sender: the site or the SuperLink."""

    code: int
    reason: str


def require_records(names: Iterable[str]) -> None:
    """Raise WireError unless a reply has exactly an upload's records."""
    if not {"fedveil"} <= set(names) <= {"fedveil", "log", "signature"}:
        raise WireError(f"reply: it needs the record fedveil, optionally log and signature, found {sorted(names)[:8]}")


def parse_log_head(head: object) -> str:
    """Return an audit-log head; "" for anything else."""
    try:
        return str(LogHead.parse(str(head)))
    except StateError:
        return ""
