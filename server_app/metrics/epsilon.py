"""Compute, after every attempt, an upper bound on each site's privacy cost per record so far, for the sinks.

It is the value in the final report, computed from the server's record and the sites' own reports: for this run only,
against everyone but the site. A site has no value if the bound is infinite or unknown: no claim, seeded noise, sums
that only the server sees without noise, securely aggregated uploads. The site's own ledger is more exact, and never
leaves the site.

Accounting uses CPU time on the machine that runs the rounds, so it stops after the first attempt whose accounting takes
longer than `MOST_SECONDS`, and status.json reports this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, final

from fedveil.config import RunConfig
from fedveil.contract.privacy import PrivacyGuarantee
from fedveil.server_app import checkpoints
from fedveil.server_app.metrics.samples import MetricSample, RoundMetrics, finite_samples

MOST_SECONDS = 20.0
_KEPT = ("round", "cohort", "accepted", "unseen")

Row = Mapping[str, Any]
Put = Callable[[RoundMetrics], None]


@final
class EpsilonSink:
    """A sink that feeds other sinks. `before`: the run's attempts so far; `put` gets each new attempt's metrics."""

    def __init__(self, claim: PrivacyGuarantee, config: RunConfig, before: Iterable[Row], put: Put) -> None:
        self._claim, self._batch, self._put = claim, config.train.batch_size, put
        self._attempts = [_needed(row) for row in before if "cohort" in row]

    def write(self, told: RoundMetrics) -> None:
        """Account for one attempt. Raises TimeoutError if this has become too slow."""
        if "cohort" not in told.row:
            return
        from fedveil.privacy.server_side_bound import server_side_bound

        self._attempts.append(_needed(told.row))
        budget, started = self._claim.budget, time.monotonic()
        about = ("delta", f"{budget.delta:g}"), ("neighbours", str(budget.neighbours))
        samples = []
        for site in told.row["cohort"]:
            known = server_side_bound(self._claim, self._batch, self._attempts, site)
            if not isinstance(known, str):
                samples.append(MetricSample("site_epsilon", known.epsilon, (("site", site), *about)))
            if time.monotonic() - started > MOST_SECONDS:
                raise TimeoutError(f"accounting takes more than {MOST_SECONDS:g} s; the report has the epsilon")
        self._put(RoundMetrics(told.step, finite_samples(samples), {}, told.row))

    def close(self, state: str) -> None:
        """Do nothing: nothing is open."""


def make_epsilon_sink(
    claim: PrivacyGuarantee | None, config: RunConfig, metrics: Path
) -> Callable[[Put], EpsilonSink] | None:
    """Return a factory for the sink, or None if the run has no epsilon that also holds against the server.

    `metrics` is the file with the rounds before a resume.

    Raises:
        StateError: metrics.jsonl cannot be read.
    """
    if claim is None or config.run.deterministic or claim.budget.server_trusted:
        return None
    before = checkpoints.read_lines(metrics)
    return lambda put: EpsilonSink(claim, config, before, put)


def _needed(row: Row) -> Row:
    reports = {
        site: {key: report[key] for key in ("num_examples", "steps") if key in report}
        for site, report in (row.get("reports") or {}).items()
    }
    return {key: row.get(key) for key in _KEPT} | {"reports": reports}
