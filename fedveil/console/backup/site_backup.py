"""Back up a stopped site's state folder to one file, and restore it without rolling its ledger or its log back.

A restore never replaces a file by an older one:

| at the site | the file from the backup |
|---|---|
| no ledger | restored, and marked: no run is charged until `site ledger recover` (fedveil/privacy/ledger.py) |
| the backup's ledger, or one that continues it | not used: the site's ledger stays |
| an earlier state of the backup's ledger | takes its place, and is marked as above |
| another ledger, or one that cannot be read | refused |
| the data folder's mark knows a later change than both | refused without `--older`; then restored, and marked |
| no audit log, or the beginning of the backup's | restored |
| the backup's audit log, or one that continues it | not used: the site's log stays |
| another audit log | refused |
| the server's anchor knows later lines than both logs | refused without `--older`; then the log continues after it, in
  a new file that says how many lines are missing |
| withdrawn units | the longer list, if it contains all of the other's entries; else refused |
| any other file | restored only if it is missing; else the site's stays, without a comparison of their ages |
| a run's served rounds, if they are restored or differ from the backup's | as above, and the run is closed |

The archive is checked whole, and its files are written to a folder of their own (`.restoring`), before any of them
takes its place: withdrawn units first, the ledger last. Until the folder is gone, no site starts in the state folder,
and its ledger permits nothing.
"""

from __future__ import annotations

import contextlib
import filecmp
import math
import os
import shutil
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedveil import paths
from fedveil.client_app.node_config import parse_site
from fedveil.client_app.state.client_state import LEDGER, SECURE, ClientStateStore, open_ledger
from fedveil.client_app.state.data_sets import FolderWitness
from fedveil.client_app.state.withdrawn_units import FOLDER as WITHDRAWN
from fedveil.client_app.state.withdrawn_units import WithdrawalRecord
from fedveil.console.backup.archive import BackupArchive, write_archive
from fedveil.console.backup.site_files import STAGING, SiteFiles, is_site_file, list_site_files, run_of_secure_file
from fedveil.console.flower.processes import ProcessGroup
from fedveil.console.launch import site_lock
from fedveil.console.runs.ledger_summary import ledger_files
from fedveil.console.runs.restored_runs import close_runs, note_runs
from fedveil.console.runs.retained_state import run_folders
from fedveil.console.runs.workers import list_workers
from fedveil.contract.privacy import Adjacency, PrivacyBudget
from fedveil.encrypted_files import FileSeal
from fedveil.errors import ConfigError, StateError
from fedveil.privacy.ledger import StoredAccount
from fedveil.records import audit_log
from fedveil.records.atomic_files import sync_folder
from fedveil.records.audit_log import LogHead
from fedveil.records.log_rotation import is_unchecked, mark_checked, mark_unchecked, rotate_log
from fedveil.sanitize import sanitize

__all__ = ["RestoreChecks", "RestoredSite", "back_up_site", "hold_stopped_site", "restore_site"]

KIND = "site"
_SERVED = "/served.json"
_ANY = PrivacyBudget(math.inf, 1e-5, Adjacency.REPLACE_ONE)  # reading a ledger that exists does not use it
_MOST_NOTE = 1 << 20  # bytes of a node config
_MOST_LEDGER = 8 << 20  # bytes of a ledger; each is read whole, and takes many times its size in memory


@dataclass(frozen=True)
class RestoreChecks:
    """Everything that a restore is compared with.

    Attributes:
        seal: the site's encryption, to read ledgers.
        data: the site's data folder, whose mark is the ledger's witness; None if it is not given.
        anchor: the server's latest anchor of the site's audit log; None if it is not given.
        accepts_older: whether to restore although one of them knows more than the backup.
    """

    seal: FileSeal = FileSeal()
    data: Path | None = None
    anchor: LogHead | None = None
    accepts_older: bool = False


@dataclass(frozen=True)
class RestoredSite:
    """The result of a restore.

    Attributes:
        made, sha256: the backup's time and digest.
        written: the files that were written, by their path in the state folder.
        kept: the files of the backup that were not used, because the site's are newer or equal.
        different: those that were not used although they differ from the site's, which nothing shows to be newer.
        closed: the runs that are closed at this site, at once or by `recover`, as RUN/SITE.
        must_recover: whether the site must run `site ledger recover` before its next run.
        has_ledger: whether the restored folder has a ledger; else `recover` is refused for data with another's mark.
        log: what became of the audit log, as a sentence.
        is_log_unchecked: whether the audit log may lack lines that the server has seen.
    """

    made: str
    sha256: str
    written: tuple[str, ...]
    kept: tuple[str, ...]
    different: tuple[str, ...]
    closed: tuple[str, ...]
    must_recover: bool
    has_ledger: bool
    log: str
    is_log_unchecked: bool


