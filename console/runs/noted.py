"""What `fedveil site start` has noted of a site beside its state: its node config in SITE.toml, which Flower gets, and
the name of its federation in SITE.federation, which is for the site's own pages alone.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from fedveil.client_app.site.node_config import Site, parse_site
from fedveil.foreign import shown
from fedveil.records.files import write_atomic

_FEDERATION = ".federation"
_LONGEST = 256  # bytes of a name


def noted(state_dir: Path, name: str, policy: str = "", key_file: str = "") -> Site:
    """The config, with another policy or key file where they are named, as in a container, which has no note.

    Raises:
        ConfigError, OSError, ValueError: the note cannot be read.
    """
    note = state_dir.expanduser() / f"{name}.toml"
    site = parse_site(tomllib.loads(note.read_text())) if note.is_file() else Site()
    return site.model_copy(update={"policy": policy or site.policy, "key_file": key_file or site.key_file})


def note_federation(state_dir: Path, name: str, federation: str) -> None:
    """Notes it; "" where it is not known, so that a name from before does not stay."""
    write_atomic(state_dir / f"{name}{_FEDERATION}", federation.encode())


def federation(state_dir: Path, name: str) -> str:
    """The federation's name, made safe to show; "" where no file of the folder that can be read says it."""
    note = state_dir.expanduser() / f"{name}{_FEDERATION}"
    try:
        if note.parent != state_dir.expanduser() or not note.is_file():
            return ""
        with note.open("rb") as file:
            return shown(file.read(_LONGEST).decode("utf-8", "replace"), 80)
    except OSError:
        return ""
