"""List the policies by which a site decided, from its audit log and the copies in its state folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from fedveil.client_app.policy.policy_copies import find_copy
from fedveil.errors import StateError
from fedveil.records import audit_log


@dataclass(frozen=True)
class UsedPolicy:
    """A policy in a site's audit log.

    Attributes:
        digest: SHA-256 of the policy file, as the log has it.
        first, last: times of its first and last decision, as the log has them.
        decisions: number of lines that name it.
        runs: the runs in those lines, in the order of their first line.
        copy: the file that the site kept, or None.
    """

    digest: str
    first: str
    last: str
    decisions: int = 0
    runs: tuple[str, ...] = ()
    copy: Path | None = None


def list_policies(log: Path) -> list[UsedPolicy]:
    """Return the policies that a site's log names, in the order of their first decision.

    Reads the log's earlier files too. Lines that do not match their own hash are left out: `fedveil log verify` finds
    them. Raises StateError if there is no log.
    """
    found: dict[str, UsedPolicy] = {}
    files = audit_log.list_log_files(log)
    if not any(file.exists() for file in files):
        raise StateError(f"{log}: expected a site's audit log, found none; name the file")
    for line in (line for file in files if file.exists() for line in audit_log.whole_lines(file)):
        digest, time, run = str(line.get("policy") or ""), str(line["time"]), str(line.get("run") or "")
        if not digest:
            continue
        used = found.get(digest) or UsedPolicy(digest, time, time, copy=find_copy(log.parent, digest))
        runs = used.runs if not run or run in used.runs else (*used.runs, run)
        found[digest] = replace(used, last=time, decisions=used.decisions + 1, runs=runs)
    return list(found.values())
