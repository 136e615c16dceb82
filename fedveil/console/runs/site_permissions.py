"""A site's permissions: the policy keys that restrict runs, or the fact that no policy is in force."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedveil.client_app.node_config import SiteConfig
from fedveil.client_app.policy.site_policy import policy_of_site
from fedveil.console.runs.ledger_summary import site_of_folder
from fedveil.errors import FedVeilError
from fedveil.sanitize import sanitize

__all__ = ["SitePermissions", "read_permissions"]

_MOST_KEYS = 60
_EVERYTHING = (
    "This site permits everything: it was started with --permit-everything, so it runs whatever the server sends. "
    "No policy is in force. To change that, complete a site-policy.toml and start the site with --policy."
)


@dataclass(frozen=True)
class SitePermissions:
    """The permissions of a state folder's site.

    Attributes:
        words: one or more sentences for display.
        keys: the keys that the policy sets, with their values, [permits] keys last; [] without a policy.
        is_known: False if nothing in the folder tells, as in a container.
        has_policy: whether a readable policy is in force.
    """

    words: str
    keys: list[tuple[str, str]]
    is_known: bool
    has_policy: bool


def read_permissions(state_dir: Path, policy: str = "") -> SitePermissions:
    """Read the site that `fedveil site start` saved in the state folder, and its policy.

    `policy` names the policy file instead, as needed in a container, where nothing is saved.
    """
    try:
        site = SiteConfig(policy=policy) if policy else site_of_folder(state_dir)
    except (FedVeilError, OSError, ValueError) as error:
        return SitePermissions(f"This site's permissions are unknown: {sanitize(error)}", [], False, False)
    if not site.policy:
        if not any(state_dir.expanduser().glob("*.toml")):
            words = "This site's permissions are unknown, as no site was started with this folder. Use --policy."
            return SitePermissions(words, [], False, False)
        return SitePermissions(_EVERYTHING, [], True, False)
    file = sanitize(site.policy, 500)
    try:
        read = policy_of_site(site)
    except FedVeilError as error:
        return SitePermissions(f"{file}: {sanitize(error)} Until then, the site refuses every run.", [], True, False)
    own = read.model_dump(by_alias=True, exclude_unset=True, mode="json")
    permits = own.pop("permits", {})
    keys = [*own.items(), *((f"permits {key}", value) for key, value in permits.items())]
    shown = [(sanitize(key, 80), sanitize(str(value), 300)) for key, value in keys[:_MOST_KEYS]]
    more = f", of which {_MOST_KEYS} are listed" if len(keys) > _MOST_KEYS else ""
    if not keys:
        words = f"The policy {file} is empty, so it permits every run within its default bounds."
        return SitePermissions(words, [], True, True)
    return SitePermissions(f"The policy {file} is in force: {len(keys)} keys{more}.", shown, True, True)
