"""Summarize a run with secure aggregation: its claims, the outcome of each attempt, and what was masked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedveil.client_app.node_config import SiteConfig
from fedveil.client_app.policy import policy_copies
from fedveil.client_app.policy import site_policy as policies
from fedveil.client_app.policy.site_policy import SitePolicy
from fedveil.client_app.secure_round import FileSecAggStore
from fedveil.client_app.state.client_state import SECURE
from fedveil.console.runs.retained_state import RetainedRunState
from fedveil.console.runs.run_reader import Row, RunView
from fedveil.console.runs.site_notes import read_site_note
from fedveil.console.runs.site_requirements import site_requirements
from fedveil.encrypted_files import FileSeal
from fedveil.errors import ConfigError, FedVeilError, PolicyError
from fedveil.federation.secagg.adversary_model import (
    TWO_ROUNDS,
    single_site,
    weakest_adversary,
    words_for_lying_server,
)
from fedveil.records import audit_log
from fedveil.sanitize import sanitize

NOT_SEEN = (
    "A server that followed the protocol could not see a single site's values, number of examples, losses or upload "
    "norm. So none of these is shown, and the server could check only the sum, not each upload."
)


def secagg_note(unseen: Mapping[str, Any]) -> str:
    """Describe an attempt briefly, as in "sum of 3 of 4 sites, 3 must agree to it; unresponsive: west"."""
    parts = []
    if "sites" in unseen:
        needed = f"{unseen['quorum']} must agree to it" if unseen["quorum"] else "it needs all of them"
        parts.append(f"sum of {unseen['sites']} of {unseen['cohort']} sites, {needed}")
    if deaf := unseen.get("deaf"):
        parts.append(
            "unresponsive: " + ", ".join(f"{sanitize(site, 80)} ({sanitize(why, 200)})" for site, why in deaf.items())
        )
    if reason := unseen.get("reason"):
        lost = "NO SUM, round lost" if unseen.get("lost") else "NO SUM, discarded"
        parts.append(f"{lost}: {sanitize(reason)}")
    return "; ".join(parts)


def attempt_rows(run: RunView) -> list[list[object]]:
    """Return a row per attempt: round and attempt (from 1), sites in the sum, cohort size, quorum, and reasons.

    The reasons say why sites signed no list or revealed no shares, and why there is no sum.
    """
    return [[a["round"] + 1, a.get("attempt", 0) + 1, *_of_attempt(a["unseen"])] for a in run.unseen]


def _of_attempt(unseen: Row) -> list[object]:
    deaf = "; ".join(f"{site}: {why}" for site, why in (unseen.get("deaf") or {}).items())
    quorum = unseen.get("quorum") or unseen.get("cohort")  # 0: a sum needs the whole cohort
    return [unseen.get("sites"), unseen.get("cohort"), quorum, deaf or None, unseen.get("reason")]


def secagg_claims(run: RunView) -> list[str]:
    """Return the security claims for the run, based on its weakest attempt."""
    least = int(run.config.get("config", {}).get("secure.min-sites", 2))
    adversary = weakest_adversary((attempt["unseen"] for attempt in run.unseen), least, *_exceptions(run))
    return adversary.words if adversary else []


def not_seen(run: RunView) -> str:
    """Return `NOT_SEEN`, with any exception for the run's method."""
    return " ".join(filter(None, [NOT_SEEN, single_site(_exceptions(run)[0])]))


def _exceptions(run: RunView) -> tuple[bool | None, bool | None, bool | None]:
    """Return `partial`, `broadcasts_bound` and `plans_entries` of the run's method; None if it cannot be created."""
    from fedveil import strategies  # imports torch, only for a secure run's pages

    try:
        fields = run.config["method"]["fields"]
        method = strategies.create_from_json(run.method, json.dumps(fields))
    except (ConfigError, KeyError, TypeError):
        return None, None, None
    bound = method.has_bound_broadcast
    return method.has_single_site_entries, bound, method.plans_entries


def secagg_of_site(state_dir: Path, run: RetainedRunState, policy: str = "", key_file: str = "") -> list[str]:
    """Return a run's secure-aggregation claims as far as the site itself can tell; [] for a run without keys.

    Args:
        policy, key_file: needed if `fedveil site start` has not saved them, as in a container.
    """
    if not (run.folder / SECURE).is_file():
        return []
    try:
        site = read_site_note(state_dir, run.site, policy, key_file)
        secagg_state = FileSecAggStore(run.folder, FileSeal.from_key_file(site.key_file)).load()
        todays = policies.load_policy(site)
    except (FedVeilError, OSError, ValueError) as error:
        return [f"secure aggregation: cannot read its keys: {sanitize(error)}"]
    if secagg_state is None or secagg_state.fence.masked is None:
        return ["secure aggregation: key created, but nothing masked yet"]
    round_, attempt = secagg_state.fence.masked
    signed = secagg_state.fence.signed
    agreed = "agreed to no sum yet" if signed is None else f"last agreed to a sum in round {signed + 1}"
    kept = _policy_of_round(state_dir, run, round_, site)
    words = words_for_lying_server(site_requirements(kept or todays), broadcasts_bound=None)  # no method is recorded
    by = "the policy of that round" if kept else "today's policy, because no copy of the policy of that round was found"
    return [
        f"secure aggregation: last masked for round {round_ + 1}, attempt {attempt + 1}; {agreed}; judged by {by}",
        *words,
        single_site(None),
        TWO_ROUNDS,
    ]


def _policy_of_round(state_dir: Path, run: RetainedRunState, round_: int, site: SiteConfig) -> SitePolicy | None:
    """Return the policy by which the site admitted this run's round, or None without log or readable copy.

    Other lines do not count: after a change, a later round may have been refused by a stricter policy.
    """
    digest, where = "", {"event": "admitted", "run": run.run, "site": run.site, "round": round_}
    for file in audit_log.list_log_files(state_dir / audit_log.NAME):
        with suppress(OSError):  # a run from before the log, or whose log was archived
            for line in audit_log.whole_lines(file):
                if all(line.get(key) == value for key, value in where.items()):
                    digest = str(line.get("policy") or digest)
    copy = policy_copies.find_copy(state_dir, digest)
    try:
        return policies.load_policy(site.model_copy(update={"policy": str(copy)})) if copy else None
    except PolicyError:
        return None  # an older release wrote keys that this one does not know
