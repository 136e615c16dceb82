"""The most that the run has cost the records of each site so far, after every attempt: for the sinks.

It is what the report says at the end, from the server's record and the sites' own reports: the run alone, against
everyone but the site. A site has no figure where that is infinite or not known: no claim, seeded noise, sums that only
the server sees without noise, uploads that were added up unseen. Its own ledger knows better, and never comes here.

Accounting takes CPU time of the machine that the rounds run on, so it ends with the first attempt that takes it longer
than `MOST_SECONDS`, and status.json says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, final

from fedveil.config import RunConfig
from fedveil.contract.budget import Claim
from fedveil.server_app import going_back
from fedveil.server_app.following.figures import Figure, Told, finite

MOST_SECONDS = 20.0
_KEPT = ("round", "cohort", "accepted", "unseen")

Row = Mapping[str, Any]
Put = Callable[[Told], None]


@final
class Epsilons:
    """A sink that tells others. `before`: the run's attempts so far; `put` gets the figures of each further one."""

    def __init__(self, claim: Claim, config: RunConfig, before: Iterable[Row], put: Put) -> None:
        self._claim, self._batch, self._put = claim, config.train.batch_size, put
        self._attempts = [_needed(row) for row in before if "cohort" in row]

    def write(self, told: Told) -> None:
        """Raises TimeoutError where it has become too slow."""
        if "cohort" not in told.row:
            return
        from fedveil.privacy.from_reports import cost

        self._attempts.append(_needed(told.row))
        budget, started = self._claim.budget, time.monotonic()
        about = ("delta", f"{budget.delta:g}"), ("neighbours", str(budget.neighbours))
        found = []
        for site in told.row["cohort"]:
            known = cost(self._claim, self._batch, self._attempts, site)
            if not isinstance(known, str):
                found.append(Figure("site_epsilon", known.epsilon, (("site", site), *about)))
            if time.monotonic() - started > MOST_SECONDS:
                raise TimeoutError(f"accounting takes longer than {MOST_SECONDS:g} s an attempt; the report has it")
        self._put(Told(told.step, finite(found), {}, told.row))

    def close(self, state: str) -> None:
        """Nothing is open."""


def accountant(claim: Claim | None, config: RunConfig, metrics: Path) -> Callable[[Put], Epsilons] | None:
    """What makes the sink, if the run has an epsilon against the server too; `metrics`: of the rounds before a resume.

    Raises:
        StateError: metrics.jsonl cannot be read.
    """
    if claim is None or config.run.deterministic or claim.budget.server_trusted:
        return None
    before = going_back.lines(metrics)
    return lambda put: Epsilons(claim, config, before, put)


def _needed(row: Row) -> Row:
    reports = {
        site: {key: report[key] for key in ("num_examples", "steps") if key in report}
        for site, report in (row.get("reports") or {}).items()
    }
    return {key: row.get(key) for key in _KEPT} | {"reports": reports}
