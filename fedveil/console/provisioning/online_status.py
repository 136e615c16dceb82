"""List the members of a federation that are not online, with the reason as far as the server knows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedveil.console.flower.flwr_cli import FlowerCli
from fedveil.console.provisioning.federation_folder import SiteRegistry


def node_states(folder: Path) -> dict[str, str]:
    """Return "online", "offline" or "registered" by node id, for the connection in `folder`."""
    return FlowerCli(folder.absolute() / "server" / "flower").nodes()


def absent_members(folder: Path) -> dict[str, str]:
    """Return why members of the federation in `folder` are not online, by name. Queries Flower on this machine."""
    states = node_states(folder)
    reasons = {site: why_absent(entry, states) for site, entry in sorted(SiteRegistry(folder).sites.items())}
    return {site: why for site, why in reasons.items() if why}


def why_absent(entry: dict[str, Any], states: dict[str, str]) -> str:
    """Return why a member is not online, "" if it is. `entry`: from members.json; `states`: Flower's, by node id."""
    state = entry["state"]
    if state == "invited":
        return "not registered yet: the operator has registered no request of this site"
    if state != "registered":
        last = entry["until"][:10]
        both = " --renew-signing" if state == "revoked" else ""  # a revocation covers the signing key too
        return f"its key is {state} (its last day was {last}); it needs a new key: fedveil site init --renew{both}"
    return {
        "online": "",
        "offline": "offline: was online with its key before, and is now stopped or disconnected",
        "registered": "never online with its registered key: it was not started yet, uses another key, does not "
        "trust the server's certificate (an expired ca.crt), or cannot reach the server; run "
        "fedveil doctor at the site to find out",
    }.get(states.get(entry.get("node", ""), ""), "not known to Flower; run fedveil members sync")