def back_up_site(state: Path, target: Path) -> tuple[SiteFiles, int, str]:
    """Write a backup of a stopped site; return its files, its bytes and its SHA-256.

    Raises:
        ConfigError: the site is running, `target` exists or is in the state folder, or there is nothing to back up.
        StateError: the folder contains a link, or a file that changes or cannot be read; or it was restored and not
            recovered, because another restore would no longer know which runs lack `secure.json`.
        OSError: the backup cannot be written.
    """
    state = state.expanduser()
    if not state.is_dir():
        raise ConfigError(f"--state-dir: expected a site's state folder, found none at {state}; name it, or its --kit")
    if target.expanduser().resolve().is_relative_to(state.resolve()):
        raise ConfigError(f"--to: expected a file outside of the state folder, found {target}; use another disk")
    with hold_stopped_site(state):
        open_ledger(state).require_recovered()
        found = list_site_files(state)
        if not found.files:
            raise ConfigError(f"--state-dir: expected a site's state folder, found nothing to back up in {state}")
        if audit_log.NAME in found.files:
            audit_log.verify_log(found.files[audit_log.NAME])  # a damaged one is continued first: fedveil log rotate
        _require_ledgers({name: path.stat().st_size for name, path in found.files.items()})
        size, sha256 = write_archive(target.expanduser(), KIND, found.files, found.secure)
    return found, size, sha256


@contextlib.contextmanager
def hold_stopped_site(state: Path) -> Iterator[None]:
    """Keep a state folder's sites from starting, and its ledger, units and log from changing. Raises ConfigError."""
    names = sorted({file.stem for ending in ("toml", "running") for file in state.glob(f"*.{ending}")})
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(site_lock.hold_site_lock(state, name, ProcessGroup(state / "logs")))
        if workers := list_workers(state):
            raise ConfigError(
                f"--state-dir: expected no site running there, found worker {workers[0].card.pid}; stop the site first"
            )
        for folder in run_folders(state):
            with ClientStateStore(folder).alone() as alone:
                if not alone:
                    raise ConfigError(
                        f"--state-dir: expected no client round in progress, found one in {folder}; stop the site first"
                    )
        if (state / LEDGER).is_dir():
            stack.enter_context(open_ledger(state).held())
        if WithdrawalRecord.open(state).roles:
            stack.enter_context(WithdrawalRecord.open(state).held())
        if (state / audit_log.NAME).exists():
            stack.enter_context(audit_log.locked_log(state / audit_log.NAME))
        yield


def restore_site(file: Path, state: Path, checks: RestoreChecks) -> RestoredSite:
    """Restore a backup into a state folder, which may be missing.

    After an error the folder is unchanged, unless a file cannot be moved to its place: then `.restoring` stays, and the
    site does nothing until the restore is run again.

    Raises:
        ConfigError: the file is no sound backup, the site is running or another restore is, or the backup is older and
            that is not accepted.
        StateError: the site has another ledger, log or list of withdrawn units, or one that cannot be read.
        OSError: a file cannot be written.
    """
    state = state.expanduser()
    with BackupArchive.open(file, KIND, is_site_file) as archive:
        _require_notes(archive)
        _require_ledgers({name: member.size for name, member in archive.files.items()})
        secure = _secure_runs(archive)
        if (free := shutil.disk_usage(_existing(state)).free) < archive.size:
            raise ConfigError(f"{state}: expected {archive.size:,} free bytes for the backup, found {free:,}")
        with site_lock.hold_folder(state, to_restore=True):
            return _restore_held(archive, state, checks, secure)


