"""The privacy ledger: one account for a site's state folder, on the site's own disk (ledger_account.py).

    <state-dir>/.ledger/ledger.json     {"checksum": of the rest, "fedveil-ledger": 4, "tag": 32 hex digits,
                                         "heads": 16 hex digits for each change, "moved-to": "", the account}

The tag is random and identifies the ledger. A change's head is a hash of the previous head and of the whole account
after the change. So a head covers all changes up to its own.

A charge takes these steps, in order: lock; read and verify the ledger and its witness; decide; write and sync the
ledger; write the witness. Only then are batches drawn and examples used. After a crash in between, a charge may remain
without a use, and a repeated client round is charged again.

A witness is a mark outside the state folder, in the data folder's ID file (client_app/state/data_sets.py): the ledger's
tag, its number of changes, a hash of the plans that its entries reserve, and its last head. A ledger restored from an
older copy is behind its witness. The witness is locked during a charge, so if two state folders start using the same
data at the same time, only one of them succeeds.

| case | what happens |
|---|---|
| another state folder has charged the data folder, or this folder's ledger is lost | StateError; `site ledger adopt`
  adds the other ledger's history, or an open entry if that ledger is lost |
| the witness has a later change, or a different history | StateError; use `site ledger recover` |
| the ledger is damaged, or from a later version | StateError: nothing is charged until the site restores it |
| ledgers of versions 1 to 3, one for each site name | migrated at the next change, and then removed; after a crash
  in between, they are migrated twice |
| the folder was restored from a backup (`.ledger/restored` is there) | LedgerError: nothing is charged until `site
  ledger recover` accounts for charges that may be missing |
| a restore was interrupted (`.restoring` is next to the ledger's folder) | LedgerError: nothing is charged, recovered
  or adopted until `site restore` runs again |
| two processes of one site | one waits for the other: the ledger is locked while it changes |
| the site has a key file | the ledger is encrypted (fedveil.encrypted_files) |

The ledger protects a site from the runs that it takes part in, not from the site's own operators.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, final

from fedveil import paths
from fedveil.contract.privacy import (
    OLD_OWN_SHARE,
    OLD_SUMMED,
    OWN_SHARE,
    SUMMED,
    Adjacency,
    PrivacyBudget,
    Spent,
    Step,
    legacy_step,
)
from fedveil.encrypted_files import FileSeal
from fedveil.errors import LedgerError, StateError
from fedveil.privacy.ledger_account import (
    ROW,
    UNIT,
    AccountEntry,
    OldLedger,
    Party,
    ReservedStep,
    RunTerms,
    SiteAccount,
    carry_over,
)
from fedveil.records.atomic_files import read_checksummed, write_atomic, write_checksummed

__all__ = ["RESTORING", "LedgerWitness", "PrivacyLedger", "RunCharger", "StoredAccount", "WitnessMark"]

FILE = "ledger.json"
RESTORING = ".restoring"  # next to the ledger's folder, from the start of a restore to its end
_RESTORED = "restored"  # a mark next to the ledger, from a restore until `recover`; its suffix is not that of a ledger
_VERSION = 4
_OLD_VERSIONS = (1, 2, 3)  # one file per site name, with a history of each record
_WITHOUT_CHECKSUM = (1, 2)
_BY_CONTENT = 1  # the version without carried charges, with a history for each record's content
_HEAD = 16  # hex digits
_KINDS = ("gaussian", "poisson", "fixed", SUMMED, OWN_SHARE, OLD_SUMMED, OLD_OWN_SHARE)


@dataclass(frozen=True)
class WitnessMark:
    """The last change of a ledger that a witness has recorded.

    Attributes:
        tag: identifies the ledger.
        changes: the ledger's number of changes.
        entries: hash of the plans that the ledger's entries reserve, without their use; "" if it is unknown.
        head: head of the last change.
    """

    tag: str
    changes: int
    entries: str
    head: str


class LedgerWitness(Protocol):
    """A file outside the state folder that records a ledger's last change."""

    @property
    def place(self) -> str:
        """Return the witness's path, for use in messages."""
        ...

    def read(self) -> WitnessMark | None:
        """Return the mark, or None if there is none. Raises StateError if it is unreadable."""
        ...

    def read_others(self) -> Sequence[tuple[str, WitnessMark]]:
        """Return the marks of other folders that may hold the same examples, with their paths. Raises StateError."""
        ...

    def write(self, mark: WitnessMark) -> None:
        """Write the mark durably. Raises StateError."""
        ...

    def lock(self) -> AbstractContextManager[None]:
        """Lock the witness between reading and writing it, so that other ledgers wait too. Raises StateError."""
        ...


