"""A federation on its operator's disk: federation.toml, and the folder that `fedveil provision` creates from it.

    name = "pilot"
    server = ["fl.example.org", "10.1.0.5"]    # how sites reach the server; kits use the first
    sites = ["north", "south"]
    fleet-port = 9092                          # from here on, the values shown are defaults
    control-port = 8000                        # on the server's loopback
    days = 365                                 # validity of the server's certificate; the CA's is 3 times as long
    key-days = 180                             # validity of a site's registered key
    image = "fedveil:0.2.0"
    signatures = "required"                    # or "optional", to also count sites whose kits pin no instruction keys

    FOLDER/ca/ca.key             signs the server's certificate; move it off this machine between renewals
           ca/ca.crt
           server/               certificate, key, the SuperExec's secret, Flower's connection file:
                                 only for the server
           kits/SITE.tar.gz      for the site; contains nothing secret
           server/instruct/      the key that signs the server's instructions (instruction_keys.py), for the app process
           server/roster/        for the app process: roster.json, the sites' signing keys (fedveil members roster);
                                 signers.json, the same with each site's state, written whenever members.json changes
           registry/             files that the SuperLink reloads after each change:
                                 members.json: the federation's ID and public instruction keys; each site with its
                                 public keys, registration date, expiry date, and whether it is revoked;
                                 operators.json: each operator with role and expiry date;
                                 .lock and .operators.lock, held by a command that changes members.json or
                                 operators.json (command_lock.py)

| a site that ... | entry in members.json |
|---|---|
| has a kit but no registered key | "invited" |
| is registered with Flower | "registered", until `until` |
| is past that date | "registered"; the SuperLink shuts it out anyway (fedveil/guard/site_registry.py) |
| was revoked, or expired by `fedveil members expire` | "revoked" or "expired"; only a new key is accepted |

`"signs": true` in an entry means that the site's kit names the instruction keys, so the site signs its replies.
A registry from before 0.2 has no such entries, no federation ID and no instruction keys; its signatures are optional.

A signing key outlives its site's node keys. A signing key that was replaced, or whose site was revoked, is
never accepted again.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
import secrets
import tomllib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fedveil import __version__
from fedveil.console.flower.instruction_key_files import signers_file
from fedveil.console.provisioning import command_lock
from fedveil.errors import ConfigError
from fedveil.federation.message_signatures.key_files import SiteSigner, SiteSigners, require_moment
from fedveil.federation.secagg import crypto
from fedveil.federation.secagg.roster import SigningKeyRoster
from fedveil.records.atomic_files import write_atomic
from fedveil.sanitize import sanitize

SiteName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,250}[A-Za-z0-9])?")


def _host(text: str) -> str:
    """Return a host name or address; an IPv6 address in short form, without brackets. Raises ValueError if invalid."""
    if ":" not in text:
        if not _HOST_NAME.fullmatch(text):
            raise ValueError("expected a host name or address, such as fl.example.org or 192.0.2.7")
        return text
    try:
        address = ipaddress.IPv6Address(text[1:-1] if text[0] + text[-1] == "[]" else text)
        if address.scope_id is not None:
            raise ValueError(text)
        return address.compressed
    except ValueError:
        raise ValueError(
            "expected a host name or address without a port, such as fl.example.org or 2001:db8::7; the port is set by "
            "fleet-port"
        ) from None


Host = Annotated[str, AfterValidator(_host)]


class FederationFile(BaseModel):
    """The settings in federation.toml, as described above."""

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=lambda n: n.replace("_", "-"))

    name: SiteName
    server: list[Host] = Field(min_length=1)
    sites: list[SiteName] = Field(min_length=1)
    fleet_port: int = Field(9092, ge=1, le=65535)
    control_port: int = Field(8000, ge=1, le=65535)
    days: int = Field(365, ge=1, le=3650)
    key_days: int = Field(180, ge=1, le=3650)
    image: str = Field(f"fedveil:{__version__}", pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$")
    signatures: Literal["optional", "required"] = "optional"  # for registries without this key; see parse_federation

    @field_validator("sites")
    @classmethod
    def _each_once(cls, sites: list[str]) -> list[str]:
        if len({site.lower() for site in sites}) != len(sites) or "superlink" in sites:
            raise ValueError('expected unique site names, none of them "superlink"')
        return sites

    @model_validator(mode="after")
    def _two_ports(self) -> FederationFile:
        if self.fleet_port == self.control_port:
            raise ValueError("expected different ports for fleet-port and control-port")
        return self

    @property
    def superlink(self) -> str:
        """Return the HOST:PORT to which a site connects."""
        host = self.server[0]
        return f"[{host}]:{self.fleet_port}" if ":" in host else f"{host}:{self.fleet_port}"

    @property
    def control(self) -> str:
        """Return the HOST:PORT of the control port on the server itself."""
        return f"127.0.0.1:{self.control_port}"

    @property
    def server_names(self) -> list[str]:
        """Return all names for the server: those in the file, and those used on its own host."""
        return [*self.server, "superlink", "localhost", "127.0.0.1"]


def parse_federation(file: Path) -> FederationFile:
    """Parse federation.toml; `signatures` defaults to "required". Raises ConfigError, which names the key."""
    try:
        return FederationFile.model_validate({"signatures": "required", **tomllib.loads(file.read_text("utf-8-sig"))})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        known = [f.alias or name for name, f in FederationFile.model_fields.items()]
        said = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{file}: {key}: {said}, found {first['input']!r}; known keys: {known}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: expected TOML, found an error: {error}; correct that line") from None
    except (OSError, ValueError, RecursionError) as error:
        least = 'name = "pilot", server = ["fl.example.org"], sites = ["north", "south"], one per line'
        raise ConfigError(f"{file}: expected a federation.toml, found none ({error}); minimum: {least}") from None


def registry_folder(folder: Path) -> Path:
    """Return the path of the registry folder, which the federation's SuperLink reads."""
    return folder / "registry"


