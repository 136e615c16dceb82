"""The metrics of a run, one flat row per round: for pandas and for people, so rounds count from 1.

| column | value |
|---|---|
| `round` | rounds finished by then; 0 is the model before the first round |
| `sites` | accepted uploads |
| `upload_bytes`, `download_bytes`, `seconds` | of the round, with its repeated attempts |
| a metric of the task, such as `loss` | of the server's model, where it was scored |
| `VIEW/METRIC` | of another model of the method, such as `client/loss` |
| `SITE/NAME` | what a site reported: `north/loss_trained`, `north/num_examples` |
| `epsilon` | upper bound on what the run charged any record so far, at the most charged site; infinite if unknown |

A column is absent from rows without a value.
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
    """Return a row for the model before round 1, if it was scored, and one for every round that counted.

    Args:
        before: the scores of the initial model, by view.
        attempts: the attempts of metrics.jsonl, in order; those with "void" are left out.
        claim: the run's guarantee; with it, and `config`, rows have `epsilon`.
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
    """Return an upper bound on what a run has charged any record of each site; infinite where none is known."""
    return _RunningEpsilon(claim, config).after(attempts)


class _RunningEpsilon:
    """The bound by site after more and more attempts; equal sites are accounted once."""

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
