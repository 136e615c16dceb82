"""Compare methods on text: every method and seed runs the same in-process federation.

Two rows are added to the methods: "round 0" (the model before any round) and "one client alone" (the median-size
client, which trains in every round on its own rows and shares nothing). With `settings["client"]`, a method with client
models also has the scores of that client's model, as "client_<score>"; they are missing if the client took part in no
round. `client = "all"` adds "clients_loss" and "clients_bleu", the mean over all clients with a model, on
`clients_test` test-set sources. With `curve_every`, the methods have a curve of the server's loss on `curve_test`
test-set sources (see `curves`).

With `settings["learning_rates"]`, every method is first run with each of them in the seed `rate_seed`, which
contributes to no figure in the table. In all seeds, the method then uses the rate with the lowest loss on `rate_test`
validation sources, for its model or its clients' models. The row "one client alone" uses the learning rate in the run
config.

A method may have its own run config keys (`config`), such as more rounds if it sends half as much in each.

The runner splits work by row and seed into pieces. Pieces already in the pieces file are not repeated. A seed is
included in the table once all its rows are finished. Every figure has each seed's value (`resampling`). A preset's
claims are judged by these values and corrected for multiple testing. All seeds score the same test sources: intervals
of losses cover these sources as well (`source_losses`), intervals of the other scores cover only the seeds.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from fedveil.attacks.statistics import confidence_intervals
from fedveil_bench.common import data, resampling, resumable_rows, seeds, texts
from fedveil_bench.common import verdicts as common
from fedveil_bench.common.resampling import ResampledMetric
from fedveil_bench.fedrand import curves, source_losses
from fedveil_bench.fedrand.source_losses import SourceLosses
from fedveil_bench.fedrand.text_federation import RATE_KEY, VALIDATION, TextFederationRun, TextFederationSeed
from fedveil_bench.runner import BenchOptions, BenchOutcome

IN_PIECES = True  # so that --minutes is allowed
BEFORE, ALONE = "round 0", "one client alone"
# The settings that a piece's figures depend on, besides its method, seed and rate.
_OF_A_PIECE = ("data", "clients", "client", "clients_test", "rate_test", "curve_every", "curve_test", "config")

Settings = Mapping[str, Any]
Asked = tuple[str, int, float]  # row, seed, learning rate


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Measure the rows "round 0", "one client alone" and each of `settings["methods"]`, over the seeds."""
    began = time.monotonic()
    chosen = choose_rates(settings, options)
    asked = settings | {"chosen": chosen}
    answers = seeds.run_seeds(__name__, asked, options.after(time.monotonic() - began), in_pieces=True)
    return build_outcome(
        [{name: TextFederationRun(**measured) for name, measured in each.items()} for each in answers], asked
    )


def choose_rates(settings: dict[str, Any], options: BenchOptions) -> dict[str, float]:
    """Return each method's learning rate, except for methods whose trials are incomplete."""
    given = settings.get("learning_rates", [settings["config"][RATE_KEY]])
    if len(given) == 1:
        return dict.fromkeys(settings["methods"], given[0])
    # One process per rate, instead of one per seed.
    trials = seeds.run_seeds(__name__, settings | {"seeds": len(given)}, replace(options, seeds=0), in_pieces=True)
    return {
        method: find_best_rate(
            [(trial[method]["scores"][VALIDATION], rate) for trial, rate in zip(trials, given, strict=True)]
        )
        for method in settings["methods"]
        if all(method in trial for trial in trials)
    }


def find_best_rate(tried: Sequence[tuple[float, float]]) -> float:
    """Return the rate with the lowest loss, or the first one in a tie. A non-finite loss is never the lowest."""
    return min(tried, key=lambda each: each[0] if math.isfinite(each[0]) else math.inf)[1]


