"""List a federation's offline members, with the reasons as far as the server knows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedveil.console.flower.flwr_cli import FlowerCli
from fedveil.console.provisioning.federation_folder import SiteRegistry


def node_states(folder: Path) -> dict[str, str]:
    """Return "online", "offline" or "registered" by node ID, using the connection in `folder`."""
    return FlowerCli(folder.absolute() / "server" / "flower").nodes()


def absent_members(folder: Path) -> dict[str, str]:
    """Return, by name, why members of the federation in `folder` are not online. Queries Flower on this machine."""
    states = node_states(folder)
    reasons = {site: why_absent(entry, states) for site, entry in sorted(SiteRegistry(folder).sites.items())}
    return {site: why for site, why in reasons.items() if why}


def why_absent(entry: dict[str, Any], states: dict[str, str]) -> str:
    """Return why a member is not online, or "". `entry`: from members.json; `states`: from Flower, by node ID."""
    state = entry["state"]
    if state == "invited":
        return "not registered yet: the operator has not registered a request from this site"
    if state != "registered":
        last = entry["until"][:10]
        both = " --renew-signing" if state == "revoked" else ""  # a revocation covers the signing key too
        return f"its key is {state} (expiry date: {last}); it needs a new key: fedveil site init --renew{both}"
    return {
        "online": "",
        "offline": "offline: was online with this key before, and is now stopped or disconnected",
        "registered": "never online with its registered key: it has not been started yet, uses another key, does not "
        "trust the server's certificate (an expired ca.crt), or cannot reach the server; run "
        "fedveil doctor at the site to find out",
    }.get(states.get(entry.get("node", ""), ""), "not known to Flower; run fedveil members sync")