def _restore_held(archive: BackupArchive, state: Path, checks: RestoreChecks, secure: frozenset[str]) -> RestoredSite:
    """Restore into a folder in which no site starts and no other restore writes meanwhile."""
    with contextlib.ExitStack() as undo:
        staged = _stage(state, undo)
        with hold_stopped_site(state):
            list_site_files(state)  # refuses links, through which a file could be written elsewhere
            for name in archive.files:
                archive.extract(name, staged / name)
            names = sorted(archive.files)
            takes_ledger = _takes_ledger(state, staged, checks)
            log = _compare_logs(state, staged, checks)
            takes_units = _takes_units(state, staged, checks)
            same = {name for name in names if _is_same(state / name, staged / name)}
            written = [
                name for name in names
                if name not in same and _is_taken(name, state, takes_ledger, log.is_taken, takes_units)
            ]  # fmt: skip
            _require_places(state, written)
            # If the ledger is the backup's, any run may have gone on since, also one whose files are the same here.
            served = [name for name in names if name.endswith(_SERVED) and (takes_ledger or name not in same)]
            differs = {name.removesuffix(_SERVED) for name in served if name not in same and name not in written}
            runs = {run: run in secure or run in differs for run in (name.removesuffix(_SERVED) for name in served)}
            undo.pop_all()  # from here on, an interrupted restore must be seen
            if log.is_unchecked:
                mark_unchecked(state / audit_log.NAME)
            _place(state, staged, written, runs, takes_ledger)
        words = _continue_log(state, archive, written, checks, log)
        shutil.rmtree(staged)
        sync_folder(state)
    kept = set(names) - set(written)
    different = {name for name in kept - same if not _is_judged(name)}
    return RestoredSite(
        archive.made, archive.sha256, tuple(written), tuple(sorted(kept - different)), tuple(sorted(different)),
        tuple(runs), open_ledger(state).is_restored, bool(ledger_files(state)), words,
        is_unchecked(state / audit_log.NAME),
    )  # fmt: skip


def _existing(folder: Path) -> Path:
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def _require_notes(archive: BackupArchive) -> None:
    """Raise ConfigError for a node config that is not one, because later commands read the policy's path from it."""
    for name in archive.files:
        if "/" in name or not name.endswith(".toml"):
            continue
        try:
            if archive.files[name].size > _MOST_NOTE:
                raise ValueError("too long")
            parse_site(tomllib.loads(archive.read(name).decode()))
        except (ConfigError, ValueError, RecursionError) as error:
            raise ConfigError(f"backup: {name}: expected a site's node config, found another file ({error})") from None


def _require_ledgers(sizes: Mapping[str, int]) -> None:
    """Raise ConfigError for a ledger, or a list of withdrawn units, too large to be read back; by their bytes."""
    for name, size in sizes.items():
        if name.startswith((f"{LEDGER}/", f"{WITHDRAWN}/")) and size > _MOST_LEDGER:
            raise ConfigError(
                f"backup: {name}: expected at most {_MOST_LEDGER:,} bytes, found {size:,}; nothing was written"
            )


def _secure_runs(archive: BackupArchive) -> frozenset[str]:
    """Return the runs whose `secure.json` was left out, as RUN/SITE. Raises ConfigError."""
    try:
        return frozenset(map(run_of_secure_file, archive.left_out))
    except ValueError as error:
        raise ConfigError(f"backup: expected paths of {SECURE} in its list, found {sanitize(error, 80)}") from None


def _stage(state: Path, undo: contextlib.ExitStack) -> Path:
    """Make an empty folder for the backup's files; `undo` removes it again, unless an earlier restore left it behind.

    Raises StateError for a link in its place, or OSError.
    """
    staged = state / STAGING
    was_left = os.path.lexists(staged)
    if was_left:
        if staged.is_symlink() or not staged.is_dir():
            raise StateError(f"{staged}: expected a folder or none, found a link or a file; remove it")
        for path in staged.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    else:
        undo.callback(shutil.rmtree, paths.private_folder(staged))
    return staged


def _takes_ledger(state: Path, staged: Path, checks: RestoreChecks) -> bool:
    """Return whether the backup's ledger takes the place of the site's. Raises StateError or ConfigError."""
    mine, theirs = ledger_files(state), ledger_files(staged)
    is_same = [(file.name, file.read_bytes()) for file in mine] == [(file.name, file.read_bytes()) for file in theirs]
    takes = not mine
    if mine and theirs and not is_same:
        takes = _is_earlier(_read_ledger(state, checks.seal), _read_ledger(staged, checks.seal), state)
    if checks.data is not None:
        _compare_witness(state if mine and not takes else staged, checks.data, checks)
    return takes


def _read_ledger(folder: Path, seal: FileSeal) -> StoredAccount:
    return open_ledger(folder, seal).read(_ANY)