def build_outcome(done: Sequence[Mapping[str, TextFederationRun]], settings: Settings) -> BenchOutcome:
    """Build the table from the seeds whose rows are all finished. `settings` contain the "chosen" rates."""
    names = [BEFORE, ALONE, *settings["methods"]]
    whole = [of_seed for of_seed in done if set(names) <= set(of_seed)]
    said = [_counted(done, len(names), len(whole)), *_on_rates(settings)]
    if not whole:
        return BenchOutcome([], said)
    runs = {name: [of_seed[name] for of_seed in whole] for name in names}
    losses = {name: losses_of(measured) for name, measured in runs.items()}
    figures = {name: figures_of([r.scores for r in measured], losses[name]) for name, measured in runs.items()}
    rows = [_row(name, measured, figures[name], losses[name]) for name, measured in runs.items()]
    asked = common.claims_of(settings)
    claims = common.list_verdicts(common.judge_claims(figures, asked), len(whole), _covered(asked, losses))
    followed = {name: [_curve(r) for r in measured] for name, measured in runs.items()}
    costs = curves.compare_costs(followed, settings.get("curve_targets", []))
    return BenchOutcome(rows, [*_verdicts(runs, settings), *claims, *costs, *said], [f"this run: {len(whole)} seeds"])


def list_requirements(settings: Settings) -> list[data.DataRequirement]:
    """Return the requirements: rows for training, testing and choosing learning rates, and the base."""
    splits = ("train", "validation", "test") if "learning_rates" in settings else ("train", "test")
    return [texts.require_splits(settings["data"], *splits, by_task=True), *data.list_base_requirements(settings)]


def figures_of(
    scores: Sequence[Mapping[str, float]], losses: Mapping[str, Sequence[SourceLosses]] | None = None
) -> dict[str, ResampledMetric]:
    """Return a figure with each seed's value, for every score that all seeds have.

    Test sources are resampled for the scores in `losses`, and taken as fixed for the others.
    """
    shared = [name for name in scores[0] if all(name in each for each in scores)]
    values = {name: [each[name] for each in scores] for name in shared}
    return {
        name: source_losses.resample_losses(of_seeds, losses[name])
        if losses and name in losses
        else resampling.over_seeds([resampling.from_constant(value) for value in of_seeds])
        for name, of_seeds in values.items()
    }


def losses_of(runs: Sequence[TextFederationRun]) -> dict[str, list[SourceLosses]]:
    """Return each seed's losses by source, for the scores for which all seeds have them."""
    shared = [name for name in runs[0].source_losses if all(name in run.source_losses for run in runs)]
    return {name: [SourceLosses.from_json(run.source_losses[name]) for run in runs] for name in shared}


def _covered(claims: Sequence[Mapping[str, Any]], losses: Mapping[str, Mapping[str, Any]]) -> str:
    """Return, in words, what the intervals of the claims cover."""
    covers = {
        claim["metric"]: all(claim["metric"] in losses[row] for row in (claim["row"], claim["than"]) if row in losses)
        for claim in claims
    }
    if not any(covers.values()):
        return common.ONE_TEST_SET
    fixed = [metric for metric, is_covered in covers.items() if not is_covered]
    return common.ROWS_AND_SEEDS + (f", but of {', '.join(fixed)} over {common.ONE_TEST_SET}" if fixed else "")


def of_seed(settings: dict[str, Any], seed: int, options: BenchOptions) -> dict[str, Any]:
    """Return a row's results by its name, for one seed (`run_benchmark`) or one learning rate (`choose_rates`)."""
    measures = dict(_rows(settings, seed, options) if "chosen" in settings else _trials(settings, seed, options))
    names = {_name(settings, asked): asked[0] for asked in measures}
    named = {_name(settings, asked): partial(_measured, measure) for asked, measure in measures.items()}
    found = resumable_rows.measure_rows(options.pieces, named, options.minutes)
    return {names[piece["name"]]: piece["run"] | {"commit": piece["commit"]} for piece in found}


def _trials(
    settings: Settings, index: int, options: BenchOptions
) -> Iterator[tuple[Asked, Callable[[], TextFederationRun]]]:
    """Return each method's trial with the learning rate at this index."""
    rate, number = settings["learning_rates"][index], settings["rate_seed"]
    seed = TextFederationSeed(settings, number, options)
    for label in settings["methods"]:
        yield (label, number, rate), partial(seed.trial, label, rate)


