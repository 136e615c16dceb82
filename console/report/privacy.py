"""What a run cost the records of each site at most: sentences from the run folder alone."""

from __future__ import annotations

import json

from fedveil import strategies
from fedveil.config import parse
from fedveil.console.runs.folder import Run
from fedveil.contract.budget import Claim, stated
from fedveil.errors import ConfigError
from fedveil.privacy.claims import claim_of
from fedveil.privacy.from_reports import cost
from fedveil.privacy.in_sum import InSum


def statements(run: Run) -> list[str]:
    """What the run cost the records of each site at most, by itself: a sentence a site, from the run folder alone."""
    if "method" not in run.config:
        return []
    config = run.config["config"]
    try:
        method = strategies.create_from_json(run.method, json.dumps(run.config["method"]["fields"]))
    except ConfigError as error:  # a run of another version; the rest of its report is worth having
        return [f"Not known: this version cannot make the run's method ({error}). Take epsilon for infinite."]
    claim = claim_of(method, parse(config))
    if claim is None:
        return ["The run makes no claim of differential privacy: epsilon infinite."]
    budget = claim.budget
    if config["run.deterministic"]:
        return ["Not private: seeded noise (run.deterministic = true). Epsilon infinite."]
    nominal = "" if budget.nominal is None else f" The nominal epsilon was {budget.nominal:g}; the honest one follows."
    trusted = (
        " It holds against everyone but the server, which saw the sums without noise." if budget.server_trusted else ""
    )
    where = f" Its {claim.words}." if isinstance(claim, InSum) else ""
    sentences = [f"{run.method}: a Gaussian mechanism for every single row.{nominal}{trusted}{where}"]
    return sentences + [f"{site}: {_of_site(run, site, claim)}" for site in run.sites]


def _of_site(run: Run, site: str, claim: Claim) -> str:
    """What the run cost the site's records."""
    found = cost(claim, int(run.config["config"]["train.batch-size"]), run.attempts, site)
    if isinstance(found, str):
        return found
    budget = claim.budget
    said = f"at most {stated(found.epsilon, budget.delta, budget.neighbours)}"
    if found.against_all is not None:
        alone = stated(found.against_all, budget.delta, budget.neighbours)
        said += f"; {alone} against the server and all other sites together"
    return f"{found.rows} rows, {found.participations} participations of {found.steps} steps: {said}, this run alone."
