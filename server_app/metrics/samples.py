"""Convert a line of metrics.jsonl to labeled samples, for programs that plot or store them.

| metric | labels | meaning |
|---|---|---|
| asked, accepted, failed | - | number of sites in the attempt |
| upload_bytes, download_bytes, seconds | - | totals for the attempt, including refused uploads |
| score | view, metric | score of the server's model after the round |
| site_accepted | site | 1, or 0 if the attempt continued without the site |
| site_upload_bytes, site_download_bytes | site | size of its messages, including refused uploads |
| site_ + a report key | site | value from its report: loss_received, loss_trained, train_seconds, ... |
| site_epsilon | site, delta, neighbours | upper bound on the run's cost per record so far (epsilon.py); it follows
  the attempt's other metrics |

All samples come from the run folder, and all of them are finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Labels = tuple[tuple[str, str], ...]
Sizes = Mapping[str, Mapping[str, int]]  # by site: {"upload_bytes": ..., "download_bytes": ...}

_OF_THE_ROUND = ("upload_bytes", "download_bytes", "seconds")


@dataclass(frozen=True)
class MetricSample:
    """One number from a round. `labels` are names and values in a fixed order."""

    name: str
    value: float
    labels: Labels = ()

    @property
    def path(self) -> str:
        """Return the name and labels as one text: "site_loss_received/north"."""
        return "/".join((self.name, *(value for _, value in self.labels)))


@dataclass(frozen=True)
class RoundMetrics:
    """The metrics of one attempt at a round; a sink gets them all together or in two parts with the same `row`.

    Attributes:
        step: number of rounds finished so far; 0 for the scores before round 0.
        figures: all metrics of the attempt, or their second part.
        failed: failure reason by site; untrusted text, because sites may have written it.
        row: the line of metrics.jsonl.
    """

    step: int
    figures: tuple[MetricSample, ...]
    failed: Mapping[str, str]
    row: Mapping[str, Any] = field(default_factory=dict)


def samples_from_line(row: Mapping[str, Any], sizes: Sizes) -> RoundMetrics:
    """Return the samples from a line of metrics.jsonl that records an attempt, or the scores before round 0."""
    samples = finite_samples([*_of_round(row), *_of_sites(row, sizes)])
    return RoundMetrics(int(row["round"]) + 1, samples, dict(row.get("failed") or {}), row)


def finite_samples(figures: Iterable[MetricSample]) -> tuple[MetricSample, ...]:
    """Return the finite samples."""
    return tuple(figure for figure in figures if math.isfinite(figure.value))


def _of_round(row: Mapping[str, Any]) -> Iterator[MetricSample]:
    if "cohort" in row:
        yield MetricSample("asked", float(len(row["cohort"])))
        for name in ("accepted", "failed"):
            yield MetricSample(name, float(len(row[name])))
        for name in _OF_THE_ROUND:
            yield MetricSample(name, float(row[name]))
    for view, scores in (row.get("scores") or {}).items():
        for metric, value in scores.items():
            yield MetricSample("score", float(value), (("view", view), ("metric", metric)))


def _of_sites(row: Mapping[str, Any], sizes: Sizes) -> Iterator[MetricSample]:
    accepted = set(row.get("accepted") or [])
    for site in sorted({*(row.get("cohort") or []), *(row.get("failed") or {})}):
        yield _of("site_accepted", site in accepted, site)
        for name, size in sizes.get(site, {}).items():
            yield _of(f"site_{name}", size, site)
        for name, value in ((row.get("reports") or {}).get(site) or {}).items():
            yield _of(f"site_{name}", value, site)


def _of(name: str, value: float, site: str) -> MetricSample:
    return MetricSample(name, float(value), (("site", site),))
