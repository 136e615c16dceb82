"""The key files for message signatures: the keys that a site pins, and the sites' keys on the server.

    instruction-keys.toml    in a site's kit     federation = "32 hex digits"
                                                 keys = ["64 hex digits", "64 hex digits"]   current and standby
    signers.json             server/roster/      {"federation", "signatures": "optional" or "required",
                                                  "sites": {NAME: {"node", "signing", "state", "signs", "until"}}}

`signs` means that the site's kit pins the instruction keys, so the site signs its replies. It is never learned from
traffic: an adversary that can suppress signatures could otherwise teach the server to expect none. A file from an
earlier release has no `until`.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fedveil.errors import ConfigError
from fedveil.federation.secagg import crypto
from fedveil.sanitize import sanitize

INSTRUCTION_KEYS = "instruction-keys.toml"
SIGNERS = "signers.json"
_MOST_BYTES = 4 << 20
_MOST_KEYS = 4
_FEDERATION, _KEY = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class InstructionKeys:
    """The public keys with which a site verifies its server's instructions.

    Attributes:
        federation: 32 hex digits.
        keys: 64 hex digits each, the current one first.
    """

    federation: str
    keys: tuple[str, ...]

    @classmethod
    def from_file(cls, file: Path) -> InstructionKeys:
        """Read instruction-keys.toml. Raises ConfigError."""
        try:
            content = tomllib.loads(_read(file).decode("utf-8-sig"))
            return cls._checked(content)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{file}: cannot read the server's instruction keys ({sanitize(error, 200)}); "
                f"extract {INSTRUCTION_KEYS} from the start-up kit again"
            ) from None

    @classmethod
    def _checked(cls, content: Mapping[str, Any]) -> InstructionKeys:
        if set(content) != {"federation", "keys"}:
            raise ValueError("it may contain only federation and keys")
        federation, keys = content["federation"], content["keys"]
        if type(keys) is not list or not 1 <= len(keys) <= _MOST_KEYS:
            raise ValueError(f"it must contain 1 to {_MOST_KEYS} keys")
        _require_federation(federation)
        for key in keys:
            _require_key(key)
        return cls(federation, tuple(keys))

    @property
    def digest(self) -> str:
        """Return the hex SHA-256 of the federation and the keys in order, regardless of the file's formatting."""
        return hashlib.sha256(crypto.context_bytes("instruction keys file", self.federation, *self.keys)).hexdigest()

    def to_toml(self) -> str:
        """Return the file's text."""
        keys = ", ".join(f'"{key}"' for key in self.keys)
        return f'federation = "{self.federation}"\nkeys = [{keys}]  # current and standby\n'


@dataclass(frozen=True)
class SiteSigner:
    """A site's entry in signers.json.

    Attributes:
        node: the site's Flower node ID, in decimal; "" if it has none.
        signing: its public signing key, 64 hex digits; "" if it has none.
        state: "registered", or the reason why it is not.
        signs: True if its kit pins the instruction keys.
        until: when its registration expires, in ISO format with a time zone; "" if it does not expire.
    """

    node: str
    signing: str
    state: str
    signs: bool
    until: str = ""


@dataclass(frozen=True)
class SiteSigners:
    """The sites' signing keys, as the ServerApp reads them.

    Attributes:
        required: True if replies from sites that do not sign do not count.
        sites: the sites by name.
    """

    federation: str
    required: bool
    sites: Mapping[str, SiteSigner]

    @classmethod
    def from_json(cls, content: Any) -> SiteSigners:
        """Return the parsed file. Raises ValueError, KeyError, TypeError or AttributeError if it is malformed."""
        _require_federation(content["federation"])
        if content["signatures"] not in ("optional", "required"):
            raise ValueError('signatures must be "optional" or "required"')
        sites = {}
        for name, entry in content["sites"].items():
            if (until := entry.get("until", "")) != "":
                require_moment(until)
            site = SiteSigner(
                str(entry["node"]), str(entry["signing"]), str(entry["state"]), entry["signs"] is True, until
            )
            if site.signing:
                _require_key(site.signing)
            sites[str(name)] = site
        return cls(content["federation"], content["signatures"] == "required", sites)

    def to_bytes(self) -> bytes:
        """Return the file's bytes."""
        sites = {
            name: {
                "node": site.node, "signing": site.signing, "state": site.state, "signs": site.signs,
                "until": site.until,
            }
            for name, site in sorted(self.sites.items())
        }  # fmt: skip
        content = {
            "federation": self.federation,
            "signatures": "required" if self.required else "optional",
            "sites": sites,
        }
        return json.dumps(content, indent=1).encode()


def require_moment(text: object) -> None:
    """Raise ValueError unless `text` is a time in ISO format with a time zone."""
    if type(text) is not str or datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("`until` must be a time in ISO format with a time zone")


def _read(file: Path) -> bytes:
    with file.open("rb") as stream:
        data = stream.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    return data


def _require_federation(text: object) -> None:
    if type(text) is not str or not _FEDERATION.fullmatch(text):
        raise ValueError("the federation must be 32 hex digits")


def _require_key(text: object) -> None:
    if type(text) is not str or not _KEY.fullmatch(text):
        raise ValueError("a key must be 64 hex digits")
    if crypto.is_small_order(bytes.fromhex(text)):
        raise ValueError("a key has small order, so its signature would fit any text")
