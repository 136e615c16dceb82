"""The federations on a dashboard: their members, and which members Flower sees online."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from fedveil.console.flower.flwr_cli import FlowerCli
from fedveil.console.provisioning.federation_folder import SiteRegistry, registry_folder
from fedveil.console.provisioning.online_status import why_absent
from fedveil.console.provisioning.refused_calls import CONTROL_LOG, read_refused_calls
from fedveil.console.web import safe_files
from fedveil.console.web.attention import KEY_DAYS, Need, certificate_needs, describe_days, key_days_left
from fedveil.console.web.background import BackgroundQueries, CachedAnswer
from fedveil.console.web.components import state_badge
from fedveil.console.web.metrics import GaugeSample
from fedveil.console.web.server_metrics import federation_samples
from fedveil.errors import FedVeilError
from fedveil.sanitize import sanitize

_ASK_FLOWER = 30.0  # seconds between queries; each costs two CPU seconds
_ANSWER_FLOWER = 10.0  # seconds that a page waits for an answer
_ANSWER_SCRAPE = 7.0  # the same for a scrape, of all federations together; Prometheus by default gives up after 10 s
_MOST_NEEDS = 10  # sites of a federation that need a person and are named at the top of the page
_OLD_ANSWER = 120.0  # seconds after which an old answer counts as none in the metrics


def name_federations(folders: Iterable[Path]) -> dict[str, Path]:
    """Return the folders by federation name, each folder once; a second federation named NAME becomes "NAME 2".

    Raises ConfigError if a folder is not a federation's folder.
    """
    federations: dict[str, Path] = {}
    for folder in {folder.resolve(): folder for folder in folders}.values():
        own = SiteRegistry(folder).federation.name  # raises an error that names a missing folder
        others = (f"{own} {number}" for number in count(2))
        federations[own if own not in federations else next(name for name in others if name not in federations)] = (
            folder
        )
    return federations


@dataclass(frozen=True)
class _FlowerAnswer:
    """Flower's answer about a federation: the status of each node by node ID, and of each unfinished run by run ID."""

    nodes: Mapping[str, str] = field(default_factory=dict)
    runs: Mapping[str, str] = field(default_factory=dict)


