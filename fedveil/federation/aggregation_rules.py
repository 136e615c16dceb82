"""Cohort selection, checks of the aggregation rule, and the bound on one site's weight in a round.

Cohorts are drawn by seeded sampling without replacement, identically in one process and over gRPC.
`aggregate.*` sets how uploads are combined; `check_rule` and similar functions check that the method and the
cohort allow it. One site's weight is bounded:

    n_k <- min(n_k, s / (1 - s) * sum of the others' n),   s from 1/2 to 1

A site reports its own number of examples, and the server cannot verify it. With s = 1/2, a site never has more
weight than all others together, regardless of its report. Methods with equal weights do not need the bound.

| case | what happens |
|---|---|
| s = 1 | no weight is bounded |
| a round with one upload | no weight is bounded |
| no site is above the bound | every upload is passed on in order of arrival |
| one site is above the bound (with s >= 1/2, at most one can be) | its upload is delayed if necessary, and counts with
  fewer examples |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from fedveil.config import AggregateConfig, CohortConfig, SecureConfig
from fedveil.contract.entry_table import fewest_senders
from fedveil.contract.method import AcceptedUpload, Method
from fedveil.errors import ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.secagg.entry_plan import required_uploads
from fedveil.ops.krum import MultiKrumAggregator, min_uploads
from fedveil.ops.robust_means import RobustAggregator
from fedveil.ops.running_sums import RunningSums
from fedveil.rng import RandomStream


def make_aggregator(aggregate: AggregateConfig) -> RunningSums | RobustAggregator | MultiKrumAggregator:
    """Create empty sums for a round under an aggregation rule."""
    if aggregate.rule == "multi-krum":
        return MultiKrumAggregator(aggregate.num_byzantine, aggregate.num_selected)
    if aggregate.rule == "mean":
        return RunningSums()
    return RobustAggregator(0.5 if aggregate.rule == "median" else aggregate.trim_fraction)


def fewest_uploads(aggregate: AggregateConfig) -> int:
    """Return the minimum number of uploads for the rule; 0 if any number will do."""
    return min_uploads(aggregate.num_byzantine, aggregate.num_selected) if aggregate.rule == "multi-krum" else 0


def fewest_sites(aggregate: AggregateConfig, fraction: float) -> int:
    """Return the smallest number of connected sites whose cohort of `fraction` has enough uploads for the rule."""
    least = fewest_uploads(aggregate)
    count = max(0, math.floor((least - 1) / fraction))
    while cohort_size(fraction, count) < least:
        count += 1
    return count


def check_rule(exchange: MessageExchange, aggregate: AggregateConfig) -> None:
    """Raise ConfigError if the rule compares whole uploads but the method's uploads cannot be compared."""
    variants = exchange.layout.variants("up")
    if aggregate.rule == "multi-krum" and (exchange.method.has_masked_terms or len(variants) > 1):
        obstacle = "masks" if exchange.method.has_masked_terms else f"uploads of the kinds {', '.join(variants)}"
        raise ConfigError(
            f'aggregate.rule: expected a method whose uploads all hold the same entries for "multi-krum", found '
            f'{exchange.name}, which has {obstacle}; choose "median" or "trimmed"'
        )


def check_server_optimizer(exchange: MessageExchange) -> None:
    """Raise ConfigError if the exchange has a server optimizer that the method does not allow."""
    if exchange.optimizer is not None and (why := exchange.method.server_optimizer_conflict):
        raise ConfigError(
            f'server.optimizer: expected "none" with {exchange.name}, found one that {why}; set it to "none" or choose '
            "another method"
        )


def check_buffer(exchange: MessageExchange, cohort: CohortConfig, aggregate: AggregateConfig, sites: int = 0) -> None:
    """Raise ConfigError if server steps cannot be taken from a buffer of uploads (`cohort.buffer-size`).

    Args:
        sites: number of sites in the federation; 0 means cohort.sites, if it is set in the run config.
    """
    size, plain = cohort.buffer_size, CohortConfig()
    if not size:
        if cohort.max_staleness != plain.max_staleness:
            raise ConfigError(
                f"cohort.max-staleness: expected {plain.max_staleness} with cohort.buffer-size = 0, which does not use "
                f"it, found {cohort.max_staleness}; leave it out, or set cohort.buffer-size"
            )
        return
    if why := exchange.method.stale_upload_conflict:
        raise ConfigError(
            f"cohort.buffer-size: expected 0 with {exchange.name}, found a method that {why}; set it to 0 or choose "
            "another method"
        )
    asked: tuple[tuple[str, object, object, str], ...] = (
        ("cohort.fraction", cohort.fraction, 1.0, "every site that is not training is asked"),
        ("cohort.max-norm-ratio", cohort.max_norm_ratio, 0.0, "uploads for different states have no common median"),
    )
    for key, value, expected, reason in asked:
        if value != expected:
            raise ConfigError(f"{key}: expected {expected!r} with cohort.buffer-size ({reason}), found {value!r}")
    if size < cohort.min_sites:
        raise ConfigError(
            f"cohort.buffer-size: expected at least cohort.min-sites, {cohort.min_sites}, found {size}; raise it, or "
            "lower cohort.min-sites"
        )
    if (sites := sites or cohort.sites) and size > sites:
        raise ConfigError(
            f"cohort.buffer-size: expected at most the number of sites, {sites}, because a step takes one upload per "
            f"site, found {size}; lower it"
        )
    check_count(aggregate, "cohort.buffer-size", size)