def roster_file(folder: Path) -> Path:
    """Return the path of a federation's roster, which the server's app process may read."""
    return folder / "server" / "roster" / "roster.json"


class SiteRegistry:
    """members.json in a federation's folder. Each change is written immediately and atomically, with signers.json.

    A command that changes the registry loads it with `locked`. Otherwise, if two commands ran at once, the later could
    undo a change by the earlier, such as a revocation.

    Attributes:
        federation_id: 32 hex digits; "" in a registry from before 0.2, until it is saved.
        instruction_keys: public keys in hex, current and standby; () in such a registry.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = registry_folder(folder) / "members.json"
        try:
            content = json.loads(self._file.read_text(encoding="utf-8"))
            self.federation = FederationFile.model_validate(content["federation"])
            self.sites: dict[str, dict[str, Any]] = content["sites"]
            self.retired: dict[str, str] = content["retired"]
            self.retired_signing: dict[str, str] = content.get("retired-signing", {})  # missing in older registries
            self.federation_id, self.instruction_keys = _identity(content)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            old = (folder / "members.json").is_file()
            hint = "move its members.json into registry/" if old else "name that folder"
            if self._file.is_file():
                raise ConfigError(
                    f"{self._file}: expected the registry made by fedveil provision, found a damaged one "
                    f"({type(error).__name__}: {error}); restore it from a backup, since it lists the members"
                ) from None
            raise ConfigError(
                f"{folder}: expected a folder made by fedveil provision, found none "
                f"({type(error).__name__}: {error}); {hint}"
            ) from None

    @classmethod
    def create(cls, folder: Path, federation: FederationFile, instruction_keys: tuple[str, ...] = ()) -> SiteRegistry:
        """Create a registry with all sites invited and a new federation ID.

        With `instruction_keys`, which every kit then names, all sites sign.
        """
        about = federation.model_dump(mode="json", by_alias=True)
        entry = {"state": "invited"} | ({"signs": True} if instruction_keys else {})
        content = {
            "federation": about, "federation-id": _draw_id(), "instruction-keys": list(instruction_keys),
            "sites": dict.fromkeys(federation.sites, entry), "retired": {},
        }  # fmt: skip
        write_atomic(registry_folder(folder) / "members.json", json.dumps(content, indent=1).encode())
        members = cls(folder)
        members._save_signers()
        return members

    @classmethod
    @contextlib.contextmanager
    def locked(cls, folder: Path) -> Iterator[SiteRegistry]:
        """Load the registry, and lock it against other commands until the block ends. Raises ConfigError."""
        if not (registry_folder(folder) / "members.json").is_file():
            cls(folder)  # raises an error that says what is missing
        with command_lock.hold_lock(registry_folder(folder) / ".lock", "members"):
            yield cls(folder)

    def entry(self, site: str) -> dict[str, Any]:
        """Return a site's registry entry. Raises ConfigError if it is not a site of this federation."""
        if site not in self.sites:
            raise ConfigError(
                f"site: expected one of {sorted(self.sites)}, found {site!r}; add a site with fedveil members add "
                f"{self.folder} NAME"
            )
        return self.sites[site]

    def with_site(self, site: str) -> FederationFile:
        """Return the federation with one more site, without saving it. Raises ConfigError for an invalid name."""
        if used := [name for name in self.sites if name.lower() == site.lower()]:
            kit = self.folder / "kits" / f"{used[0]}.tar.gz"
            raise ConfigError(f"SITE: expected an unused name, found {used[0]}; its kit is {kit}")
        about = self.federation.model_dump(by_alias=True)
        try:
            return FederationFile.model_validate(about | {"sites": [*self.federation.sites, site]})
        except ValidationError:
            raise ConfigError(
                "SITE: expected letters, digits, '-', '_' or '.', at most 64, and not \"superlink\", found "
                f"{sanitize(site, 80)!r}; choose another"
            ) from None

    def add(self, site: str, signs: bool = False) -> None:
        """Add an invited site; `signs`: its kit names the instruction keys. Raises ConfigError, like `with_site`."""
        self.federation = self.with_site(site)
        self.sites[site] = {"state": "invited"} | ({"signs": True} if signs else {})
        self.save()

    def with_server(self, names: Sequence[str], only: bool) -> FederationFile:
        """Return the federation with these server names first, without saving it. Raises ConfigError for invalid names.

        Args:
            only: drop the previous names.
        """
        kept = [] if only else [name for name in self.federation.server if name not in names]
        about = self.federation.model_dump(by_alias=True)
        try:
            if any(name.count(":") == 1 for name in names):  # more colons mean an IPv6 address
                raise ValueError("a port")
            return FederationFile.model_validate(about | {"server": [*dict.fromkeys(names), *kept]})
        except ValueError:  # includes pydantic's ValidationError
            raise ConfigError(
                f"NAME: expected host names or addresses without a port, found {sanitize(' '.join(names), 200)!r}; the "
                "federation's port stays as it is"
            ) from None

    def rename_server(self, federation: FederationFile) -> None:
        """Save a federation returned by `with_server`."""
        self.federation = federation
        self.save()

    def mark_signing(self, site: str) -> None:
        """Record that the site's kit lists the instruction keys, so that the site signs its replies."""
        self.sites[site] = {**self.entry(site), "signs": True}
        self.save()

    def signs(self, site: str) -> bool:
        """Return whether the site's kit names the instruction keys."""
        return self.entry(site).get("signs") is True

    def require_signatures(self) -> None:
        """Count only signed replies from now on. Raises ConfigError if a registered site cannot sign."""
        if missing := {site: why for site in sorted(self.sites) if (why := self._unable_to_sign(site))}:
            sites = "; ".join(f"{site}: {why}" for site, why in missing.items())
            raise ConfigError(
                f"require-signatures: expected every registered site to sign its replies, found {len(missing)} that "
                f"cannot: {sites}"
            )
        if not self.instruction_keys:
            raise ConfigError(
                f"require-signatures: expected instruction keys, found none; fedveil members kit {self.folder} NAME "
                "creates them, and a site's kit that names them"
            )
        self.federation = self.federation.model_copy(update={"signatures": "required"})
        self.save()

    def _unable_to_sign(self, site: str) -> str:
        """Return why a registered site cannot sign, with the next step; "" if it can or is not registered."""
        entry = self.sites[site]
        if entry["state"] != "registered":
            return ""
        if not _usable_key(entry.get("signing")):
            return (
                "it has registered no usable signing key; run fedveil site init --renew there, then fedveil members "
                "register here"
            )
        if not self.signs(site):
            return f"its kit has no instruction keys; run fedveil members kit {self.folder} {site}"
        return ""

    def require_new(self, site: str, public: str) -> None:
        """Raise ConfigError for a key that was revoked or replaced, or belongs to another site."""
        if public in self.retired:
            raise ConfigError(
                f"{site}: expected a new key, found one that was {self.retired[public]}; make one with fedveil site "
                "init --renew"
            )
        for other, entry in self.sites.items():
            if entry.get("key") == public and other == site:
                raise ConfigError(
                    f"{site}: expected a key that is not registered yet, found the site's registered key; there is "
                    f"nothing to do (see fedveil members list {self.folder}), unless the site makes a new key with "
                    "fedveil site init --renew"
                )
            if entry.get("key") == public:
                raise ConfigError(
                    f"{site}: expected its own, unregistered key, found the key of {other}; fedveil site init makes one"
                )

    def require_new_signing(self, site: str, signing: str) -> None:
        """Raise ConfigError for a signing key that was revoked or replaced, or belongs to another site."""
        if signing in self.retired_signing:
            raise ConfigError(
                f"{site}: signing: expected a new key, found one that was {self.retired_signing[signing]}; make one "
                "with fedveil site init --renew-signing"
            )
        for other, entry in self.sites.items():
            if other != site and entry.get("signing") == signing:
                raise ConfigError(
                    f"{site}: signing: expected its own key, found the key of {other}; fedveil site init "
                    "--renew-signing makes one"
                )

    def register(
        self, site: str, public: str, node: str = "", now: datetime | None = None, *, signing: str = ""
    ) -> None:
        """Set the site's keys and its Flower node ID; its earlier keys are retired.

        Without a new signing key, the site keeps its current one.
        """
        self.require_new(site, public)
        if signing:
            self.require_new_signing(site, signing)
        self._retire(site, "replaced")
        before = self.sites[site].get("signing", "")
        if before and signing and before != signing:
            self.retired_signing[before] = "replaced"
        start = now or datetime.now(UTC)
        until = start + timedelta(days=self.federation.key_days)
        times = {"registered": start.isoformat(timespec="seconds"), "until": until.isoformat(timespec="seconds")}
        signing_key = {"signing": signing or before} if signing or before else {}
        kit = {"signs": True} if self.signs(site) else {}
        self.sites[site] = {"state": "registered", "key": public, **signing_key, "node": node, **times, **kit}
        self.save()

    @property
    def signing_keys(self) -> dict[str, str]:
        """Return the registered sites' signing keys by name. Raises ConfigError for an invalid key."""
        keys_by_site = {s: e["signing"] for s, e in self.sites.items() if e["state"] == "registered" and "signing" in e}
        try:
            return dict(sorted(SigningKeyRoster(signing_keys=keys_by_site).signing_keys.items()))
        except ValidationError as error:
            key = ".".join(map(str, error.errors()[0]["loc"][1:]))
            raise ConfigError(
                f"{self._file}: {key}: signing: expected 64 hex digits, found something else; register the site again"
            ) from None

    def end(self, site: str, state: str) -> None:
        """Mark a site as revoked or expired: its key is never accepted again; if revoked, neither is its signing key.

        signers.json is written first, so that no run counts the site's replies if this is interrupted.
        """
        entry = self.entry(site)
        self._retire(site, state)
        if state == "revoked" and "signing" in entry:
            self.retired_signing[entry["signing"]] = state
        self.sites[site] = {**entry, "state": state}
        self._save_signers()
        self.save()

    def expired(self, now: datetime | None = None) -> list[str]:
        """Return the registered sites that are past their expiry date."""
        moment = now or datetime.now(UTC)
        registered = {site: entry for site, entry in self.sites.items() if entry["state"] == "registered"}
        return [site for site, entry in registered.items() if datetime.fromisoformat(entry["until"]) <= moment]

    def save(self) -> None:
        """Write members.json and signers.json; a registry from before 0.2 gets a federation ID."""
        self.federation_id = self.federation_id or _draw_id()
        about = self.federation.model_dump(mode="json", by_alias=True)
        content = {
            "federation": about, "federation-id": self.federation_id, "instruction-keys": list(self.instruction_keys),
            "sites": self.sites, "retired": self.retired, "retired-signing": self.retired_signing,
        }  # fmt: skip
        write_atomic(self._file, json.dumps(content, indent=1).encode())
        self._save_signers()

    def write_signers(self) -> None:
        """Rewrite signers.json if it is missing or differs from the registry, which may change meanwhile.

        No lock is needed: a command that changes members.json then writes signers.json, and this method rewrites it if
        members.json changed. A registry from before 0.2 has no federation ID, and no signers.json until it is saved.
        """
        members = self
        while members.federation_id:
            if _read_or_none(signers_file(self.folder)) != (content := members._signers().to_bytes()):
                write_atomic(signers_file(self.folder), content)
            members = SiteRegistry(self.folder)
            if members._signers().to_bytes() == content:
                return

    def _save_signers(self) -> None:
        self.federation_id = self.federation_id or _draw_id()
        write_atomic(signers_file(self.folder), self._signers().to_bytes())

    def _signers(self) -> SiteSigners:
        sites = {
            site: SiteSigner(
                str(entry.get("node", "")), _usable_key(entry.get("signing")), entry["state"], self.signs(site),
                _usable_moment(entry.get("until", "")),
            )
            for site, entry in self.sites.items()
        }  # fmt: skip
        return SiteSigners(self.federation_id, self.federation.signatures == "required", sites)

    def _retire(self, site: str, how: str) -> None:
        if (key := self.sites[site].get("key")) and self.sites[site]["state"] == "registered":
            self.retired[key] = how


