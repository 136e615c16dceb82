"""The files of a state folder that a backup contains, and those that it leaves out.

| in a backup | left out |
|---|---|
| audit log with its earlier files, privacy ledger, withdrawn units, held-out rows, copies of policies |
  `secure.json`: a restored copy could sign a list for secure aggregation twice |
| for each run: private state, secret, sketch, served rounds | `.prepared`: examples in plain text, made again when
  needed |
| the notes of `fedveil site start` (node config, federation) | locks, secrets of one start, logs, the programs' own
  folders, parts of interrupted writes |

Without a key file, the secrets of runs and the keys of old ledgers (`.ledger/NAME.key`) in a backup are plain. No other
key is in it: a site without `signing-key` in its node config has its signing key in `.signing`. Links are refused,
never followed: a link may lead to a file of another owner.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedveil.client_app.state.client_state import NOT_RUNS, SECURE
from fedveil.client_app.state.data_sets import PREPARED
from fedveil.errors import StateError
from fedveil.privacy.ledger import RESTORING

__all__ = ["STAGING", "SiteFiles", "is_site_file", "list_site_files", "run_of_secure_file"]

STAGING = RESTORING  # holds the files of a restore until all of them are in their places
_WORD = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
_KNOWN = re.compile(
    r"audit-log(-\d{1,18}-\d{1,18})?\.jsonl"
    rf"|\.ledger/{_WORD}\.(json|key)|\.withdrawn/units\.json|\.held-out/{_WORD}\.json|\.flower-runs/-?\d{{1,20}}"
    rf"|\.policies/[0-9a-f]{{64}}\.toml|{_WORD}\.(toml|federation)"
    rf"|(?P<run>{_WORD})/{_WORD}/(secret|received\.json|served\.json|turn-{_WORD}\.safetensors)"
)
_PROGRAMS = "the programs' own folders and logs"
_REASONS = {
    SECURE: "secure.json: a restored copy could sign a list twice",
    PREPARED: "prepared examples: made again when needed",
    **dict.fromkeys(NOT_RUNS, _PROGRAMS),
}
_OF_ONE_START = re.compile(r".*\.(lock|running|superexec|part|unchecked)|restored|restored-runs")
_SIGNING = ".signing"  # client_app/secure_round.py
_SHOWN = 5
_RUN_PARTS = 3  # RUN/SITE/FILE


@dataclass(frozen=True)
class SiteFiles:
    """The files of a state folder.

    Attributes:
        files: those in a backup, by their path in the state folder.
        left_out: what is left out, as sentences.
        secure: the paths of `secure.json`, which are left out; a restore closes their runs.
    """

    files: dict[str, Path]
    left_out: tuple[str, ...]
    secure: tuple[str, ...]


def run_of_secure_file(name: str) -> str:
    """Return RUN/SITE for the path of a run's `secure.json`. Raises ValueError for another path."""
    run = name.removesuffix(f"/{SECURE}")
    if run == name or not is_site_file(f"{run}/served.json"):
        raise ValueError(name)
    return run


def is_site_file(name: str) -> bool:
    """Return whether a file with this path in the state folder belongs in a backup."""
    match = _KNOWN.fullmatch(name)
    return match is not None and match["run"] not in NOT_RUNS


def list_site_files(state: Path) -> SiteFiles:
    """List a state folder's files. Raises StateError for a link, or for a folder that cannot be read."""
    state = state.expanduser().resolve()
    files: dict[str, Path] = {}
    reasons, others, secure = Counter[str](), list[str](), list[str]()
    try:
        for path in _walk(state, reasons):
            name = path.relative_to(state).as_posix()
            if is_site_file(name):
                files[name] = path
            elif path.name == SECURE and len(path.relative_to(state).parts) == _RUN_PARTS:
                reasons[_REASONS[SECURE]] += 1
                secure.append(name)
            elif path.parent == state / _SIGNING:
                reasons[f"signing key STATE/{name}: copy it apart"] += 1
            elif path.name in _REASONS:
                reasons[_REASONS[path.name]] += 1
            elif not _OF_ONE_START.fullmatch(path.name):
                others.append(name)
    except OSError as error:
        raise StateError(f"{error.filename}: expected a folder that this user can read: {error.strerror}") from error
    more = [f"and {len(others) - _SHOWN} more"] if len(others) > _SHOWN else []
    unknown = [f"not a site's: {', '.join([*others[:_SHOWN], *more])}"] if others else []
    return SiteFiles(files, (*reasons, *unknown), tuple(secure))


def _walk(state: Path, reasons: Counter[str]) -> Iterator[Path]:
    folders = [state]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                path = Path(entry.path)
                if path.parent == state and entry.name in {*NOT_RUNS, PREPARED}:
                    reasons[_REASONS[entry.name]] += 1
                elif path.parent == state and entry.name == STAGING:
                    continue
                elif entry.is_symlink():
                    raise StateError(
                        f"{path}: expected files and folders, found a link, which a backup does not follow; replace it "
                        "by what it leads to, or move it out of the state folder"
                    )
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(path)
                else:
                    yield path