def check_cohort(secure: SecureConfig, aggregate: AggregateConfig, cohort: CohortConfig) -> None:
    """Raise ConfigError for settings that no method can use with this cohort or with masked uploads."""
    check_secure(secure, aggregate, cohort)
    check_count(aggregate, "cohort.min-sites", cohort.min_sites)
    drawn = cohort_size(cohort.fraction, max(cohort.sites, cohort.min_sites))
    check_count(aggregate, "cohort.fraction of cohort.sites", drawn)


def check_secure(secure: SecureConfig, aggregate: AggregateConfig, cohort: CohortConfig) -> None:
    """Raise ConfigError for settings that need individual uploads although uploads are masked."""
    if not secure.enabled:
        return
    asked: tuple[tuple[str, object, object, str], ...] = (
        ("aggregate.rule", aggregate.rule, "mean", "other rules compare single uploads"),
        ("cohort.max-norm-ratio", cohort.max_norm_ratio, 0.0, "norms of single uploads are not known"),
        ("cohort.buffer-size", cohort.buffer_size, 0, "a sum needs one cohort whose sites all got the same state"),
    )
    for key, value, expected, why in asked:
        if value != expected:
            raise ConfigError(f"{key}: expected {expected!r} with secure.enabled ({why}), found {value!r}")
    if secure.threshold == 1:
        raise ConfigError("secure.threshold: 1 site cannot agree to a sum; set 0, or at least 2")
    for key, found in ("threshold", secure.threshold), ("graph-degree", secure.graph_degree):
        if secure.whole_cohort and found:
            raise ConfigError(
                f"secure.{key}: expected 0 with secure.whole-cohort, because an upload agrees to the sum and no site "
                f"holds shares, found {found}"
            )


def check_entries(method: Method, secure: SecureConfig, cohort: CohortConfig, sites: int = 0) -> None:
    """Raise ConfigError for a secure run in which some entry could never be summed over enough sites.

    Args:
        sites: number of sites in the federation; 0 means cohort.sites, if it is set in the run config.
    """
    if not (secure.enabled and method.plans_entries):
        return
    if secure.min_sites - secure.max_colluders < 2:
        raise ConfigError(
            f"secure.min-sites: expected at least {secure.max_colluders + 2} for this method, whose sites send "
            f"different entries, with secure.max-colluders = {secure.max_colluders}, found {secure.min_sites}; raise it"
        )
    if sites := sites or cohort.sites:
        drawn = cohort_size(cohort.fraction, sites)
        if drawn >= secure.min_sites:
            quorum = required_uploads(secure, drawn)
            method.check_entries(sites, drawn, fewest_senders(drawn, secure.min_sites, quorum))


def check_count(aggregate: AggregateConfig, field: str, found: int) -> None:
    """Raise ConfigError if `field` allows a round with too few uploads (`found`) for the rule."""
    if found < (least := fewest_uploads(aggregate)):
        means = f" and aggregate.num-selected = {aggregate.num_selected}" if aggregate.num_selected else ""
        raise ConfigError(
            f"{field}: expected at least {least} for multi-krum with aggregate.num-byzantine = "
            f"{aggregate.num_byzantine}{means}, found {found}; raise it, or choose another rule"
        )


def cohort_size(fraction: float, sites: int) -> int:
    """Return the number of sites in a cohort: ceil(fraction x sites)."""
    return math.ceil(round(fraction * sites, 9))  # 0.3 * 10 is 3.0000000000000004


def draw_cohort(sites: Iterable[str], fraction: float, secret: bytes, round_: int, attempt: int = 0) -> list[str]:
    """Draw ceil(fraction x sites) names uniformly without replacement; return them sorted.

    A repeated round draws a new cohort, so that a single site that is down does not end the run.
    """
    ordered = sorted(sites)
    rng = RandomStream.derive(secret, round_, "", f"cohort {attempt}")
    return sorted(ordered[i] for i in rng.choice(len(ordered), cohort_size(fraction, len(ordered))))


_MOST_WAITING = 2


def bound_weights(
    uploads: Iterable[AcceptedUpload], share: float, cut: Callable[[str, int], None]
) -> Iterator[AcceptedUpload]:
    """Yield the uploads, reduced so that none counts for more than `share` of all examples; memory holds at most 3.

    Args:
        uploads: the uploads in order of arrival.
        share: s, from 1/2 to 1.
        cut: called with the name of a site whose number of examples was reduced, and with the reduced
            number.
    """
    waiting: list[AcceptedUpload] = []
    total = 0
    for upload in uploads:
        waiting.append(upload)
        total += upload.num_examples
        del upload
        while waiting and waiting[0].num_examples <= share * total:
            yield waiting.pop(0)
        if len(waiting) > _MOST_WAITING:  # the first has more than half so far, so the others are below the bound
            yield waiting.pop(1)
    while waiting:
        upload = waiting.pop(0)
        others = total - upload.num_examples
        if others and upload.num_examples > share * total:
            counted = max(1, int(share / (1 - share) * others))
            cut(upload.ctx.client, counted)
            upload = replace(upload, num_examples=counted)
        yield upload
        del upload
