"""Notes that `fedveil site start` saves next to a site's state.

SITE.toml holds the site's node config, which Flower receives. SITE.federation holds its federation's name, used only
on the site's own pages.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from fedveil.client_app.node_config import SiteConfig, parse_site
from fedveil.records.atomic_files import write_atomic
from fedveil.sanitize import sanitize

_FEDERATION = ".federation"
_LONGEST = 256  # maximum bytes in a name


def read_site_note(state_dir: Path, name: str, policy: str = "", key_file: str = "") -> SiteConfig:
    """Return the config, overridden by the given policy or key file, as needed in a container, which has no note.

    Raises:
        ConfigError, OSError, ValueError: the note cannot be read.
    """
    note = state_dir.expanduser() / f"{name}.toml"
    try:
        site = parse_site(tomllib.loads(note.read_text(encoding="utf-8"))) if note.is_file() else SiteConfig()
    except RecursionError:
        raise ValueError(f"{note}: brackets nested too deeply") from None
    return site.model_copy(update={"policy": policy or site.policy, "key_file": key_file or site.key_file})


def note_federation(state_dir: Path, name: str, federation: str) -> None:
    """Save the federation's name, or "" if it is unknown, to overwrite an earlier name."""
    write_atomic(state_dir / f"{name}{_FEDERATION}", federation.encode())


def noted_federation(state_dir: Path, name: str) -> str:
    """Return the federation's name, sanitized, or "" if no readable file in the folder contains it."""
    note = state_dir.expanduser() / f"{name}{_FEDERATION}"
    try:
        if note.parent != state_dir.expanduser() or not note.is_file():
            return ""
        with note.open("rb") as file:
            return sanitize(file.read(_LONGEST).decode("utf-8", "replace"), 80)
    except OSError:
        return ""
