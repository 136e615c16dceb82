"""Keep a copy of each policy under which a site has decided, so that readers can later tell which was in force when.

Each line of the site's audit log about a message that it admitted, refused, sent or withheld names the SHA-256 of the
policy file. The copies are in the state folder, one file per policy: `.policies/<SHA-256>.toml`. Each is written before
the decision and never changes.

| case | result |
|---|---|
| the node config names no policy, or the file cannot be read | no copy and no digest; the policy check says why |
| the same policy again | the existing copy is kept |
| the copy cannot be written, for example on a full disk | StateError: the site refuses the message |
| a copy was changed or truncated | not found: its content no longer has its name's digest |
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from fedveil.errors import StateError
from fedveil.records.atomic_files import write_atomic

__all__ = ["find_copy", "keep_copy"]

FOLDER = ".policies"
_DIGEST = re.compile("[0-9a-f]{64}")


def keep_copy(state_dir: Path, policy: str) -> str:
    """Keep a copy of the policy file, and return its SHA-256; "" if there is no readable file. Raises StateError."""
    try:
        content = Path(policy).expanduser().read_bytes() if policy else None
    except OSError:
        return ""
    if content is None:
        return ""
    digest = hashlib.sha256(content).hexdigest()
    if find_copy(state_dir, digest) is None:
        try:
            write_atomic(_path(state_dir, digest), content)
        except OSError as error:
            raise StateError(
                f"{state_dir / FOLDER}: cannot keep a copy of the policy: {error}; correct this before the next run"
            ) from None
    return digest


def find_copy(state_dir: Path, digest: str) -> Path | None:
    """Return the kept file of the policy with this SHA-256, or None if there is none with this content."""
    if not _DIGEST.fullmatch(digest):
        return None
    try:
        content = _path(state_dir, digest).read_bytes()
    except OSError:
        return None
    return _path(state_dir, digest) if hashlib.sha256(content).hexdigest() == digest else None


def _path(state_dir: Path, digest: str) -> Path:
    return state_dir / FOLDER / f"{digest}.toml"
