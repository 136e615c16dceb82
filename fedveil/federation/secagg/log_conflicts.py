"""Contradictions between sites' audit logs, which show that a server lied, or that a party was rolled back.

| found | means |
|---|---|
| two plans for one run, round and attempt | the server showed two plans, or restarted from an older state |
| two lists for one plan | the server asked for two sums; a site that signed both also lied, or was rolled back |

The server does not sign the plan. So the logs convince only a reader who trusts both sites.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedveil.sanitize import sanitize

_Key = tuple[str, int, int]  # run, round, attempt
Lines = Iterable[Mapping[str, Any]]
_SIGNED = ("signed", "opened")


def count_common_plans(first: Lines, second: Lines) -> int:
    """Return the number of attempts for which both logs have a plan."""
    return len(_plans(first).keys() & _plans(second).keys())


def find_conflicts(lines: Lines) -> list[str]:
    """Return a sentence for each contradiction in several logs' lines about secure aggregation."""
    lines = list(lines)
    conflicts = []
    for (run, round_, attempt), plans in _plans(lines).items():
        if len(plans) > 1:
            shown = "; ".join(f"plan {plan} at {_names(sites)}" for plan, sites in plans.items())
            conflicts.append(
                f"{sanitize(run, 80)}, round {round_ + 1}, attempt {attempt + 1}: the sites masked for "
                f"{len(plans)} plans: {shown}. The server showed them different plans, or restarted from an older state"
            )
    for plan, lists in _lists(lines).items():
        if len(lists) > 1:
            shown = "; ".join(f"list {digest} by {_names(sites)}" for digest, sites in lists.items())
            both = set.intersection(*lists.values())
            named = f". {_names(both)} signed more than one: it lied, or was rolled back" if both else ""
            conflicts.append(f"plan {plan}: sites signed {len(lists)} lists of its sum: {shown}{named}")
    return conflicts


def _plans(lines: Lines) -> dict[_Key, dict[str, set[str]]]:
    """Return the sites that masked for each plan, by run, round and attempt."""
    found: dict[_Key, dict[str, set[str]]] = {}
    for line in lines:
        run, round_, attempt, plan = (line.get(key) for key in ("run", "round", "attempt", "plan"))
        if line.get("event") == "masked" and isinstance(run, str) and type(round_) is type(attempt) is int:
            found.setdefault((run, round_, attempt), {}).setdefault(sanitize(plan, 80), set()).add(
                str(line.get("site"))
            )
    return found


def _lists(lines: Lines) -> dict[str, dict[str, set[str]]]:
    """Return the sites that signed each list, by plan: the line's writer, and the signers named in the line."""
    found: dict[str, dict[str, set[str]]] = {}
    for line in lines:
        if line.get("event") in _SIGNED and isinstance(line.get("list"), str):
            signers = found.setdefault(sanitize(line.get("plan"), 80), {}).setdefault(sanitize(line["list"], 80), set())
            signers.add(str(line.get("site")))
            named = line.get("signatures")
            signers.update(map(str, named) if isinstance(named, dict) else ())
    return found


def _names(sites: Iterable[str]) -> str:
    return ", ".join(sanitize(site, 80) for site in sorted(sites))
