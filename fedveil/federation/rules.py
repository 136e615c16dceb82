"""What is made of a round's uploads, as `aggregate.*` says, and whether method and cohort allow it."""

from __future__ import annotations

import math

from fedveil.algebra.krum import KrumSums, fewest
from fedveil.algebra.robust import HeldSums
from fedveil.algebra.sums import RunningSums
from fedveil.config import AggregateConfig, CohortConfig, SecureConfig
from fedveil.errors import ConfigError
from fedveil.federation.cohort import size
from fedveil.federation.exchange import Exchange


def sums_of(aggregate: AggregateConfig) -> RunningSums | HeldSums | KrumSums:
    """Empty sums of a round under a rule."""
    if aggregate.rule == "multi-krum":
        return KrumSums(aggregate.hostile, aggregate.best)
    if aggregate.rule == "mean":
        return RunningSums()
    return HeldSums(0.5 if aggregate.rule == "median" else aggregate.trim)


def fewest_uploads(aggregate: AggregateConfig) -> int:
    """The fewest uploads that the rule can choose among; 0 for a rule that takes any number."""
    return fewest(aggregate.hostile, aggregate.best) if aggregate.rule == "multi-krum" else 0


def fewest_sites(aggregate: AggregateConfig, fraction: float) -> int:
    """The fewest connected sites of which a cohort of `fraction` has uploads enough for the rule."""
    least = fewest_uploads(aggregate)
    count = max(0, math.floor((least - 1) / fraction))
    while size(fraction, count) < least:
        count += 1
    return count


def check(exchange: Exchange, aggregate: AggregateConfig) -> None:
    """Raises ConfigError for a rule that compares whole uploads, with a method whose uploads cannot be compared."""
    variants = exchange.layout.variants("up")
    if aggregate.rule == "multi-krum" and (exchange.method.masked or len(variants) > 1):
        found = "masks" if exchange.method.masked else f"uploads of the kinds {', '.join(variants)}"
        raise ConfigError(
            f'aggregate.rule: expected a method whose uploads all hold the same entries for "multi-krum", found '
            f'{exchange.name}, which has {found}; choose "median" or "trimmed"'
        )


def check_cohort(secure: SecureConfig, aggregate: AggregateConfig, cohort: CohortConfig) -> None:
    """Raises ConfigError for what this cohort, or sums that nobody sees into, do not allow, whatever the method is."""
    check_secure(secure, aggregate, cohort)
    check_count(aggregate, "cohort.min-sites", cohort.min_sites)
    drawn = size(cohort.fraction, max(cohort.sites, cohort.min_sites))
    check_count(aggregate, "cohort.fraction of cohort.sites", drawn)


def check_secure(secure: SecureConfig, aggregate: AggregateConfig, cohort: CohortConfig) -> None:
    """Raises ConfigError for what cannot be done with uploads that nobody sees one by one."""
    if not secure.enabled:
        return
    asked: tuple[tuple[str, object, object, str], ...] = (
        ("aggregate.rule", aggregate.rule, "mean", "other rules compare single uploads"),
        ("cohort.norm-factor", cohort.norm_factor, 0.0, "norms of single uploads are not known"),
    )
    if secure.neighbours:
        asked += (("cohort.fraction", cohort.fraction, 1.0, "a cohort may leave out a site's neighbours"),)
    for key, found, expected, why in asked:
        if found != expected:
            raise ConfigError(f"{key}: expected {expected!r} with secure.enabled ({why}), found {found!r}")
    if secure.threshold == 1 or 0 < secure.neighbours < secure.threshold:
        raise ConfigError(f"secure.threshold: expected 0, or from 2 to the number of holders, found {secure.threshold}")


def check_count(aggregate: AggregateConfig, field: str, found: int) -> None:
    """Raises ConfigError if a round of so many uploads, which `field` allows, is too small for the rule."""
    if found < (least := fewest_uploads(aggregate)):
        means = f" and aggregate.best = {aggregate.best}" if aggregate.best else ""
        raise ConfigError(
            f"{field}: expected at least {least} for multi-krum with aggregate.hostile = {aggregate.hostile}{means}, "
            f"found {found}; raise it, or choose another rule"
        )
