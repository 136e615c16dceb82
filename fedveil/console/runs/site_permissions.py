"""What a site permits: its policy as far as it restricts runs, or that no policy is in force."""

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
    "This site permits everything: it was started with --permit-everything, so it trains whatever the server sends. "
    "No policy is in force. To change that, complete a site-policy.toml and start the site with --policy."
)


@dataclass(frozen=True)
class SitePermissions:
    """Permissions of the site of a state folder.

    Attributes:
        words: a sentence.
        keys: the keys that the policy sets, with their values, those of [permits] last; [] without a policy.
        is_known: False if nothing in the folder says it, as for a container.
        has_policy: whether a readable policy is in force.
    """

    words: str
    keys: list[tuple[str, str]]
    is_known: bool
    has_policy: bool


def read_permissions(state_dir: Path, policy: str = "") -> SitePermissions:
    """Read what `fedveil site start` saved in the state folder, and the policy that it names.

    `policy` names the policy's file instead, as for a container, which has no such note.
    """
    try:
        site = SiteConfig(policy=policy) if policy else site_of_folder(state_dir)
    except (FedVeilError, OSError, ValueError) as error:
        return SitePermissions(f"What this site permits is not known: {sanitize(error)}", [], False, False)
    if not site.policy:
        if not any(state_dir.expanduser().glob("*.toml")):
            words = "What this site permits is not known here: no site was started with this folder. Name its --policy."
            return SitePermissions(words, [], False, False)
        return SitePermissions(_EVERYTHING, [], True, False)
    file = sanitize(site.policy, 500)
    try:
        read = policy_of_site(site)
    except FedVeilError as error:
        return SitePermissions(f"{file}: {sanitize(error)} Until then it refuses every run.", [], True, False)
    own = read.model_dump(by_alias=True, exclude_unset=True, mode="json")
    permits = own.pop("permits", {})
    keys = [*own.items(), *((f"permits {key}", value) for key, value in permits.items())]
    shown = [(sanitize(key, 80), sanitize(str(value), 300)) for key, value in keys[:_MOST_KEYS]]
    more = f", of which {_MOST_KEYS} are listed" if len(keys) > _MOST_KEYS else ""
    if not keys:
        words = f"The policy {file} is empty, so it permits every run within its default bounds."
        return SitePermissions(words, [], True, True)
    return SitePermissions(f"The policy {file} is in force: {len(keys)} keys{more}.", shown, True, True)
