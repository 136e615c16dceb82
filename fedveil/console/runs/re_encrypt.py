"""Re-encrypt a site's files: from plaintext to a key, from one key to another, or back.

A site with a key file refuses plaintext files, because otherwise anyone with write access to its disk could replace
an encrypted file. So re-encryption is a separate command and does not happen at the next write.
After an interruption, run it again: files that are already encrypted with the new key are verified and left
unchanged.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from fedveil.client_app.state.client_state import LEDGER, ClientStateStore, open_ledger
from fedveil.client_app.state.withdrawn_units import WithdrawalRecord
from fedveil.console.runs import dataset_cache
from fedveil.console.runs.retained_state import run_folders
from fedveil.console.runs.workers import list_workers
from fedveil.encrypted_files import FileSeal, is_sealed, read_seal_header
from fedveil.errors import ConfigError, StateError
from fedveil.records import audit_log
from fedveil.records.atomic_files import write_atomic


def require_key(state_dir: Path, seal: FileSeal) -> None:
    """Raise StateError for the first file whose header a site with this key would refuse."""
    roles = [ClientStateStore(folder).roles for folder in run_folders(state_dir)]
    roles += [open_ledger(state_dir).roles] if (state_dir.expanduser() / LEDGER).is_dir() else []
    roles += [WithdrawalRecord.open(state_dir).roles]
    for file, role in (pair for files in roles for pair in files.items()):
        with contextlib.suppress(FileNotFoundError):
            if (read_seal_header(file).key if is_sealed(file) else "") != seal.id:
                seal.read(file, role)  # raises an error with the reason


def re_encrypt_files(state_dir: Path, old: FileSeal, new: FileSeal) -> list[Path]:
    """Re-encrypt all of a site's files with the new key. Returns the files that were written.

    Raises:
        ConfigError: a worker or a client round is running.
        StateError: a file is neither unencrypted nor encrypted with one of the two keys, or has been changed, or a
            restore was interrupted.
    """
    open_ledger(state_dir).require_whole()
    if running := [worker for worker in list_workers(state_dir) if worker.card.owner.runs()]:
        raise ConfigError(
            f"--state-dir: expected no site running there, found worker {running[0].card.pid}; stop the site first"
        )
    written = []
    for folder in _folders(state_dir):
        with folder as files:
            for file, role in files.items():
                for part in file.parent.glob(f".{file.name}.*.part"):
                    part.unlink()  # leftover of an interrupted write, perhaps unencrypted
                written += [file] if _resealed(file, role, old, new) else []
    if new.id:
        dataset_cache.remove_cached(
            state_dir, dataset_cache.list_cached_datasets(state_dir)
        )  # these are unencrypted examples, which a site with a key does not keep
    audit_log.append_entry(
        state_dir.expanduser() / audit_log.NAME,
        "sealed" if new.id else "unsealed",
        {"key": new.id or "none", "files": len(written)},
    )
    return written


def _folders(state_dir: Path) -> Iterator[contextlib.AbstractContextManager[Mapping[Path, str]]]:
    yield from (_of_run(folder) for folder in run_folders(state_dir))
    if (state_dir.expanduser() / LEDGER).is_dir():
        yield open_ledger(state_dir).held()
    if WithdrawalRecord.open(state_dir).roles:
        yield WithdrawalRecord.open(state_dir).held()


@contextlib.contextmanager
def _of_run(folder: Path) -> Iterator[Mapping[Path, str]]:
    store = ClientStateStore(folder)
    with store.alone() as alone:
        if not alone:
            raise ConfigError(
                f"--state-dir: expected no client round in progress, found one in {folder}; stop the site first"
            )
        yield {file: role for file, role in store.roles.items() if file.exists()}


def _resealed(file: Path, role: str, old: FileSeal, new: FileSeal) -> bool:
    key_id = read_seal_header(file).key if is_sealed(file) else ""
    if key_id == new.id:
        new.read(file, role)
        return False
    if key_id not in ("", old.id):
        raise StateError(
            f"{file}: expected an unencrypted file, or one under key {new.id or 'none'} or {old.id or 'none'}, "
            f"found key {key_id}; give that key's file as --old-key-file"
        )
    about = file.stat()
    content = (old if key_id else FileSeal()).read(file, role)
    write_atomic(file, new.closed([content], role))
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))  # `fedveil site purge` computes the age from it
    return True
