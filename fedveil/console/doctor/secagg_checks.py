"""The secure-aggregation checks of `fedveil doctor`: a site's signing key and demands, and the server's roster."""

from __future__ import annotations

from pathlib import Path

from fedveil.client_app.node_config import SiteConfig
from fedveil.client_app.policy.site_policy import policy_of_site
from fedveil.client_app.secure_round import read_key
from fedveil.console.doctor.checks import CheckResult
from fedveil.console.provisioning.enrollment import SIGNING_KEY, require_requested_signing_key, short_key
from fedveil.console.provisioning.federation_folder import SiteRegistry, roster_file
from fedveil.console.runs.site_requirements import site_requirements
from fedveil.errors import FedVeilError
from fedveil.federation.secagg import crypto
from fedveil.federation.secagg.adversary_model import EnforcedBounds
from fedveil.federation.secagg.roster import SigningKeyRoster, roster_digest

_WEAKER = "then only the server vouches for the sites' keys, so it could substitute its own"


def signing_key(site: SiteConfig, folder: Path) -> CheckResult:
    """Check that only its owner can read the signing key, and that it is the key in the registration request.

    The key is the one in the node config, or, on a container host, the one that was created in `folder`.
    """
    name = "signing key"
    if not site.signing_key:
        return CheckResult(
            name, "warn", "the node config names no signing key, so this site makes its own, which no roster contains"
        )
    named, made = Path(site.signing_key).expanduser(), folder / SIGNING_KEY
    file = made if made.is_file() and not named.exists() else named
    public = crypto.verifying_key(read_key(file)).hex()
    if (folder / "node.key").is_file():
        require_requested_signing_key(folder / "node.key", file)
    return CheckResult(
        name, "ok", f"{file}, readable only by this user; fedveil members roster shows it as {short_key(public)}"
    )


def check_roster(site: SiteConfig) -> CheckResult:
    """Check that the policy names a roster; report what its bounds guarantee against a dishonest server."""
    name = "roster"
    if not site.policy:
        return CheckResult(name, "warn", f"no policy: {_WEAKER}")
    policy = policy_of_site(site)
    if not policy.require_secure and (policy.roster or policy.min_cohort or policy.min_threshold):
        return CheckResult(
            name, "warn", f"{site.policy} limits masked runs but permits unmasked ones; set require-secure"
        )
    if not policy.roster:
        return CheckResult(name, "warn" if policy.require_secure else "ok", f"the policy names no roster: {_WEAKER}")
    if not site.site:
        return CheckResult(
            name, "warn", "the policy names a roster, but the node config no site: this site refuses masked runs, as "
            "the server could name another folder for its state; set site",
        )  # fmt: skip
    if policy.require_secure and not (policy.app_digests or policy.signers):
        return CheckResult(
            name, "warn", "the policy names a roster, but admits any code, which could ignore it; set app-digests or "
            "signers",
        )  # fmt: skip
    enforced = EnforcedBounds.from_requirements(site_requirements(policy))
    assert enforced is not None  # because there is a roster
    same = f"{policy.roster}, which must be the same at all other sites"
    if not policy.min_cohort:
        honest = enforced.least - enforced.colluding
        return CheckResult(
            name, "warn", f"{same}. Without min-cohort, the policy permits cohorts of {enforced.least} sites, and sums "
            f"with {honest} honest sites; set min-cohort",
        )  # fmt: skip
    return CheckResult(name, "ok", f"{same}. {enforced.words}")


def check_registered_key(folder: Path) -> CheckResult:
    """Check that the server's roster file matches the registry."""
    name, members, file = "roster", SiteRegistry(folder).signing_keys, roster_file(folder)
    if not file.exists():
        verdict = "no site has a signing key" if not members else "run fedveil members roster"
        return CheckResult(name, "ok" if not members else "warn", f"none at {file}: {verdict}")
    try:
        roster_keys = SigningKeyRoster.from_bytes(file.read_bytes()).signing_keys
    except FedVeilError as error:
        return CheckResult(name, "fail", f"{file}: {error}; run fedveil members roster to rewrite it")
    different = sorted(site for site in {*members, *roster_keys} if members.get(site) != roster_keys.get(site))
    if different:
        return CheckResult(
            name, "fail",
            f"{file} differs from the registry for {', '.join(different)}; run fedveil members roster, then put the "
            "new digest in the sites' policies",
        )  # fmt: skip
    return CheckResult(name, "ok", f"{len(roster_keys)} sites, same as in the registry, {roster_digest(roster_keys)}")
