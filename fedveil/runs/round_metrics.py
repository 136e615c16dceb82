"""The metrics of a run, as one flat row per round, for pandas and human readers; rounds are numbered from 1.

| column | value |
|---|---|
| `round` | number of finished rounds; 0 is the model before the first round |
| `sites` | number of accepted uploads |
| `upload_bytes`, `download_bytes`, `seconds` | totals for the round, including its repeated attempts |
| a metric of the task, such as `loss` | score of the server's model, if it was scored |
| `VIEW/METRIC` | score of another of the method's models, such as `client/loss` |
| `SITE/NAME` | a value that a site reported: `north/loss_trained`, `north/num_examples` |
| `epsilon` | upper bound on the epsilon charged to any record so far, for the site charged most; infinite if unknown |

A row omits the columns for which it has no value.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fedveil.config import RunConfig
from fedveil.contract.privacy import PrivacyGuarantee
from fedveil.privacy.server_side_bound import ServerSideBound, server_side_bound

__all__ = ["bound_epsilon", "round_rows"]

Row = Mapping[str, Any]
_SUMMED = ("upload_bytes", "download_bytes", "seconds")


def round_rows(
    before: Mapping[str, Mapping[str, float]],
    attempts: Sequence[Row],
    claim: PrivacyGuarantee | None = None,
    config: RunConfig | None = None,
) -> list[dict[str, Any]]:
    """Return one row for the model before round 1, if it was scored, and one for every round that counted.

    Args:
        before: the scores of the initial model, by view.
        attempts: the attempts in metrics.jsonl, in order; those marked "void" are omitted.
        claim: the run's guarantee; if it and `config` are given, rows have `epsilon`.
    """
    rows: list[dict[str, Any]] = [{"round": 0, **_scores(before)}] if before else []
    spent = Counter[str]()
    epsilons = _RunningEpsilon(claim, config) if claim and config else None
    for i, attempt in enumerate(attempts):
        spent.update({name: attempt.get(name) or 0 for name in _SUMMED})
        if attempt.get("void") or not attempt.get("weights"):
            continue
        row: dict[str, Any] = {"round": int(attempt["round"]) + 1, "sites": len(attempt.get("accepted") or []), **spent}
        row |= _scores(attempt.get("scores") or {})
        for site, report in (attempt.get("reports") or {}).items():
            row |= {f"{site}/{name}": value for name, value in report.items()}
        if epsilons:
            row["epsilon"] = max(epsilons.after(attempts[: i + 1]).values(), default=0.0)
        rows.append(row)
        spent = Counter[str]()
    return rows


def bound_epsilon(claim: PrivacyGuarantee, config: RunConfig, attempts: Sequence[Row]) -> dict[str, float]:
    """Return, by site, an upper bound on the epsilon a run has charged to any record; infinite if none is known."""
    return _RunningEpsilon(claim, config).after(attempts)


class _RunningEpsilon:
    """The bound for each site after a growing list of attempts; sites with equal histories are computed once."""

    def __init__(self, claim: PrivacyGuarantee, config: RunConfig) -> None:
        self._claim, self._config = claim, config
        self._known: dict[tuple[Any, ...], float] = {}

    def after(self, attempts: Sequence[Row]) -> dict[str, float]:
        sites = sorted({site for attempt in attempts for site in attempt.get("cohort") or []})
        if self._config.run.deterministic or self._claim.budget.server_trusted:
            return dict.fromkeys(sites, math.inf)
        return {site: self._of_site(attempts, site) for site in sites}

    def _of_site(self, attempts: Sequence[Row], site: str) -> float:
        key = tuple(
            (a["round"], site in (a.get("accepted") or []), *_counts(a, site))
            for a in attempts
            if site in (a.get("cohort") or [])
        )
        if key not in self._known:
            bound = server_side_bound(self._claim, self._config.train.batch_size, attempts, site)
            self._known[key] = bound.epsilon if isinstance(bound, ServerSideBound) else math.inf
        return self._known[key]


def _counts(attempt: Row, site: str) -> tuple[Any, Any]:
    report = (attempt.get("reports") or {}).get(site) or {}
    return report.get("num_examples"), report.get("steps")


def _scores(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    server = "server" if "server" in scores else next(iter(scores), "")
    return {
        name if view == server else f"{view}/{name}": value
        for view, metrics in scores.items()
        for name, value in metrics.items()
    }
