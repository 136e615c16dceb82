"""Read an unpacked start-up kit at its site: the server's address and the site's own settings.

A path without a leading "/" or "~" is relative to the kit.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedveil.client_app.node_config import SiteConfig, parse_site
from fedveil.console.provisioning.federation_folder import SiteName
from fedveil.errors import ConfigError
from fedveil.guard import poll_backoff
from fedveil.sanitize import sanitize

NODE_CONFIG = "node-config.toml"
_PATHS = ("data", "instruction-keys", "key-file", "policy", "signing-key", "state-dir")


class StartupKit(BaseModel):
    """site.toml.

    Attributes:
        superlink: HOST:PORT of the server's fleet port.
        control_port: the server's control port, which must not be reachable from here.
        poll_seconds: a SuperNode's first polling interval.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=lambda n: n.replace("_", "-"))

    federation: SiteName
    site: SiteName
    superlink: str = Field(pattern=r"^\S{1,255}:\d{1,5}$")
    control_port: int = Field(8000, ge=1, le=65535)
    poll_seconds: float = Field(poll_backoff.DEFAULT, ge=poll_backoff.LEAST, le=60.0)


def read_kit(folder: Path) -> StartupKit:
    """Read site.toml. Raises ConfigError if `folder` has no kit or site.toml is invalid; the message names the key."""
    file = folder / "site.toml"
    try:
        return StartupKit.model_validate(_toml(file))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{file}: {key}: {first['msg']}, found {sanitize(first['input'], 80)}; unpack the kit again"
        ) from None


def node_config(folder: Path, file: Path | None = None) -> SiteConfig:
    """Return the site config from the kit in `folder`, with absolute paths. `file` replaces node-config.toml.

    Raises:
        ConfigError: the file cannot be read or a key is invalid; the message names the key.
    """
    content = _toml(file or folder / NODE_CONFIG)
    for name in _PATHS:
        if isinstance(value := content.get(name), str) and value:
            content[name] = str((folder / Path(value).expanduser()).absolute())
    for own in _data_sets(content):
        if isinstance(value := own.get("data"), str) and value:
            own["data"] = str((folder / Path(value).expanduser()).absolute())
    return parse_site(content)


def paths_in_home(folder: Path) -> list[str]:
    """Return the keys in node-config.toml whose path begins with "~". Raises ConfigError if it cannot be read."""
    content = _toml(folder / NODE_CONFIG)
    in_home = [name for name in _PATHS if str(content.get(name, "")).startswith("~")]
    return in_home + ["data-sets" for own in _data_sets(content) if str(own.get("data", "")).startswith("~")][:1]


def _data_sets(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tables of [data-sets]; anything that is not a table is left to `parse_site`."""
    tables = content.get("data-sets")
    return [own for own in tables.values() if isinstance(own, dict)] if isinstance(tables, dict) else []


def names_instruction_keys(file: Path) -> bool:
    """Return whether a node config names the server's instruction keys. Raises ConfigError if it cannot be read."""
    return bool(_toml(file).get("instruction-keys"))


def _toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text("utf-8-sig"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: expected TOML, found an error: {error}; correct that line") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"--kit: expected a readable {file.name} in {file.parent}, found none ({error}); unpack the "
            "kit, and run this in its folder or name the folder with --kit"
        ) from None