@dataclass(frozen=True)
class StoredAccount:
    """A ledger's content.

    Attributes:
        tag, heads: as in the file; "" and no heads for a ledger that does not exist yet.
        moved_to: tag of the ledger that has taken over this one's history; "" for none.
        account: the site's account.
    """

    tag: str
    heads: tuple[str, ...]
    moved_to: str
    account: SiteAccount

    @property
    def mark(self) -> WitnessMark:
        """Return the mark that a witness must have for this content."""
        entries, head = self.account.entries, self.heads[-1] if self.heads else ""
        return WitnessMark(self.tag, len(self.heads), _hash_plans(entries), head)


@final
class PrivacyLedger:
    """The ledger of a state folder. Every call reads the file, so that processes and runs can share it.

    Args:
        folder: the ledger's private folder.
        seal: the site's encryption.
    """

    def __init__(self, folder: Path, seal: FileSeal = FileSeal()) -> None:
        self._folder, self._seal = folder, seal
        self._path = folder / FILE

    def charge(
        self,
        terms: RunTerms,
        charges: Spent,
        own: PrivacyBudget,
        witness: LedgerWitness | None = None,
        after_open: str = "say",
    ) -> None:
        """Charge a run, and reserve its plan at its first charge. On return, the charge is on disk.

        Args:
            own: the site's own limit, delta and adjacency.
            witness: the data folder's witness; None in a demonstration in which sites share one folder.
            after_open: "refuse" if no run with a guarantee may follow an open entry.

        Raises:
            BudgetError: the charge is not within the run's plan, or the run is not within the site's limit.
            StateError: the ledger or witness cannot be read or written, or they do not match.
        """
        self._change(own, witness, lambda account: account.hold_to(own).charge(terms, charges, after_open))

    def note_open(self, run: str, why: str, own: PrivacyBudget, witness: LedgerWitness | None = None) -> None:
        """Write an open entry for a run, unless it has one; `own` matters only for a new ledger. Raises StateError."""
        self._change(
            own, witness, lambda account: (account if account.limits else account.hold_to(own)).note_open(run, why)
        )

    def read(self, own: PrivacyBudget) -> StoredAccount:
        """Return the ledger's current content; without a ledger, a new account for `own`. Raises StateError."""
        return self._read(own)[0]

    @property
    def is_restored(self) -> bool:
        """Return whether the ledger comes from a backup and has not yet been recovered."""
        return self._restored.exists()

    def mark_restored(self) -> None:
        """Refuse all charges until `recover` is called. Call this before a backup's file replaces the ledger.

        Raises OSError.
        """
        write_atomic(self._restored, b"")

    def require_whole(self) -> None:
        """Raise LedgerError if a restore was interrupted, so that files of the state folder may be missing."""
        staging = self._folder.with_name(RESTORING)
        if os.path.lexists(staging):
            raise LedgerError(
                f"{staging}: a restore is in progress or was interrupted, so files may be missing here; run "
                "fedveil site restore with the same backup again. Without that backup, move the state folder "
                "away, keep it, and restore another backup into an empty folder"
            )

    def require_recovered(self) -> None:
        """Raise LedgerError if the ledger comes from a backup and has not yet been recovered.

        Also raises it if the restore was interrupted.
        """
        self.require_whole()
        if self.is_restored:
            raise LedgerError(
                f"{self._folder}: the ledger was restored from a backup and may lack charges; run fedveil site "
                "ledger recover DATA, which assumes the maximum that may have been charged since, or, if the site "
                "did not run since the backup, add --nothing-lost"
            )

    def confirm_complete(self, own: PrivacyBudget, witness: LedgerWitness) -> None:
        """Use a restored ledger as it is, on its owner's word that nothing was charged since the backup.

        The witness must confirm this: its mark is the ledger's last change, or neither a ledger nor a mark exists.

        Raises:
            StateError: the ledger was not restored, or the witness has a different last change, or none.
        """
        with self._locked(), witness.lock():
            self.require_whole()
            if not self.is_restored:
                raise StateError(
                    f"{self._folder}: the ledger is in use and was not restored by fedveil site restore; leave out "
                    "--nothing-lost"
                )
            stored, _ = self._read(own)
            mark = self._require_witness(stored, witness)
            is_unused = mark is None and not stored.tag
            if not is_unused and (mark is None or (mark.changes, mark.head) != (len(stored.heads), stored.mark.head)):
                seen = "no change" if mark is None else f"change {mark.changes}"
                raise LedgerError(
                    f"{witness.place}: this does not confirm that nothing is missing: the restored ledger's last "
                    f"change is {len(stored.heads)}, but this has {seen}; name the data folder that was charged "
                    "last, or leave out --nothing-lost to assume the maximum"
                )
            self._restored.unlink()

    def recover(self, own: PrivacyBudget, witness: LedgerWitness) -> str:
        """Reactivate a restored ledger, assuming the maximum charges since then; return a description of the changes.

        All runs count as used to the end of their plans. Unless the witness shows that no entry is missing, an open
        entry stands for the missing entries.

        Raises:
            BudgetError, StateError: like `charge`; also for another ledger's witness.
        """
        with self._locked(), witness.lock():
            self.require_whole()
            stored, old = self._read(own)
            mark = witness.read()
            if mark is not None and mark.tag != stored.tag:
                raise LedgerError(self._foreign(stored, witness))
            is_behind = mark is not None and mark.changes > len(stored.heads) and mark.entries == stored.mark.entries
            account = stored.account.hold_to(own).use_up()
            if not is_behind:
                account = account.append(
                    AccountEntry("a restored ledger", "it may lack runs that it had charged", frozenset(Party))
                )
            heads = stored.heads
            if mark is not None and mark.changes > len(heads):
                heads = (*heads, *("0" * _HEAD for _ in range(mark.changes - len(heads) - 1)), mark.head)
            self._write(replace(stored, heads=heads), account, old, witness)
            self._restored.unlink(missing_ok=True)
        return "all runs used up" if is_behind else "all runs used up, and an open entry for those that may be missing"

    def adopt(self, own: PrivacyBudget, witness: LedgerWitness, other: PrivacyLedger | None) -> int:
        """Add the history of the data folder's ledger to this one; return the number of added entries.

        Args:
            other: that ledger; None if it is lost, in which case an open entry stands for it.

        Raises:
            BudgetError, StateError: like `charge`; also if `other` is not the ledger that the witness names, or was
                restored and not recovered.
        """
        both = [self] if other is None else sorted((self, other), key=lambda one: str(one._path))
        if len({one._path.resolve() for one in both}) < len(both):
            raise StateError(
                f"{self._path}: this is the same state folder, so there is nothing to adopt; name the other one"
            )
        with contextlib.ExitStack() as stack:
            for ledger in both:
                stack.enter_context(ledger._locked())
            self.require_whole()
            if other is not None:
                other.require_recovered()  # otherwise what it may lack would never be counted
            stack.enter_context(witness.lock())
            stored, old = self._read(own)
            mark = witness.read()
            if mark is None or mark.tag == stored.tag:
                raise StateError(f"{witness.place}: this has no tag of another ledger, so there is nothing to adopt")
            mine = stored.account.hold_to(own)
            if other is None:
                added: Sequence[AccountEntry] = [
                    AccountEntry("a lost ledger", "its charges of this data are unknown", frozenset(Party))
                ]
            else:
                theirs, their_old = other._read(own)
                if theirs.tag != mark.tag:
                    raise StateError(
                        f"{other._path}: this is not the ledger that {witness.place} names; name the state folder "
                        "that charged this data, or say that it is lost"
                    )
                # Not the marks of neighboring folders, which adoption resolves.
                other._require_change(theirs, witness.place, mark)
                account = theirs.account.hold_to(own)
                mine = mine.count_unit(account.unit)
                added = [replace(entry, run=f"{entry.run} (adopted)").use_up() for entry in account.entries]
            after = self._write(stored, mine.append(*added), old, None)
            if other is not None:
                other._write(replace(theirs, moved_to=after.tag), theirs.account, their_old, None)
            witness.write(after.mark)
            if not stored.tag:  # a backup without a ledger was restored; all that it may lack is this data's history
                self._restored.unlink(missing_ok=True)
        return len(added)

    @property
    def roles(self) -> dict[Path, str]:
        """Return the paths of the ledger's files, including those of older versions, with their encryption roles."""
        ledgers = {path: f"ledger/{path.stem}" for path in (self._path, *self._folder.glob("*.json"))}
        return ledgers | {path: f"ledger-key/{path.stem}" for path in self._folder.glob("*.key")}

    @contextlib.contextmanager
    def held(self) -> Iterator[dict[Path, str]]:
        """Lock the ledger, and yield its existing files with their roles; no other process changes them meanwhile."""
        with self._locked():
            yield {file: role for file, role in self.roles.items() if file.exists()}

    def _change(
        self, own: PrivacyBudget, witness: LedgerWitness | None, decide: Callable[[SiteAccount], SiteAccount]
    ) -> None:
        with self._locked(), witness.lock() if witness is not None else contextlib.nullcontext():
            self.require_recovered()
            stored, old = self._read(own)
            mark = self._require_witness(stored, witness)
            if stored.moved_to:
                raise LedgerError(
                    f"{self._path}: the ledger {stored.moved_to} has taken over this ledger's history; use that "
                    "ledger's state folder"
                )
            before = stored.account
            account = decide(before)
            if account == before and not old and stored.tag:
                if witness is not None and mark != stored.mark:
                    witness.write(stored.mark)
                return
            self._write(stored, account, old, witness)

    def _require_witness(self, stored: StoredAccount, witness: LedgerWitness | None) -> WitnessMark | None:
        """Return the witness's mark. Raises StateError if the ledger lacks the change that the witness has recorded."""
        if witness is None:
            return None
        for place, other in witness.read_others():
            if other.tag != stored.tag:
                raise LedgerError(
                    f"{place}: this has the tag of another state folder, not of the ledger in {self._folder}, and "
                    f"its data may have the same rows as that of {witness.place}, because one folder is in the "
                    "other or a link leads there; use the state folder that charged it, run fedveil site ledger "
                    f"adopt on {Path(place).parent}, or move the two data sets apart"
                )
            self._require_change(stored, place, other)
        mark = witness.read()
        if mark is None:
            return None
        if mark.tag != stored.tag:
            raise LedgerError(self._foreign(stored, witness))
        self._require_change(stored, witness.place, mark)
        return mark

    def _require_change(self, stored: StoredAccount, place: str, mark: WitnessMark) -> None:
        """Raise StateError if the ledger does not contain the change that a witness at `place` has recorded."""
        if mark.changes > len(stored.heads) or stored.heads[mark.changes - 1] != mark.head:
            raise LedgerError(
                f"{self._path}: {place} has recorded change {mark.changes}, which is missing among the ledger's "
                f"{len(stored.heads)} changes, so an older copy of the ledger was restored; restore the newest "
                "one, or run fedveil site ledger recover on that folder, which assumes the maximum that may have "
                "been charged since"
            )

    def _foreign(self, stored: StoredAccount, witness: LedgerWitness) -> str:
        found = "another ledger" if stored.tag else "no ledger here: it was lost, or belongs to another state folder"
        return (
            f"{witness.place}: expected the tag of the ledger in {self._folder}, found {found}; use the state "
            "folder that charged this data, or run fedveil site ledger adopt, which adds its history to this one; "
            "if the folder's other files belong to another site, move this site's data to a folder outside of it"
        )

    @property
    def _restored(self) -> Path:
        return self._folder / _RESTORED

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        path = self._path.with_suffix(".lock")
        with contextlib.ExitStack() as stack:
            try:
                paths.private_folder(self._folder)
                file = stack.enter_context(path.open("w"))
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                raise StateError(
                    f"{path}: cannot lock the privacy ledger, because this user cannot write the file "
                    f"({type(error).__name__}: {error}); nothing was changed. Give the user access to the state "
                    "folder"
                ) from error
            yield

    def _read(self, own: PrivacyBudget) -> tuple[StoredAccount, list[Path]]:
        """Return the content with older ledgers migrated, and their files. A new account is created for `own`."""
        stored = StoredAccount("", (), "", SiteAccount(own))
        old = sorted(path for path in self._folder.glob("*.json") if path != self._path)
        if self._path.exists():
            content = self._content(self._path)
            if content["fedveil-ledger"] in _OLD_VERSIONS:  # the ledger of a site named "ledger"
                old.append(self._path)
            else:
                try:
                    stored = _parse_stored(content)
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise LedgerError(self._damaged(self._path, error)) from None
        if old:
            entry = carry_over(self._old_ledger(path) for path in old)
            if entry.steps:
                stored = replace(
                    stored, account=stored.account.count_unit(ROW).append(entry)
                )  # older ledgers had no units
        return stored, old

    def _content(self, path: Path) -> dict[str, Any]:
        try:
            data = self._seal.read(path, self.roles[path])
        except OSError as error:  # a disk or network error, which may not recur at the next request
            raise StateError(f"{path}: cannot read the privacy ledger: {error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise LedgerError(self._damaged(path, error)) from None
        try:
            version = json.loads(data)["fedveil-ledger"]
            if version not in (*_OLD_VERSIONS, _VERSION):
                raise ValueError(f"version {version}")
            has_none = version in _WITHOUT_CHECKSUM and b"checksum" not in data
            return dict(json.loads(data)) if has_none else read_checksummed(data)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise LedgerError(self._damaged(path, error)) from None

    def _old_ledger(self, path: Path) -> OldLedger:
        """Return the content of a ledger from versions 1 to 3."""
        content = self._content(path)
        try:
            version = content["fedveil-ledger"]
            if version not in _OLD_VERSIONS:
                raise ValueError("a second ledger of this version")
            histories = tuple((_parse_history(history), len(list(names))) for history, names in content["spent"])
            inherited = _parse_history([] if version == _BY_CONTENT else content["carried"])
            return OldLedger(histories, inherited, version != _BY_CONTENT)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LedgerError(self._damaged(path, error)) from None

    def _damaged(self, path: Path, error: Exception) -> str:
        return (
            f"{path}: not a readable privacy ledger of version {_VERSION} ({error}); restore it from a backup, and "
            "then run fedveil site ledger recover. Without a backup, move the file away, and run fedveil site "
            "ledger adopt DATA --lost, after which epsilon over all runs is infinite"
        )

    def _write(
        self, stored: StoredAccount, account: SiteAccount, old: Iterable[Path], witness: LedgerWitness | None
    ) -> StoredAccount:
        """Write the account as the next change, then the witness; remove the files that it was migrated from."""
        after = replace(stored, tag=stored.tag or secrets.token_hex(16), account=account)
        after = replace(after, heads=(*after.heads, _head_of(after)))
        content = {**_listed(after), "heads": "".join(after.heads)}
        role = self.roles[self._path]
        try:
            write_atomic(self._path, self._seal.closed([write_checksummed(content)], role))
            for path in old:
                path.with_suffix(".key").unlink(missing_ok=True)
                if path != self._path:
                    path.unlink()
        except OSError as error:
            raise StateError(f"{self._path}: cannot write the privacy ledger: {error}; free space") from error
        if witness is not None:
            witness.write(after.mark)
        return after


@final
class RunCharger:
    """Charges one run at a site.

    Args:
        ledger: the site's ledger.
        terms: the run's terms.
        own: the site's own limit, delta and adjacency.
        witness, after_open: as in `PrivacyLedger.charge`.
    """

    def __init__(
        self,
        ledger: PrivacyLedger,
        terms: RunTerms,
        own: PrivacyBudget,
        witness: LedgerWitness | None = None,
        after_open: str = "say",
    ) -> None:
        self._ledger, self._terms, self._witness, self._after_open = ledger, terms, witness, after_open
        self.own = own

    def charge(self, charges: Spent) -> None:
        """Charge the ledger. Raises BudgetError, StateError."""
        self._ledger.charge(self._terms, charges, self.own, self._witness, self._after_open)


def _head_of(stored: StoredAccount) -> str:
    """Return the next head for this content, whose last head is the previous one."""
    text = json.dumps(_listed(stored), sort_keys=True).encode()
    before = stored.heads[-1] if stored.heads else ""
    return hashlib.blake2b(text, digest_size=_HEAD // 2, key=before.encode()).hexdigest()


def _hash_plans(entries: Iterable[AccountEntry]) -> str:
    """Return a hash of the plans that entries reserve. It changes with each new entry, but not with later charges."""
    plans = [
        [entry.run, entry.why, sorted(entry.open), entry.claim, [[*one.step, one.most] for one in entry.steps]]
        for entry in entries
    ]
    return hashlib.blake2b(json.dumps(plans).encode(), digest_size=_HEAD // 2).hexdigest()


def _listed(stored: StoredAccount) -> dict[str, Any]:
    account = stored.account
    return {
        "fedveil-ledger": _VERSION,
        "tag": stored.tag,
        "moved-to": stored.moved_to,
        "delta": account.own.delta,
        "adjacency": account.own.neighbours.value,
        "limits": [None if limit == math.inf else limit for limit in account.limits],
        "unit": account.unit,
        "entries": [
            {
                "run": entry.run, "why": entry.why, "open": sorted(entry.open), "claim": entry.claim,
                "reserved": None if entry.reserved in (None, math.inf) else entry.reserved,
                "steps": [[*one.step, one.most, one.used] for one in entry.steps],
                **({"site": entry.site} if entry.site else {}),
            }
            for entry in account.entries
        ],
    }  # fmt: skip


def _parse_stored(content: dict[str, Any]) -> StoredAccount:
    """Parse content of this version. Raises ValueError, KeyError, TypeError or AttributeError."""
    text = str(content["heads"])
    heads = tuple(text[i : i + _HEAD] for i in range(0, len(text), _HEAD))
    limits = tuple(math.inf if limit is None else float(limit) for limit in content["limits"])
    own = PrivacyBudget(limits[-1], float(content["delta"]), Adjacency(content["adjacency"]))
    entries = tuple(
        AccountEntry(
            str(entry["run"]),
            str(entry["why"]),
            frozenset(Party(party) for party in entry["open"]),
            str(entry["claim"]),
            tuple(ReservedStep(_parse_step(step), int(most), int(used)) for *step, most, used in entry["steps"]),
            None if entry["reserved"] is None else float(entry["reserved"]),
            str(entry.get("site", "")),
        )
        for entry in content["entries"]
    )
    if content["unit"] not in ("", ROW, UNIT):
        raise ValueError("another unit")
    account = SiteAccount(own, limits, str(content["unit"]), entries)
    stored = StoredAccount(str(content["tag"]), heads, str(content["moved-to"]), account)
    if not heads or _head_of(replace(stored, heads=heads[:-1])) != heads[-1]:
        raise ValueError("its last change does not match its chain")
    return stored


def _parse_history(spent: Iterable[Sequence[Any]]) -> Spent:
    """Parse a history from versions 1 to 3, in which steps had no variation."""
    return {legacy_step(_parse_step([*step, 0.0])): int(count) for step, count in spent}


def _parse_step(parts: Sequence[Any]) -> Step:
    kind, examples, batch, multiplier, variation = parts
    if kind not in _KINDS or not float(multiplier) >= 0 or not 0 <= float(variation) <= 1:
        raise ValueError(f"step {parts}")
    return Step(str(kind), int(examples), int(batch), float(multiplier), float(variation))
