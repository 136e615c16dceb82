"""Curves of the server's model by round, and the bytes needed to reach a given quality (FedRand, Figures 2 and 3).

A runner whose preset has `curve_every` runs its federations with `run_and_score`. Each row of the result then has a
`curve`: a list of {round, upload_bytes, download_bytes, metrics: {name: interval}}, from round 0, before any training,
to the last round. For each entry in `curve_targets`, {row, metric, margin}, each row with a curve reports after how
many bytes its metric (lower is better) fell to the target row's final value plus the margin (`compare_costs`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fedveil.contract.param_spec import Weights
from fedveil.errors import ConfigError
from fedveil.federation.in_process import InProcessFederation, OnRound
from fedveil_bench.common import resampling, verdicts
from fedveil_bench.common.resampling import ResampledMetric
from fedveil_bench.common.verdicts import ClaimSentence

_MEGA = 1e6


@dataclass(frozen=True)
class CurvePoint:
    """The server's model after some rounds.

    Attributes:
        round: number of finished rounds; 0 before any round.
        upload_bytes, download_bytes: total size of all messages up to then.
        figures: the model's scores.
    """

    round: int
    upload_bytes: float
    download_bytes: float
    figures: Mapping[str, ResampledMetric]

    def to_json(self) -> list[Any]:
        """Return a JSON form for sending between processes."""
        figures = {metric: figure.to_json() for metric, figure in self.figures.items()}
        return [self.round, self.upload_bytes, self.download_bytes, figures]

    @classmethod
    def from_json(cls, found: Sequence[Any]) -> CurvePoint:
        """Return the point from the output of `to_json`."""
        done, up, down, figures = found
        return cls(done, up, down, {metric: ResampledMetric.from_json(figure) for metric, figure in figures.items()})


@dataclass(frozen=True)
class FollowedRun:
    """The result of `run_and_score`.

    Attributes:
        points: the points from round 0 to the last round; none if no curve was requested.
        seconds: time spent on scoring, which is not part of the method's time.
    """

    points: list[CurvePoint]
    seconds: float


def run_and_score(
    running: InProcessFederation,
    every: int,
    score: Callable[[Weights], Mapping[str, ResampledMetric]],
    tell: OnRound | None = None,
) -> FollowedRun:
    """Run all rounds; score the server's model before them, after every `every` rounds, and at the end.

    Args:
        every: number of rounds between two points; with 0, the rounds run without scoring, and there is no curve.
        score: scores the server's model; it must be cheap, because it is called for each point.
        tell: called after each round.
    """
    points: list[CurvePoint] = []
    seconds = 0.0

    def note(done: int) -> None:
        nonlocal seconds
        started = time.perf_counter()
        figures = score(running.models()["server"])
        points.append(CurvePoint(done, running.upload_bytes, running.download_bytes, figures))
        seconds += time.perf_counter() - started

    def on_round(of: InProcessFederation, round_: int) -> None:
        done = round_ + 1
        if every and (done % every == 0 or done == of.config.run.rounds):
            note(done)
        if tell:
            tell(of, round_)

    if every:
        note(0)
    running.run(on_round)
    return FollowedRun(points, seconds)


def in_result(of_seeds: Sequence[Sequence[CurvePoint]]) -> list[dict[str, Any]]:
    """Return a row's `curve`: mean bytes and intervals over the seeds' curves, which have the same rounds."""
    return [
        {
            "round": points[0].round,
            "upload_bytes": round(statistics.fmean(p.upload_bytes for p in points)),
            "download_bytes": round(statistics.fmean(p.download_bytes for p in points)),
            "metrics": {
                metric: resampling.compute_interval(resampling.over_seeds([p.figures[metric] for p in points]))
                for metric in points[0].figures
            },
        }
        for points in zip(*of_seeds, strict=True)
    ]


def compare_costs(
    curves: Mapping[str, Sequence[Sequence[CurvePoint]]], targets: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return sentences about the bytes that each row needs to reach a quality, and whether it needs fewer than others.

    Every seed has its own target, from the target row in the same seed, so each row can reach it. Between two points of
    a curve, the metric and the bytes are interpolated linearly. Intervals are over the seeds.

    Args:
        curves: for each row, one curve per seed.
        targets: the preset's targets, each with "row", "metric" and "margin".

    Raises:
        ConfigError: a target row has no such metric in its curve, or a margin is not above 0.
    """
    said: list[str] = []
    compared: list[tuple[str, ClaimSentence]] = []
    seeds = 0
    for target in targets:
        row, metric, margin = target["row"], target["metric"], target["margin"]
        of_rows = {name: found for name, each in curves.items() if all(found := [_of(c, metric) for c in each])}
        if row not in of_rows or not margin > 0:
            raise ConfigError(
                f'curve_targets: expected a row with "{metric}" in its curve and a margin above 0, found "{row}" and '
                f"{margin:g}; correct the target, or set curve_every"
            )
        wanted = [points[-1].figures[metric].value + margin for points in of_rows[row]]
        what = f"a {metric} of {statistics.fmean(wanted):.3f}"
        said.append(f"The target, {what} in the mean, is that of {row} at the end plus {margin:g}, in each seed.")
        seeds = max(seeds, len(wanted))
        spent = {
            name: [find_spent_bytes(points, metric, at) for points, at in zip(each, wanted, strict=True)]
            for name, each in of_rows.items()
        }
        for name, of_seeds in spent.items():
            said.append(f"Bytes to {what}: {name}: {_in_words(of_seeds, of_rows[name])}.")
            if name != row and None not in of_seeds:
                compared += _compared(f"to {what}", name, of_seeds, row, spent[row])
    return [*said, *verdicts.list_verdicts(compared, seeds, verdicts.SEEDS)]


