"""Tamper-evident log of the orders that a site has accepted and answered (fedveil/records/audit_log.py).

    <state-dir>/relay-log.jsonl    {"event": "taken", "order": ID, "run": RUN, "made": MS}
                                   {"event": "answered", "order": ID, "reply": NAME}
                                   {"event": "refused", "file": NAME, "reason": TEXT}

| an order | what happens |
|---|---|
| has been answered | never accepted again, even if the clock is set back |
| was accepted, but the process ended before answering | accepted again; both logs show that it was charged twice |
| is older than an accepted order of the same run | refused: the server has sent a newer one |
| the log is incomplete or was changed | StateError: no orders are accepted |
"""

from __future__ import annotations

import fcntl
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Self

from fedveil import paths
from fedveil.errors import PolicyError, StateError
from fedveil.records import audit_log
from fedveil.relay.message_body import RelayRequest

NAME = "relay-log.jsonl"
_LOCK = "relay.lock"


class DuplicateMessageError(PolicyError):
    """Raised for a letter that was already accepted: a file that stayed in the folder, or was delivered again."""


@dataclass
class MessageLog:
    """One site's log, held by one process at a time.

    Attributes:
        replies: file name of the reply to each answered order, by order id.
        newest: time (ms) when the newest accepted order was made, by run.
    """

    file: Path
    replies: dict[str, str] = field(default_factory=dict)
    newest: dict[str, int] = field(default_factory=dict)
    _held: BinaryIO | None = None

    @classmethod
    def open(cls, state: Path) -> Self:
        """Open the log in a site's state folder.

        Raises StateError if another process has it open, or if the log is damaged.
        """
        lock_file = (paths.private_folder(state) / _LOCK).open("wb")
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock_file.close()
            raise StateError(
                f"{state}: another relay for this site is running; wait for it to end, or stop it"
            ) from None
        book = cls(state / NAME, _held=lock_file)
        if book.file.exists() and (damaged := audit_log.count_damaged(audit_log.list_log_files(book.file))):
            logging.getLogger("fedveil.relay").warning(
                "%s: %d lines are damaged, so an order in them could be accepted again", book.file, damaged
            )
        for line in audit_log.read_log(book.file) if book.file.exists() else []:
            if line["event"] == "taken":
                book.newest[line["run"]] = max(line["made"], book.newest.get(line["run"], 0))
            elif line["event"] == "answered":
                book.replies[line["order"]] = line["reply"]
        return book

    def release(self) -> None:
        """Release the log for other processes."""
        if self._held is not None:
            self._held.close()

    def require_new(self, id_: str, run: str, order: RelayRequest) -> None:
        """Raise DuplicateMessageError or PolicyError for an order that must not be accepted."""
        if reply := self.replies.get(id_):
            raise DuplicateMessageError(f"was already answered; its reply is {reply}")
        if order.made < self.newest.get(run, 0):
            raise PolicyError(
                "older: the site has already accepted a newer order of this run; the server has moved on, so skip this "
                "one"
            )

    def take(self, id_: str, run: str, order: RelayRequest) -> None:
        """Log that an order is accepted, before executing it. Raises StateError if the log cannot be written."""
        audit_log.append_entry(self.file, "taken", {"order": id_, "run": run, "made": order.made})
        self.newest[run] = max(order.made, self.newest.get(run, 0))

    def answer(self, id_: str, reply: str) -> None:
        """Log that an order has been answered. Raises StateError if the log cannot be written."""
        audit_log.append_entry(self.file, "answered", {"order": id_, "reply": reply})
        self.replies[id_] = reply

    def refuse(self, file: str, reason: str) -> None:
        """Log that a letter was refused. Raises StateError if the log cannot be written."""
        audit_log.append_entry(self.file, "refused", {"file": file, "reason": reason})
