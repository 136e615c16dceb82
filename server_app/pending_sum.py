"""A closed list of uploads with their masked total, on disk before any of its sites is asked to agree to it.

    <run folder>/pending-sum.bin    the masked total's integers
    <run folder>/pending-sum.json   plan, table, upload attachments, and the data for the round's record

The sites in the list agree to only one sum per round, so a restarted server repeats the same request, which they
answer from their stored state. The files contain only data that the server has received.

| case | result |
|---|---|
| the server ends before the list is on disk | the attempt is retried, or lost if not all sites send every entry |
| the server ends later | after a resume, the same sum is revealed |
| the checkpoint already has the round, or the server returned to an earlier one | the files are removed |
| a file is damaged, or one is missing | the round is lost: the sites would refuse another attempt |
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path

import numpy as np
from flwr.supercore import log

from fedveil.errors import StateError, WireError
from fedveil.federation.secagg.mask_streams import Integers
from fedveil.federation.secagg.messages import UploadAttachment
from fedveil.federation.secagg.plan import AttemptPlan
from fedveil.federation.secagg.unmasking import UnmaskingAttempt
from fedveil.records.atomic_files import read_checksummed, write_atomic, write_checksummed

_TOTAL, _LIST = "pending-sum.bin", "pending-sum.json"


@dataclass(frozen=True)
class PendingSum:
    """A closed list of uploads, and the data about them that the round's record needs.

    Attributes:
        turns: for each site, the client round of its upload.
        scalars: values that each site sent unmasked, by site.
    """

    unmasking: UnmaskingAttempt
    turns: Mapping[str, str]
    scalars: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class PendingSumStore:
    """The pending sum of a run.

    Attributes:
        folder: the run folder.
    """

    folder: Path

    def save(self, pending: PendingSum, total: Integers) -> None:
        """Write the list and its masked total. Raises StateError, for example on a full disk."""
        unmasking = pending.unmasking
        content = {
            "plan": unmasking.plan.to_bytes().decode(),
            "table": unmasking.table,
            "uploads": {site: attached.to_bytes().decode() for site, attached in unmasking.uploads.items()},
            "turns": dict(pending.turns),
            "scalars": {site: dict(scalars) for site, scalars in pending.scalars.items()},
            "total": hashlib.sha256(total.data).hexdigest(),
        }
        try:
            write_atomic(self.folder / _TOTAL, [total.data])
            write_atomic(self.folder / _LIST, write_checksummed(content))
        except OSError as error:
            raise StateError(
                f"{self.folder}: cannot write the round's masked sum: {error}; free some disk space"
            ) from error

    def load(self, round_: int) -> PendingSum | None:
        """Return the round's pending sum; None if there is none, or if it cannot be read."""
        if not (self.folder / _LIST).exists():
            return None
        try:
            content = read_checksummed((self.folder / _LIST).read_bytes())
            plan = AttemptPlan.from_bytes(content["plan"].encode())
            if plan.round != round_:
                return None
            data = (self.folder / _TOTAL).read_bytes()
            if hashlib.sha256(data).hexdigest() != content["total"]:
                raise WireError(f"{_TOTAL}: the total does not match the list's digest")
            uploads = {site: UploadAttachment.from_bytes(text.encode()) for site, text in content["uploads"].items()}
            turns = {str(site): str(turn) for site, turn in content["turns"].items()}
            scalars = {str(site): {str(k): str(v) for k, v in of.items()} for site, of in content["scalars"].items()}
            total = np.frombuffer(data, f"<u{plan.bits // 8}").copy()
            unmasking = UnmaskingAttempt.from_pending(plan, content["table"], uploads, total)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, WireError, json.JSONDecodeError) as error:
            log(WARNING, "%s: the pending sum cannot be read, so its round is lost: %s", self.folder / _LIST, error)
            return None
        return PendingSum(unmasking, turns, scalars)

    def remove(self) -> None:
        """Remove the files, if there are any."""
        for name in (_LIST, _TOTAL):
            (self.folder / name).unlink(missing_ok=True)
