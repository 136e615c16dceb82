"""Bound a run's privacy cost to the records of each site: sentences from the run folder alone."""

from __future__ import annotations

import json

from fedveil import strategies
from fedveil.config import parse
from fedveil.console.runs.run_reader import RunView
from fedveil.contract.privacy import PrivacyGuarantee, stated_guarantee
from fedveil.errors import ConfigError
from fedveil.privacy.distributed_dgauss import DistributedDiscreteGaussian
from fedveil.privacy.guarantee_source import guarantee_of, untimed
from fedveil.privacy.server_side_bound import server_side_bound


def privacy_statements(run: RunView) -> list[str]:
    """Bound this run's own privacy cost to each site's records, one sentence per site, from the run folder alone."""
    if "method" not in run.config:
        return []
    config = run.config["config"]
    try:
        method = strategies.create_from_json(run.method, json.dumps(run.config["method"]["fields"]))
    except ConfigError as error:  # a run from another version; still show the rest of its report
        return [f"Unknown: this version cannot create the run's method ({error}). Treat epsilon as infinite."]
    claim = guarantee_of(method, parse(config))
    if claim is None:
        return ["The run makes no claim of differential privacy: epsilon infinite."]
    budget = claim.budget
    if config["run.deterministic"]:
        return ["Not private: seeded noise (run.deterministic = true). Epsilon infinite."]
    nominal = "" if budget.nominal is None else f" The nominal epsilon was {budget.nominal:g}; the actual one follows."
    trusted = (
        " It holds against everyone except the server, which saw the sums without noise."
        if budget.server_trusted
        else ""
    )
    where = f" Its {claim.words}." if isinstance(claim, DistributedDiscreteGaussian) else ""
    timing = f" {timing}" if (timing := untimed(claim)) else ""
    sentences = [f"{run.method}: a Gaussian mechanism for each example.{nominal}{trusted}{where}{timing}"]
    return sentences + [f"{site}: {_of_site(run, site, claim)}" for site in run.sites]


def _of_site(run: RunView, site: str, claim: PrivacyGuarantee) -> str:
    """Describe the run's privacy cost to the site's records."""
    bound = server_side_bound(claim, int(run.config["config"]["train.batch-size"]), run.attempts, site)
    if isinstance(bound, str):
        return bound
    budget = claim.budget
    guarantee = f"at most {stated_guarantee(bound.epsilon, budget.delta, budget.neighbours)}"
    if bound.against_all is not None:
        alone = stated_guarantee(bound.against_all, budget.delta, budget.neighbours)
        guarantee += f"; {alone} against the server and all other sites together"
    took_part = f"{bound.rows} examples, {bound.participations} participations of {bound.steps} steps"
    return f"{took_part}: {guarantee}, this run only."
