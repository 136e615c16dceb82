"""Summarize a secure-aggregation run: its claims, the outcome of each attempt, and what was masked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedveil.client_app.policy import site_policy as policies
from fedveil.client_app.secure_round import FileSecAggStore
from fedveil.client_app.state.client_state import SECURE
from fedveil.console.runs.retained_state import RetainedRunState
from fedveil.console.runs.run_reader import Row, RunView
from fedveil.console.runs.site_notes import read_site_note
from fedveil.encrypted_files import FileSeal
from fedveil.errors import ConfigError, FedVeilError
from fedveil.federation.secagg.adversary_model import NOT_BOUND, AdversaryModel, single_site, weakest_adversary
from fedveil.sanitize import sanitize

NOT_SEEN = (
    "A server that kept to the protocol could not see a single site's values, number of examples, losses or upload "
    "norm. So none of them is shown, and the server could check only the sum, not each upload."
)


def secagg_note(unseen: Mapping[str, Any]) -> str:
    """Describe an attempt briefly: "sum of 3 sites, 3 of 4 holders can unmask it; unresponsive: west"."""
    parts = []
    if "sites" in unseen:
        parts.append(
            f"sum of {unseen['sites']} sites, {unseen['threshold']} of {unseen['holders']} holders can unmask it"
        )
    if deaf := unseen.get("deaf"):
        parts.append(
            "unresponsive: " + ", ".join(f"{sanitize(site, 80)} ({sanitize(why, 200)})" for site, why in deaf.items())
        )
    if reason := unseen.get("reason"):
        parts.append(f"NO SUM, discarded: {sanitize(reason)}")
    return "; ".join(parts)


def attempt_rows(run: RunView) -> list[list[object]]:
    """Return a row per attempt: round and attempt from 1, sites in the sum, share holders, threshold, and reasons.

    The reasons are why holders revealed no shares, and why there is no sum.
    """
    return [[a["round"] + 1, a.get("attempt", 0) + 1, *_of_attempt(a["unseen"])] for a in run.unseen]


def _of_attempt(unseen: Row) -> list[object]:
    deaf = "; ".join(f"{site}: {why}" for site, why in (unseen.get("deaf") or {}).items())
    return [*(unseen.get(key) for key in ("sites", "holders", "threshold")), deaf or None, unseen.get("reason")]


def secagg_claims(run: RunView) -> list[str]:
    """Return the run's security claims, based on its weakest attempt."""
    least = int(run.config.get("config", {}).get("secure.min-sites", 2))
    adversary = weakest_adversary((attempt["unseen"] for attempt in run.unseen), least, _partial(run))
    return [*adversary.words, NOT_BOUND] if adversary else []


def not_seen(run: RunView) -> str:
    """Return `NOT_SEEN`, with the exception for the run's method."""
    return " ".join(filter(None, [NOT_SEEN, single_site(_partial(run))]))


def _partial(run: RunView) -> bool | None:
    """Return the method's `has_partial_uploads`; None if this version cannot create the run's method."""
    from fedveil import strategies  # imports torch, only for a secure run's pages

    try:
        fields = run.config["method"]["fields"]
        return strategies.create_from_json(run.method, json.dumps(fields)).has_partial_uploads
    except (ConfigError, KeyError, TypeError):
        return None


def secagg_of_site(state_dir: Path, run: RetainedRunState, policy: str = "", key_file: str = "") -> list[str]:
    """Return a run's secure-aggregation claims as far as the site itself knows them; [] for a run without keys.

    Args:
        policy, key_file: needed if `fedveil site start` has not saved them, as in a container.
    """
    if not (run.folder / SECURE).is_file():
        return []
    try:
        site = read_site_note(state_dir, run.site, policy, key_file)
        site_policy, secagg_state = (
            policies.load_policy(site),
            FileSecAggStore(run.folder, FileSeal.from_key_file(site.key_file)).load(),
        )
    except (FedVeilError, OSError, ValueError) as error:
        return [f"secure aggregation: cannot read its keys: {sanitize(error)}"]
    if secagg_state is None or secagg_state.membership is None:
        return ["secure aggregation: key made, but no membership joined yet"]
    holders, threshold = secagg_state.membership.count, secagg_state.membership.threshold
    claim = AdversaryModel(
        holders, threshold, site_policy.min_cohort or 2, partial=None
    )  # a site does not record the method
    about = (
        f"secure aggregation: {threshold} of {holders} holders reconstruct a secret; sums of at least {claim.least} "
        "sites"
    )
    return [f"{about}, by this site's policy", *claim.words, NOT_BOUND]
