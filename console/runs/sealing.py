"""What a site keeps, brought from in the clear under a key, from one key to another, or back.

A site with a key file refuses a file in the clear, or anybody who can write its disk could put one in the place of a
sealed one. So this is a command of its own, and not done at the next write. An interrupted one is simply repeated: what
is sealed under the new key already is checked and stays.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from fedveil.client_app.site.private import PrivateStore
from fedveil.console.runs import prepared
from fedveil.console.runs.kept import run_folders
from fedveil.console.runs.workers import workers
from fedveil.errors import ConfigError, StateError
from fedveil.privacy.ledger import Ledger
from fedveil.records import audit_log
from fedveil.records.files import write_atomic
from fedveil.sealed import Seal, head_of, is_sealed


def require(state_dir: Path, seal: Seal) -> None:
    """Raises StateError for the first file that a site with this seal would refuse by its head."""
    roles = [PrivateStore(folder).roles for folder in run_folders(state_dir)]
    roles += [Ledger(path).roles for path in _ledgers(state_dir)]
    for file, role in (pair for files in roles for pair in files.items()):
        with contextlib.suppress(FileNotFoundError):
            if (head_of(file).key if is_sealed(file) else "") != seal.id:
                seal.read(file, role)  # raises, and says why


def reseal(state_dir: Path, old: Seal, new: Seal) -> list[Path]:
    """Brings all that a site keeps under the new seal. Returns the files that were written.

    Raises:
        ConfigError: a worker or a turn is running.
        StateError: a file is neither in the clear nor sealed under one of the two keys, or was changed.
    """
    if running := [worker for worker in workers(state_dir) if worker.card.owner.runs()]:
        raise ConfigError(
            f"--state-dir: expected no site to run there, found worker {running[0].card.pid}; stop the site first"
        )
    written = []
    for folder in _folders(state_dir):
        with folder as files:
            for file, role in files.items():
                for part in file.parent.glob(f".{file.name}.*.part"):
                    part.unlink()  # what an interrupted write left, perhaps in the clear
                written += [file] if _resealed(file, role, old, new) else []
    if new.id:
        prepared.remove(state_dir, prepared.prepared(state_dir))  # rows in the clear; a sealed site keeps none
    audit_log.append(
        state_dir.expanduser() / audit_log.NAME,
        "sealed" if new.id else "unsealed",
        {"key": new.id or "none", "files": len(written)},
    )
    return written


def _folders(state_dir: Path) -> Iterator[contextlib.AbstractContextManager[Mapping[Path, str]]]:
    yield from (_of_run(folder) for folder in run_folders(state_dir))
    yield from (Ledger(path).held() for path in _ledgers(state_dir))


def _ledgers(state_dir: Path) -> list[Path]:
    files = (state_dir.expanduser() / ".ledger").glob("*")
    return sorted({file.with_suffix(".json") for file in files if file.suffix in (".json", ".key")})


@contextlib.contextmanager
def _of_run(folder: Path) -> Iterator[Mapping[Path, str]]:
    store = PrivateStore(folder)
    with store.alone() as alone:
        if not alone:
            raise ConfigError(f"--state-dir: expected no turn under way, found one in {folder}; stop the site first")
        yield {file: role for file, role in store.roles.items() if file.exists()}


def _resealed(file: Path, role: str, old: Seal, new: Seal) -> bool:
    found = head_of(file).key if is_sealed(file) else ""
    if found == new.id:
        new.read(file, role)
        return False
    if found not in ("", old.id):
        raise StateError(
            f"{file}: expected a file in the clear, or sealed under key {new.id or 'none'} or {old.id or 'none'}, "
            f"found key {found}; name that key's file with --old-key-file"
        )
    about = file.stat()
    content = (old if found else Seal()).read(file, role)
    write_atomic(file, new.closed([content], role))
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))  # by which `fedveil site purge` judges its age
    return True