def _is_earlier(mine: StoredAccount, theirs: StoredAccount, state: Path) -> bool:
    """Return whether the backup's ledger continues the site's. Raises StateError if neither continues the other."""
    if mine.tag and mine.tag == theirs.tag:
        if mine.heads[: len(theirs.heads)] == theirs.heads:
            return False
        if theirs.heads[: len(mine.heads)] == mine.heads:
            return True
    raise StateError(
        f"{state / LEDGER}: expected the backup's ledger or one that continues it, found another; nothing was "
        "restored: restore into an empty folder instead, and then run fedveil site ledger recover DATA, or adopt, on it"
    )


def _compare_witness(folder: Path, data: Path, checks: RestoreChecks) -> None:
    """Raise ConfigError if the data folder's mark knows a later change than the ledger, or another ledger."""
    if not data.exists():
        raise ConfigError(f"--data: expected the site's data folder, found none at {data}; correct the path")
    mark = FolderWitness.open(data, "any").read()
    if mark is None:
        return
    stored = _read_ledger(folder, checks.seal)
    if stored.tag and mark.tag != stored.tag:
        raise ConfigError(
            f"--data: expected a folder that the restored ledger charged, found the mark of another ledger in {data}; "
            "nothing was restored: use the backup of that site, or leave out --data, and run fedveil site ledger adopt"
        )
    is_behind = mark.changes > len(stored.heads) or stored.heads[mark.changes - 1] != mark.head
    if is_behind and not checks.accepts_older:
        after = (
            "site ledger recover counts the most that may have been charged since"
            if stored.tag
            else "site ledger adopt DATA --lost counts epsilon over all runs as infinite, because it has no ledger"
        )
        raise ConfigError(
            f"--data: expected a backup with change {mark.changes} of the ledger, which {data} has seen, found "
            f"{len(stored.heads)}; nothing was restored: use a newer backup, or restore this one with --older, after "
            f"which fedveil {after}"
        )


@dataclass(frozen=True)
class _LogPlan:
    """The plan for the audit log in a restore.

    Attributes:
        is_taken: whether the backup's files take the place of the site's.
        lines: its number of lines.
        is_behind: whether the server's anchor knows later lines.
        is_unchecked: whether it comes from the backup, and no anchor was given.
    """

    is_taken: bool
    lines: int
    is_behind: bool
    is_unchecked: bool


def _compare_logs(state: Path, staged: Path, checks: RestoreChecks) -> _LogPlan:
    """Compare the backup's log with the site's and with the server's anchor. Raises StateError or ConfigError."""
    mine, theirs = state / audit_log.NAME, staged / audit_log.NAME
    has_mine, has_theirs = _is_log(mine), _is_log(theirs)
    own = audit_log.verify_log(mine) if has_mine else LogHead()
    backup = audit_log.verify_log(theirs) if has_theirs else LogHead()
    taken = has_theirs and own.lines < backup.lines
    longer, shorter = (theirs, own) if taken else (mine, backup)
    if has_mine and has_theirs:
        _require_anchor(longer, shorter, "the other of the site's log and the backup's")
    head = backup if taken else own
    anchor = checks.anchor
    if anchor is None:
        return _LogPlan(taken, head.lines, False, taken)
    is_behind = anchor.lines > head.lines
    if is_behind and not checks.accepts_older:
        raise ConfigError(
            f"--anchor: expected a backup with {anchor.lines} lines of the audit log, which the server has seen, found "
            f"{head.lines}; nothing was restored: use a newer backup, or restore this one with --older, after which "
            "the log says which lines are missing"
        )
    if not is_behind and (has_mine or has_theirs):
        _require_anchor(longer, anchor, "--anchor")
    return _LogPlan(taken, head.lines, is_behind, False)


