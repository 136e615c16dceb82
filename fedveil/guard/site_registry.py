"""Decide which site keys the fleet port serves: those registered in members.json, until they expire.

Flower's keys have no expiry date, so every request from a site is checked here, after Flower has checked its
signature.

| the signing key | answer to the site |
|---|---|
| is registered and has not expired | from Flower |
| has expired, or was revoked or replaced | its SuperNode ends, and logs the reason at its next start |
| is not in the registry | as for a revoked key: a key registered only with Flower does not belong to a member |
| cannot be checked: members.json is missing or broken | its SuperNode retries until the file is repaired |
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime
from logging import ERROR, WARNING
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from flwr.supercore import log

from fedveil.errors import StateError
from fedveil.guard.control_log import ControlLog
from fedveil.guard.flower import RefusalBehavior
from fedveil.guard.registry_files import WatchedJsonFile, format_time
from fedveil.sanitize import sanitize

FILE = "members.json"
_NEXT = "make a new key at the site with fedveil site init --renew; the operator then registers it"
_BOTH = (  # revoking a site revokes its signing key too
    "make new keys at the site with fedveil site init --renew --renew-signing; the operator then registers them"
)
_REPEAT_SECONDS = 60.0


@dataclass(frozen=True)
class _Entry:
    site: str
    state: str
    until: datetime | None


class SiteKeyChecker:
    """Checks keys against members.json in the folder `registry`. Raises StateError if the file is unusable."""

    def __init__(self, registry: Path, control: ControlLog) -> None:
        self._file = WatchedJsonFile(registry / FILE, _entries)
        self._control = control
        self._logged: set[tuple[bytes, str]] = set()
        self._said: dict[str, float] = {}
        self._file.get()

    def refusal(self, public: bytes, activates: bool) -> tuple[RefusalBehavior, str] | None:
        """Return the refusal for a request signed by the key `public` (PEM); None to let Flower answer.

        `activates` is true for a SuperNode's first request.
        """
        try:
            key = serialization.load_pem_public_key(public)
            entry = self._file.get().get(_canonical(key))
            why = self._why(entry)
            if why and entry is not None:
                self._record(_canonical(key), entry, why)
        except StateError as error:
            self._say(ERROR, f"refusing every site: {error}")
            return (
                RefusalBehavior.ASKS_AGAIN,
                "fedveil: the server cannot read its list of members; see the server's log",
            )
        if not why:
            return None
        self._say(WARNING, f"a request of {sanitize(entry.site, 80) if entry else 'an unknown key'} is refused: {why}")
        # SAYS_WHY makes a SuperNode log the reason and end, but an active one would hang. ENDS makes it end silently,
        # and the reason appears at its next start.
        return RefusalBehavior.SAYS_WHY if activates else RefusalBehavior.ENDS, f"fedveil: {why}"

    def is_known(self, public: bytes) -> bool:
        """Return whether a key (PEM) is in the registry, valid or not; True if the registry cannot be read.

        Raises ValueError or a similar error for an invalid key.
        """
        key = _canonical(serialization.load_pem_public_key(public))
        try:
            return key in self._file.get()
        except StateError:
            return True

    def site_of(self, public: bytes) -> str:
        """Return the site whose currently valid key is `public` (PEM); "" if there is none. Raises StateError."""
        found = self._file.get().get(_canonical(serialization.load_pem_public_key(public)))
        return found.site if found is not None and not self._why(found) else ""

    def _why(self, found: _Entry | None) -> str:
        if found is None:
            return "this key is not registered; the operator registers a key with fedveil members register"
        if found.state != "registered" or found.until is None:
            return f"this key is {found.state}; {_BOTH if found.state == 'revoked' else _NEXT}"
        if found.until <= self._control.clock.now():
            return f"this key expired on {found.until:%Y-%m-%d}; {_NEXT}"
        return ""

    def _record(self, key: bytes, found: _Entry, why: str) -> None:
        """Log a key's refusal once. The number of keys in the registry bounds the number of lines."""
        if (key, why) not in self._logged:
            self._control.write("shut-out", {"site": found.site, "state": found.state, "reason": why})
            self._logged.add((key, why))

    def _say(self, level: int, words: str) -> None:
        """Write to the SuperLink's log, at most once a minute for the same message."""
        now = time.monotonic()
        if now - self._said.get(words, -_REPEAT_SECONDS) >= _REPEAT_SECONDS:
            self._said = {old: at for old, at in self._said.items() if now - at < _REPEAT_SECONDS} | {words: now}
            log(level, words)


def _entries(content: Any) -> dict[bytes, _Entry]:
    """Return the current and former keys in members.json. Raises ValueError, KeyError or a similar error."""
    entries = {_read(key): _Entry("", str(how), None) for key, how in content["retired"].items()}
    for site, entry in content["sites"].items():
        if "key" in entry:
            entries[_read(entry["key"])] = _Entry(site, str(entry["state"]), format_time(entry["until"]))
        elif entry["state"] != "invited":
            raise ValueError(f"{site}: its state is {entry['state']!r}, but it has no key")
    return entries


def _read(text: str) -> bytes:
    return _canonical(serialization.load_ssh_public_key(text.encode()))


def _canonical(key: Any) -> bytes:
    """Return a key in canonical form."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return bytes(key.public_bytes(serialization.Encoding.DER, form))
