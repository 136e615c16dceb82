"""A federation as its operator keeps it: federation.toml, and the folder that `fedveil provision` made from it.

    name = "pilot"
    server = ["fl.example.org", "10.1.0.5"]    # how sites reach the server; the first stands in the kits
    sites = ["north", "south"]
    fleet-port = 9092                          # from here on the defaults
    days = 365                                 # the server's certificate; 3 x as long for the CA
    key-days = 180                             # a site's registered key
    image = "fedveil:0.2.0"

    FOLDER/ca/ca.key             signs the server's certificate; move it off this machine between renewals
           ca/ca.crt server/               certificate, key, the SuperExec's secret, Flower's connection file: for the
           server alone
           kits/SITE.tar.gz      for the site; nothing secret in it
           registry/             what the SuperLink reads, anew at each change: members.json, each site with its public
           key, when it was registered, until when, revoked or not; operators.json, each operator with role and last day

| a site | its entry in members.json |
|---|---|
| has its kit and no key yet | "invited" |
| is registered with Flower | "registered", until `until` |
| past that day | the same; the SuperLink shuts it out by itself (guard/members.py) |
| was revoked, or `fedveil members expire` has run since | "revoked" or "expired"; a new key is accepted alone |
"""

from __future__ import annotations

import json
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fedveil import __version__
from fedveil.errors import ConfigError
from fedveil.records.files import write_atomic

SiteName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
Host = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9.:-]{0,250}[A-Za-z0-9])?$")]


class FederationFile(BaseModel):
    """federation.toml; see above."""

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=lambda n: n.replace("_", "-"))

    name: SiteName
    server: list[Host] = Field(min_length=1)
    sites: list[SiteName] = Field(min_length=1)
    fleet_port: int = Field(9092, ge=1, le=65535)
    days: int = Field(365, ge=1, le=3650)
    key_days: int = Field(180, ge=1, le=3650)
    image: str = Field(f"fedveil:{__version__}", pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$")

    @field_validator("sites")
    @classmethod
    def _each_once(cls, sites: list[str]) -> list[str]:
        if len({site.lower() for site in sites}) != len(sites) or "superlink" in sites:
            raise ValueError('expected each site once, and none called "superlink"')
        return sites

    @property
    def superlink(self) -> str:
        """HOST:PORT for a site."""
        return f"{self.server[0]}:{self.fleet_port}"

    @property
    def server_names(self) -> list[str]:
        """Every name by which the server is reached: those of the file, and those on its own host."""
        return [*self.server, "superlink", "localhost", "127.0.0.1"]


def parse(file: Path) -> FederationFile:
    """Raises ConfigError naming the key."""
    try:
        return FederationFile.model_validate(tomllib.loads(file.read_text()))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        known = [f.alias or name for name, f in FederationFile.model_fields.items()]
        raise ConfigError(f"{file}: {key}: {first['msg']}, found {first['input']!r}; known keys: {known}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: expected a federation.toml, found none ({error}); see docs/deploy.md") from None


def registry(folder: Path) -> Path:
    """The folder of a federation's folder that its SuperLink reads."""
    return folder / "registry"


class Members:
    """members.json of a federation's folder. Every change is written at once, whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = registry(folder) / "members.json"
        try:
            content = json.loads(self._file.read_text())
            self.federation = FederationFile.model_validate(content["federation"])
            self.sites: dict[str, dict[str, Any]] = content["sites"]
            self.retired: dict[str, str] = content["retired"]
        except (OSError, ValueError, KeyError) as error:
            old = "; move its members.json into registry/" if (folder / "members.json").is_file() else ""
            raise ConfigError(
                f"{folder}: expected a folder that fedveil provision made, found none "
                f"({type(error).__name__}: {error}){old}"
            ) from None

    @classmethod
    def create(cls, folder: Path, federation: FederationFile) -> Members:
        """A new one, every site invited."""
        content = {"sites": {site: {"state": "invited"} for site in federation.sites}, "retired": {}}
        about = federation.model_dump(mode="json", by_alias=True)
        file = registry(folder) / "members.json"
        write_atomic(file, json.dumps({"federation": about, **content}, indent=1).encode())
        return cls(folder)

    def entry(self, site: str) -> dict[str, Any]:
        """What is known of a site. Raises ConfigError where it is none of this federation's."""
        if site not in self.sites:
            raise ConfigError(f"site: expected one of {sorted(self.sites)}, found {site!r}; add it to federation.toml")
        return self.sites[site]

    def require_new(self, site: str, public: str) -> None:
        """Raises ConfigError for a key that was revoked or replaced, or is another site's."""
        if public in self.retired:
            raise ConfigError(
                f"{site}: expected a new key, found one that was {self.retired[public]}; fedveil site init --renew "
                "makes one"
            )
        for other, entry in self.sites.items():
            if entry.get("key") == public:
                raise ConfigError(
                    f"{site}: expected a key of its own that is not registered yet, found that of {other}; "
                    "fedveil site init makes one"
                )

    def register(self, site: str, public: str, node: str = "", now: datetime | None = None) -> None:
        """The site's key from now on, and its node id at Flower; the key it had is retired."""
        self.require_new(site, public)
        self._retire(site, "replaced")
        start = now or datetime.now(UTC)
        until = start + timedelta(days=self.federation.key_days)
        times = {"registered": start.isoformat(timespec="seconds"), "until": until.isoformat(timespec="seconds")}
        self.sites[site] = {"state": "registered", "key": public, "node": node, **times}
        self.save()

    def end(self, site: str, state: str) -> None:
        """Revoked or expired: the key is never accepted again."""
        entry = self.entry(site)
        self._retire(site, state)
        self.sites[site] = {**entry, "state": state}
        self.save()

    def expired(self, now: datetime | None = None) -> list[str]:
        """Registered sites past their day."""
        moment = now or datetime.now(UTC)
        registered = {site: entry for site, entry in self.sites.items() if entry["state"] == "registered"}
        return [site for site, entry in registered.items() if datetime.fromisoformat(entry["until"]) <= moment]

    def save(self) -> None:
        """Writes the file."""
        about = self.federation.model_dump(mode="json", by_alias=True)
        content = {"federation": about, "sites": self.sites, "retired": self.retired}
        write_atomic(self._file, json.dumps(content, indent=1).encode())

    def _retire(self, site: str, how: str) -> None:
        if (key := self.sites[site].get("key")) and self.sites[site]["state"] == "registered":
            self.retired[key] = how