@dataclass(frozen=True)
class SpentBytes:
    """The number of rounds and bytes needed to reach a value."""

    rounds: float
    upload: float
    download: float


def find_spent_bytes(points: Sequence[CurvePoint], metric: str, at: float) -> SpentBytes | None:
    """Return the cost up to when the metric was first at or below `at`; None if it never was."""
    for before, after in pairwise([points[0], *points]):
        above, below = before.figures[metric].value, after.figures[metric].value
        if below <= at:
            share = (above - at) / (above - below) if below < above < math.inf else 1.0
            ends = ((p.round, p.upload_bytes, p.download_bytes) for p in (before, after))
            return SpentBytes(*(old + share * (new - old) for old, new in zip(*ends, strict=True)))
    return None


def _of(points: Sequence[CurvePoint], metric: str) -> list[CurvePoint]:
    return [p for p in points if metric in p.figures]


def _in_words(of_seeds: Sequence[SpentBytes | None], curves: Sequence[Sequence[CurvePoint]]) -> str:
    there = [spent for spent in of_seeds if spent]
    if len(there) < len(of_seeds):
        sent = statistics.fmean(points[-1].upload_bytes for points in curves) / _MEGA
        missed = f"not reached in {len(of_seeds) - len(there)} of {len(of_seeds)} seeds"
        return f"{missed}, in {curves[0][-1].round} rounds with {sent:.3g} MB up"
    up, down = (_shown([getattr(s, side) / _MEGA for s in there]) for side in ("upload", "download"))
    return f"{up} MB up and {down} MB down, in {_shown([s.rounds for s in there])} rounds"


def _compared(
    what: str, name: str, mine: Sequence[SpentBytes | None], row: str, other: Sequence[SpentBytes | None]
) -> list[tuple[str, ClaimSentence]]:
    found = []
    for side, of in (("Uploads", _uploads), ("Uploads and downloads", _both)):
        pair = [_figure([of(s) / _MEGA for s in each if s]) for each in (mine, other)]
        d = resampling.subtract_metrics(*pair)
        less = resampling.format_interval(resampling.compute_interval(d), "+.3g")
        share = f", {pair[0].value / pair[1].value:.2f} of them" if pair[1].value else ""
        text = f"{side} {what}, of {name} less those of {row}: {less} MB{share}"
        found.append((text, verdicts.judge_sign(d, "fewer", "more")))
    return found


def _uploads(spent: SpentBytes) -> float:
    return spent.upload


def _both(spent: SpentBytes) -> float:
    return spent.upload + spent.download


def _figure(values: Sequence[float]) -> ResampledMetric:
    return resampling.over_seeds([resampling.from_constant(value) for value in values])


def _shown(values: Sequence[float]) -> str:
    return resampling.format_interval(resampling.compute_interval(_figure(values)), ".3g")
