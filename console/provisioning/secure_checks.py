"""What `fedveil doctor` looks at for secure aggregation: a site's signing key and demands, the server's roster."""

from __future__ import annotations

from pathlib import Path

from fedveil.client_app.site.node_config import Site
from fedveil.client_app.site.policy import of_site
from fedveil.client_app.site.secure import read_key
from fedveil.console.provisioning.checks import Check
from fedveil.console.provisioning.enrol import SIGNING_KEY, short
from fedveil.console.provisioning.federation import Members, roster_file
from fedveil.errors import FedVeilError
from fedveil.federation.secure import keys
from fedveil.federation.secure.membership import Roster, roster_digest

_WEAKER = "a masked run then holds against an honest but curious server alone, for it says whose keys are whose"


def signing_key(site: Site, folder: Path) -> Check:
    """A signing key that its owner alone can read: the node config's, or, on the host of a container, the one made."""
    name = "signing key"
    if not site.signing_key:
        return Check(name, "warn", "the node config names none: this site makes one by itself, which no roster has")
    named, made = Path(site.signing_key).expanduser(), folder / SIGNING_KEY
    file = made if made.is_file() and not named.exists() else named
    public = keys.verifying_key(read_key(file)).hex()
    return Check(name, "ok", f"{file}, for this user alone; fedveil members roster shows it as {short(public)}")


def roster(site: Site) -> Check:
    """Whether the policy names the other sites' keys, and demands what it bounds."""
    name = "roster"
    if not site.policy:
        return Check(name, "warn", f"no policy: {_WEAKER}")
    policy = of_site(site)
    if not policy.require_secure and (policy.roster or policy.min_cohort or policy.min_threshold):
        return Check(name, "warn", f"{site.policy} bounds masked runs and lets runs in the clear pass: require-secure")
    if not policy.roster:
        return Check(name, "warn" if policy.require_secure else "ok", f"the policy names none: {_WEAKER}")
    return Check(name, "ok", f"{policy.roster}, of which the other sites must say the same")


def registered(folder: Path) -> Check:
    """At the server: whether the roster file is what the registry says."""
    name, members, file = "roster", Members(folder).signing_keys, roster_file(folder)
    if not file.exists():
        verdict = "no site has a signing key" if not members else "fedveil members roster writes it"
        return Check(name, "ok" if not members else "warn", f"none at {file}: {verdict}")
    try:
        found = Roster.of(file.read_bytes()).signing_keys
    except FedVeilError as error:
        return Check(name, "fail", f"{file}: {error}; fedveil members roster writes it anew")
    different = sorted(site for site in {*members, *found} if members.get(site) != found.get(site))
    if different:
        return Check(
            name, "fail",
            f"{file} is not what the registry says of {', '.join(different)}: fedveil members roster, and the sites' "
            "policies need the new digest",
        )  # fmt: skip
    return Check(name, "ok", f"{len(found)} sites as in the registry, {roster_digest(found)}")
