"""Bound a run's privacy cost for each site's records, in sentences based only on the run folder."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from fedveil import strategies
from fedveil.config import RunConfig, parse
from fedveil.console.runs.run_reader import RunView
from fedveil.contract.privacy import PrivacyGuarantee, stated_guarantee
from fedveil.errors import ConfigError
from fedveil.privacy.distributed_dgauss import DistributedDiscreteGaussian
from fedveil.privacy.guarantee_source import guarantee_of, untimed
from fedveil.privacy.guarantee_words import describe_claim, describe_guarantee
from fedveil.privacy.server_side_bound import server_side_bound
from fedveil.sanitize import sanitize

_SEEDED = "Not private: seeded noise (run.deterministic = true). Epsilon is infinite."


def privacy_statements(run: RunView) -> list[str]:
    """Return sentences that bound this run's own privacy cost for each site's records, based only on the run folder."""
    if "method" not in run.config:
        return []
    try:
        claim, config = _claim(run)
    except ConfigError as error:  # a run from another version; still show the rest of its report
        return [f"Unknown: this version cannot create the run's method ({error}). Treat epsilon as infinite."]
    if claim is None:
        return ["The run makes no claim of differential privacy: epsilon is infinite."]
    budget = claim.budget
    if config.run.deterministic:
        return [_SEEDED]
    nominal = "" if budget.nominal is None else f" The nominal epsilon was {budget.nominal:g}; the actual one follows."
    trusted = (
        " It holds against everyone except the server, which saw the sums without noise."
        if budget.server_trusted
        else ""
    )
    where = f" Its {claim.words}." if isinstance(claim, DistributedDiscreteGaussian) else ""
    timing = f" {timing}" if (timing := untimed(claim)) else ""
    about = f" The guarantee: {describe_claim(claim, config)}."
    sentences = [
        f"{run.method}: a Gaussian mechanism for each example.{nominal}{trusted}{about}{_limit(run, claim)}{where}"
        f"{timing}"
    ]
    return sentences + [f"{site}: {_of_site(run, site, claim, config)}" for site in run.sites]


def privacy_summary(run: RunView) -> str:
    """Return the run's own privacy cost for the site with the highest cost, in one line; "" without a claim."""
    if "method" not in run.config:
        return ""
    try:
        claim, config = _claim(run)
    except ConfigError as error:
        return f"privacy: unknown, because this version cannot read the run's config ({error}); treat it as infinite"
    if claim is None:
        return ""
    if config.run.deterministic:
        return f"privacy: {_SEEDED[0].lower()}{_SEEDED[1:]}"
    bounds = {site: server_side_bound(claim, config.train.batch_size, run.attempts, site) for site in run.sites}
    unknown = [site for site, bound in bounds.items() if isinstance(bound, str)]
    known = {site: bound for site, bound in bounds.items() if not isinstance(bound, str)}
    not_known = f" Unknown for {len(unknown)} of {len(bounds)} sites: {bounds[unknown[0]]}" if unknown else ""
    if not known:
        return f"privacy: {describe_claim(claim, config)}.{_limit(run, claim)}{not_known}"
    most = max(known, key=lambda site: known[site].epsilon)
    words = describe_guarantee(claim, config, known[most].charges)
    return f"privacy: this run cost an example at {most}, the highest-cost site, at most {words.sentence}.{not_known}"


@dataclass(frozen=True)
class PrivacyFigure:
    """A run's epsilon as one figure: `value`, such as "3.348", "infinite" or "not known", and a `note` about it."""

    value: str
    note: str


def privacy_figure(run: RunView) -> PrivacyFigure:
    """Return the epsilon of this run against the server, for the site with the highest known cost."""
    if "method" not in run.config:
        return PrivacyFigure("not known", "the run had no valid config")
    try:
        claim, config = _claim(run)
    except ConfigError:
        return PrivacyFigure("not known", "a run of another version; treat epsilon as infinite")
    if claim is None:
        return PrivacyFigure("infinite", "the run makes no claim of differential privacy")
    if config.run.deterministic:
        return PrivacyFigure("infinite", "its noise is seeded, so it protects nothing")
    bounds = {site: server_side_bound(claim, config.train.batch_size, run.attempts, site) for site in run.sites}
    known = {site: bound for site, bound in bounds.items() if not isinstance(bound, str)}
    if not known:
        return PrivacyFigure("not known", "the server knows no site's number of examples; the sites' ledgers do")
    most = max(known, key=lambda site: known[site].epsilon)
    words = describe_guarantee(claim, config, known[most].charges)
    party = words.parties[0]
    value = (
        "not known" if party.epsilon is None else "infinite" if math.isinf(party.epsilon) else f"{party.epsilon:.4g}"
    )
    rest = f"; not known for {len(bounds) - len(known)} of {len(bounds)} sites" if len(known) < len(bounds) else ""
    return PrivacyFigure(
        value,
        f"at most, at delta {words.delta:g} ({words.neighbours.value}), against {party.party}, for an example at "
        f"{sanitize(most, 80)}, the highest-cost site{rest}",
    )


def _claim(run: RunView) -> tuple[PrivacyGuarantee | None, RunConfig]:
    """Return the run's guarantee and config. Raises ConfigError for a run from a different version."""
    method = strategies.create_from_json(run.method, json.dumps(run.config["method"]["fields"]))
    config = parse(run.config["config"])
    return guarantee_of(method, config), config


def _limit(run: RunView, claim: PrivacyGuarantee) -> str:
    """Return a sentence on the limit that the sites' ledgers enforce."""
    budget = claim.budget
    if run.config.get("in_process"):
        return " No ledger counted it, because everything ran in one process."
    if math.isinf(budget.epsilon):
        return " No limit was set, so the sites' ledgers count charges but never stop a run."
    stated = stated_guarantee(budget.epsilon, budget.delta, budget.neighbours)
    return f" No site's ledger lets this run cost an example more than {stated}; other runs on an example add to it."


def _of_site(run: RunView, site: str, claim: PrivacyGuarantee, config: RunConfig) -> str:
    """Describe the run's privacy cost for the site's records."""
    bound = server_side_bound(claim, config.train.batch_size, run.attempts, site)
    if isinstance(bound, str):
        return bound
    words = describe_guarantee(claim, config, bound.charges)
    took_part = f"{bound.rows} examples, {bound.participations} participations of {bound.steps} steps"
    return f"{took_part}: at most {words.against_whom}, this run only."