def _rows(
    settings: Settings, number: int, options: BenchOptions
) -> Iterator[tuple[Asked, Callable[[], TextFederationRun]]]:
    """Return all rows for a seed; they share the partition, initial weights and test rows."""
    seed = TextFederationSeed(settings, number, options)
    yield (BEFORE, number, 0.0), seed.before
    yield (ALONE, number, settings["config"][RATE_KEY]), seed.alone
    for label, rate in settings["chosen"].items():
        yield (label, number, rate), partial(seed.method, label, rate)


def _measured(measure: Callable[[], TextFederationRun]) -> dict[str, Any]:
    return {"run": asdict(measure())}


def _name(settings: Settings, asked: Asked) -> str:
    """Return a piece's name: row, seed, rate, and a digest of every setting that affects its figures."""
    label, seed, rate = asked
    parts = [{key: settings.get(key) for key in _OF_A_PIECE}, settings["methods"].get(label), "chosen" in settings]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]
    return f"{label}, seed {seed}, rate {rate:g}, settings {digest}"


def _curve(done: TextFederationRun) -> list[curves.CurvePoint]:
    return [curves.CurvePoint.from_json(point) for point in done.curve]


def _row(
    name: str,
    done: list[TextFederationRun],
    figures: Mapping[str, ResampledMetric],
    losses: Mapping[str, Sequence[SourceLosses]],
) -> dict[str, Any]:
    shown = {
        "name": name,
        "metrics": {metric: resampling.compute_interval(figure) for metric, figure in figures.items()},
        "upload_bytes": round(sum(r.upload_bytes for r in done) / len(done)),
        "download_bytes": round(sum(r.download_bytes for r in done) / len(done)),
        "rounds": done[0].rounds,
        "seconds": round(sum(r.seconds for r in done) / len(done), 1),
    }
    if losses:
        shown["source_losses"] = {metric: source_losses.in_result(of_seeds) for metric, of_seeds in losses.items()}
    return shown | {"curve": curves.in_result([_curve(r) for r in done])} if done[0].curve else shown


def _counted(done: Sequence[Mapping[str, TextFederationRun]], rows: int, whole: int) -> str:
    commits = Counter(each.commit for of_seed in done for each in of_seed.values() if each.commit)
    by = ", ".join(f"{n} of {commit}" for commit, n in commits.items()) or "none"
    return (
        f"Rows: {sum(map(len, done))} of {rows * len(done)}; seeds of which all are there: {whole} of {len(done)}; "
        f"by commit: {by}."
    )


def _on_rates(settings: Settings) -> Iterator[str]:
    """Yield the rates chosen from each grid, noting rates at its edge, where a rate beyond might have been better."""
    grid = sorted(settings.get("learning_rates", []))
    if len(grid) < 2:
        return
    for rate in grid:
        of_it = [method for method, chosen in settings["chosen"].items() if chosen == rate]
        edge = ", at the grid's edge" if rate in (grid[0], grid[-1]) else ""
        yield f"Learning rate {rate:g}{edge}: {', '.join(of_it) or 'none'}."


def _verdicts(runs: Mapping[str, list[TextFederationRun]], settings: Settings) -> list[str]:
    """Return sentences based on intervals of ratios, in which each seed is compared with itself."""
    said = []
    against = runs[settings["reference"]]
    for name, done in runs.items():
        if name == settings["reference"]:
            continue
        for metric in settings["compare"]:
            ratios = [
                {"r": mine.scores[metric] / theirs.scores[metric]} for mine, theirs in zip(done, against, strict=True)
            ]
            ratio = confidence_intervals(ratios)["r"]
            width = f"95 % interval {ratio['low']:.3f} to {ratio['high']:.3f}, {ratio['n']} seeds"
            width = width if ratio["n"] > 1 else "one seed: no interval"
            said.append(f"{name}: {metric} is {ratio['mean']:.3f} of {settings['reference']}'s ({width}).")
        if done[0].upload_bytes:
            share = sum(r.upload_bytes for r in done) / sum(r.upload_bytes for r in against)
            said.append(f"{name}: uploads are {share:.4f} of {settings['reference']}'s bytes.")
    return said