def _is_log(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0


def _require_anchor(log: Path, anchor: LogHead, of: str) -> None:
    """Raise StateError if the log contradicts an anchor; one before the log's first file cannot be checked."""
    if anchor.lines < audit_log.start_of(audit_log.list_log_files(log)[0]).lines:
        return
    try:
        audit_log.verify_log(log, [anchor])
    except StateError as error:
        raise StateError(
            f"audit log: expected one that agrees with {of}, found two histories: {error}; nothing was restored: "
            "restore into an empty folder, and keep both logs"
        ) from None


def _takes_units(state: Path, staged: Path, checks: RestoreChecks) -> bool:
    """Return whether the backup's list of withdrawn units takes the place of the site's. Raises StateError."""
    mine, theirs = WithdrawalRecord.open(state, checks.seal), WithdrawalRecord.open(staged, checks.seal)
    if not theirs.roles or not mine.roles:
        return bool(theirs.roles)
    if _is_same(*(next(iter(record.roles)) for record in (mine, theirs))):
        return False
    place = next(iter(mine.roles))
    try:
        own, backup = mine.read(), theirs.read()
    except StateError as error:
        raise StateError(
            f"{error}. The site's list and the backup's differ, and one cannot be read; nothing was restored. If it is "
            f"encrypted, give --key-file. Otherwise move {place} away and keep it, restore again, and withdraw again "
            "what was withdrawn since the backup"
        ) from None
    if own.key == backup.key or not own.units or not backup.units:
        if set(backup.units) <= set(own.units):
            return False
        if set(own.units) <= set(backup.units):
            return True
    raise StateError(
        f"{place}: expected the backup's list of withdrawn units, or one that contains all of it or is contained in "
        "it, found another; nothing was restored: move the file away and keep it, restore again, and withdraw again "
        "the units that were withdrawn since the backup"
    )


def _is_same(one: Path, other: Path) -> bool:
    return one.is_file() and other.is_file() and filecmp.cmp(one, other, shallow=False)


def _is_taken(name: str, state: Path, takes_ledger: bool, takes_log: bool, takes_units: bool) -> bool:
    if name.startswith(f"{LEDGER}/"):
        return takes_ledger
    if _is_log_file(name):
        return takes_log
    if name.startswith(f"{WITHDRAWN}/"):
        return takes_units
    return not (state / name).exists()


def _is_log_file(name: str) -> bool:
    return "/" not in name and name.endswith(".jsonl")


def _is_judged(name: str) -> bool:
    """Return whether a restore knows which of two different files is the newer one."""
    return name.startswith((f"{LEDGER}/", f"{WITHDRAWN}/")) or _is_log_file(name)


def _require_places(state: Path, written: Iterable[str]) -> None:
    for name in written:
        for path in (state / folder for folder in list(Path(name).parents)[:-1]):
            if path.exists() and not path.is_dir():
                raise StateError(f"{path}: expected a folder, found a file; nothing was restored: move it away")


def _place(state: Path, staged: Path, written: Iterable[str], runs: Mapping[str, bool], takes_ledger: bool) -> None:
    """Move the files to their places, the ledger's mark first: a crash in between cannot leave an old ledger in use.

    `runs`: those whose served rounds may lack later ones, and whether they are closed even if nothing was lost.
    """
    if takes_ledger:
        paths.private_folder(state / LEDGER)
        open_ledger(state).mark_restored()
        note_runs(state, runs)
    else:  # nothing asks the site to recover, so they are closed at once, and before they take their places
        placed = {name.removesuffix(_SERVED) for name in written if name.endswith(_SERVED)}
        close_runs(staged, (run for run in runs if run in placed))
        close_runs(state, (run for run in runs if run not in placed))
    order = sorted(written, key=_rank)
    for name in order:
        paths.private_folder((state / name).parent)
        os.replace(staged / name, state / name)
    for folder in {(state / name).parent for name in order}:
        sync_folder(folder)


def _rank(name: str) -> tuple[int, str]:
    """Return a file's place in the order: what forbids something comes first, and the ledger, which permits, last."""
    if name.startswith(f"{WITHDRAWN}/"):
        return 0, name
    if name.endswith(_SERVED):
        return 1, name
    return (4 if name.startswith(f"{LEDGER}/") else 2 if name.startswith(".") else 3), name


def _continue_log(
    state: Path, archive: BackupArchive, written: list[str], checks: RestoreChecks, plan: _LogPlan
) -> str:
    """Record the restore in the audit log, unless the server may have seen other lines; describe the log."""
    log = state / audit_log.NAME
    if checks.anchor is None and is_unchecked(log):
        return f"audit log: {plan.lines} lines from the backup; not compared with the server's anchor"
    words = f"audit log: {plan.lines} lines"
    if plan.is_behind:
        assert checks.anchor is not None
        rotate_log(log, checks.anchor)
        words += f"; it goes on after the server's anchor, {checks.anchor.lines - plan.lines} lines are missing"
    mark_checked(log)
    about = {"made": archive.made, "sha256": archive.sha256, "files": len(written)}
    audit_log.append_entry(log, "restored", about)
    return words
