"""A run of secure aggregation from outside: what it claims, what came of each attempt, and what nobody could see."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedveil.client_app.site import policy as policies
from fedveil.client_app.site.private import SECURE
from fedveil.client_app.site.secure import FileStore
from fedveil.console.runs.folder import Row, Run
from fedveil.console.runs.kept import Kept
from fedveil.console.runs.noted import noted
from fedveil.errors import FedVeilError
from fedveil.federation.secure.claim import Claim, weakest
from fedveil.foreign import shown
from fedveil.sealed import Seal

NOT_SEEN = (
    "The server could not see of any single site: its values, its number of examples, its losses, the norm of its "
    "upload. So none of them is shown, and no upload could be judged by itself: the sum was."
)
_OF_SERVER = (
    "Said from the server's record, which does not know the sites' policies: a site whose policy names the roster is "
    "better off, as fedveil explain --policy says there."
)


def note(unseen: Mapping[str, Any]) -> str:
    """One attempt in a few words: "sum of 3 sites, 3 of 4 holders open it; deaf: west"."""
    parts = []
    if "sites" in unseen:
        parts.append(f"sum of {unseen['sites']} sites, {unseen['threshold']} of {unseen['holders']} holders open it")
    if deaf := unseen.get("deaf"):
        parts.append("deaf: " + ", ".join(f"{shown(site, 80)} ({shown(why, 200)})" for site, why in deaf.items()))
    if reason := unseen.get("reason"):
        parts.append(f"NO SUM, thrown away: {shown(reason)}")
    return "; ".join(parts)


def rows(run: Run) -> list[list[object]]:
    """Each, from 1 on: round, attempt, sites in the sum, holders, threshold, who opened no shares, why no sum."""
    return [[a["round"] + 1, a.get("attempt", 0) + 1, *_of_attempt(a["unseen"])] for a in run.unseen]


def _of_attempt(unseen: Row) -> list[object]:
    deaf = "; ".join(f"{site}: {why}" for site, why in (unseen.get("deaf") or {}).items())
    return [*(unseen.get(key) for key in ("sites", "holders", "threshold")), deaf or None, unseen.get("reason")]


def claims(run: Run) -> list[str]:
    """What the run held against, from its weakest attempt, for sites whose policy names no roster."""
    least = int(run.config.get("config", {}).get("secure.min-sites", 2))
    found = weakest((attempt["unseen"] for attempt in run.unseen), least)
    return [*found.words, _OF_SERVER] if found else []


def of_site(state_dir: Path, run: Kept, policy: str = "", key_file: str = "") -> list[str]:
    """What a run at a site claims, as far as the site knows by itself; [] for one without keys.

    Args:
        policy, key_file: where `fedveil site start` has not noted them, as in a container.
    """
    if not (run.folder / SECURE).is_file():
        return []
    try:
        site = noted(state_dir, run.site, policy, key_file)
        found, kept = policies.of(site), FileStore(run.folder, Seal.of(site.key_file)).load()
    except (FedVeilError, OSError, ValueError) as error:
        return [f"secure aggregation: its keys cannot be read: {shown(error)}"]
    if kept is None or kept.membership is None:
        return ["secure aggregation: a key is made, no membership joined yet"]
    holders, threshold = kept.membership.count, kept.membership.threshold
    claim = Claim(holders, threshold, found.min_cohort or 2, bool(found.roster), not kept.membership.neighbours)
    about = f"secure aggregation: {holders} holders, {threshold} open a secret; sums of {claim.least} sites or more"
    return [f"{about}, by this site's policy", *claim.words]