@dataclass
class DashboardFederations:
    """Federations made by `fedveil provision`: their folders, by the names shown on the pages."""

    folders: Mapping[str, Path]
    later: BackgroundQueries

    def seen(self) -> object:
        """Return a value that changes when the answers may: the registries' stamps, and the current query interval."""
        asked = int(time.time() / _ASK_FLOWER) if self.folders else 0
        files = [file for f in self.folders.values() for file in (registry_folder(f) / "members.json", f / CONTROL_LOG)]
        return safe_files.file_stamps(files), asked

    def logs(self) -> dict[str, Path]:
        """Return the federations' control logs, by their names in a URL."""
        files = {f"control of {name}": folder / CONTROL_LOG for name, folder in self.folders.items()}
        return {name: file for name, file in files.items() if safe_files.file_stamps([file])}

    def all(self) -> list[dict[str, Any]]:
        """Return each federation for the page.

        Each has its members as `rows`, the number `online`, a note `said`, what `needs` a person, and the number of
        sites of which it is `unknown` whether they are online.
        """
        return [{"name": name, **self._members(folder)} for name, folder in self.folders.items()]

    def online(self) -> dict[tuple[str, str], object]:
        """Return the online status of each (federation, site), as a tag for the page."""
        return {(one["name"], row[0]): row[1] for one in self.all() for row in one["rows"]}

    def unfinished_runs(self) -> dict[tuple[str, str], str]:
        """Return Flower's status for each unfinished run, by (federation, Flower's run ID)."""
        return {
            (name, sanitize(number, 40)): sanitize(status, 40)
            for name, folder in self.folders.items()
            for number, status in (self._answer(folder).value or _FlowerAnswer()).runs.items()
        }

    def metric_groups(self) -> Iterator[Iterator[GaugeSample]]:
        """Yield each federation's metrics as a group, asking Flower if its last answer is old.

        All federations are asked at once, and share the time that a scrape waits.
        """
        end = time.monotonic() + _ANSWER_SCRAPE
        for folder in self.folders.values():
            self._answer(folder, 0.0)
        for name, folder in self.folders.items():
            answer = self._answer(folder, end - time.monotonic())
            is_known = answer.value is not None and (answer.is_new or time.time() - answer.at < _OLD_ANSWER)
            seen = answer.value if is_known else None
            yield federation_samples(name, folder, seen.nodes if seen else None, seen.runs if seen else {})

    def whose(self, federation: str) -> str:
        """Return the federation to which a run folder's runs belong; "" if unknown."""
        return federation or (next(iter(self.folders)) if len(self.folders) == 1 else "")

    def _members(self, folder: Path) -> dict[str, Any]:
        try:
            return self._of_members(folder)
        except (FedVeilError, OSError, KeyError, TypeError, AttributeError) as error:
            message = (
                f"Its registry cannot be read: {sanitize(error if isinstance(error, FedVeilError) else repr(error))}"
            )
            needs = [Need(f"Federation {folder.name}", message)]
            return {"asked": False, "rows": [], "said": message, "online": 0, "of": 0, "needs": needs, "unknown": 0}

    def _of_members(self, folder: Path) -> dict[str, Any]:
        members, online, refused = SiteRegistry(folder), self._answer(folder), read_refused_calls(folder)
        nodes = dict(online.value.nodes) if online.value is not None else {}
        rows, well, needs, not_known = [], 0, list[Need](), 0
        for site, entry in sorted(members.sites.items()):
            why = why_absent(entry, nodes)
            # An outdated answer does not cover sites added since then, so it gives no advice.
            is_old = online.value is None or (why and not online.is_new)
            unknown = bool(is_old) and entry["state"] == "registered"
            is_online = not why and not unknown
            well += is_online
            not_known += unknown
            shown_state: object = (
                state_badge("online")
                if is_online
                else state_badge(
                    "being asked" if unknown and not online.why else "not known" if unknown else "not online"
                )
            )
            until = str(entry.get("until", ""))[:10]
            notes = ["" if unknown else why, str(refused[site]) if site in refused else ""]
            rows.append([site, shown_state, entry["state"], until or None, "; ".join(filter(None, notes))])
            wrong = _needs_of_site(entry, "" if unknown or is_online else why, until)
            is_rogue = site in refused and refused[site].is_rogue
            wrong += [str(refused[site])] if is_rogue else []
            needs += [Need(f"Site {site}", "; ".join(wrong), is_urgent=is_rogue)] if wrong else []
        message = f"Flower does not answer: {online.why}" if online.why else ""
        if not message and not online.is_new:
            message = "Asking Flower." if online.value is None else f"{online.since}; asking Flower."
        more = len(needs) - _MOST_NEEDS
        if more > 0:
            needs = [*needs[:_MOST_NEEDS], Need(f"{more:,} more sites", "the table of members below has the reasons")]
        needs += [Need("Flower", f"does not answer: {online.why}")] if online.why else []
        needs += certificate_needs(members.federation.name, folder)
        return {
            "asked": online.value is not None, "rows": rows, "said": message, "online": well, "of": len(rows),
            "needs": needs, "unknown": not_known,
        }  # fmt: skip

    def _answer(self, folder: Path, patience: float | None = None) -> CachedAnswer[_FlowerAnswer]:
        # A lane for each federation: a SuperLink that does not answer delays no other.
        return self.later.ask(
            ("flower", folder), int(time.time() / _ASK_FLOWER), lambda: _ask_flower(folder),
            _ANSWER_FLOWER if patience is None else patience, folder,
        )  # fmt: skip


def _needs_of_site(entry: Mapping[str, Any], absent: str, until: str) -> list[str]:
    """Return why a site needs a person: it is away, or its key ends soon. A revoked site is away on purpose."""
    if entry["state"] == "revoked":
        return []
    needs = [absent] if absent else []
    days = key_days_left(entry) if entry["state"] == "registered" else None
    if days is not None and days < KEY_DAYS:
        needs.append(f"its key {describe_days(days, until)}: fedveil site init --renew at the site")
    return needs


def _ask_flower(folder: Path) -> _FlowerAnswer:
    client = FlowerCli(folder.absolute() / "server" / "flower")
    return _FlowerAnswer(client.nodes(), client.unfinished_runs())
