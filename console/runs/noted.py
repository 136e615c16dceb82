"""The node config of a site, as `fedveil site start` has noted it beside its state."""

from __future__ import annotations

import tomllib
from pathlib import Path

from fedveil.client_app.site.node_config import Site, parse_site


def noted(state_dir: Path, name: str, policy: str = "", key_file: str = "") -> Site:
    """The config, with another policy or key file where they are named, as in a container, which has no note.

    Raises:
        ConfigError, OSError, ValueError: the note cannot be read.
    """
    note = state_dir.expanduser() / f"{name}.toml"
    site = parse_site(tomllib.loads(note.read_text())) if note.is_file() else Site()
    return site.model_copy(update={"policy": policy or site.policy, "key_file": key_file or site.key_file})