def _draw_id() -> str:
    return secrets.token_hex(16)


def _identity(content: Any) -> tuple[str, tuple[str, ...]]:
    """Return the federation's ID and public instruction keys, or empty values. Raises ValueError if they're invalid."""
    federation, keys = content.get("federation-id", ""), content.get("instruction-keys", [])
    if type(federation) is not str or not re.fullmatch(r"([0-9a-f]{32})?", federation):
        raise ValueError("expected a federation-id of 32 hex digits")
    if type(keys) is not list or len(keys) not in (0, 2) or any(not _usable_key(key) for key in keys):
        raise ValueError("expected two instruction-keys of 64 hex digits each, neither of small order")
    return federation, tuple(keys)


def _read_or_none(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None


def _usable_moment(text: object) -> str:
    """Return a site's expiry time unchanged; if it is invalid, return a past time, so that no run counts the site."""
    try:
        if text != "":
            require_moment(text)
    except ValueError:
        return datetime.min.replace(tzinfo=UTC).isoformat()
    return str(text)


def _usable_key(text: object) -> str:
    """Return a public key in hex; "" for other text and for a key of small order, whose signature fits any text."""
    is_key = (
        type(text) is str and re.fullmatch(r"[0-9a-f]{64}", text) and not crypto.is_small_order(bytes.fromhex(text))
    )
    return str(text) if is_key else ""
