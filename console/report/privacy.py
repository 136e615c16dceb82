"""What a run cost the records of each site at most: sentences from the run folder alone."""

from __future__ import annotations

import json
from collections import Counter

from fedveil import strategies
from fedveil.config import parse
from fedveil.console.runs.folder import Run
from fedveil.contract.budget import Claim, Plan, stated
from fedveil.errors import ConfigError
from fedveil.privacy import accounting
from fedveil.privacy.claims import claim_of
from fedveil.privacy.in_sum import InSum

_MOST_ROWS = 100_000_000  # as the server's gate has it
# Of all participations together: beyond these, accounting takes minutes and then all memory.
_MOST_STEPS, _MOST_LOSS = 3_000_000, 1200.0


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
    """What the run cost the site's records. Its reports are the site's own words, so they are bounded first."""
    asked = [int(a["round"]) for a in run.attempts if site in a.get("cohort", [])]
    reports = [a["reports"][site] for a in run.attempts if site in a.get("reports", {})]
    if not reports and any(site in a["accepted"] for a in run.unseen):
        return "its uploads were added up unseen, so its number of rows is not known here; its own ledger tells."
    if not reports:
        return "no accepted upload, so its number of rows is not known here; its own ledger tells."
    counts = [(_count(r.get("num_examples"), 1, _MOST_ROWS), _count(r.get("steps"), 0, _MOST_STEPS)) for r in reports]
    if any(rows is None or steps is None for rows, steps in counts):
        return (
            "not known. Its reports do not say how many rows and steps it took, or say more than "
            f"{_MOST_STEPS:,} steps; its own ledger tells. Until then take epsilon for infinite."
        )
    rows, steps = min(n for n, _ in counts if n is not None), max(n for _, n in counts if n is not None)
    budget, batch = claim.budget, int(run.config["config"]["train.batch-size"])
    try:
        # Every round up to the last: with an epoch cut over rounds a site that skips some meets more epochs.
        plan = Plan(max(asked) + 1, max(steps, 1), batch, rows, budget.neighbours)
    except ConfigError as error:
        return f"not known, for its reports do not fit the run ({error}). Take epsilon for infinite."
    once = Plan(1, plan.steps, plan.batch, rows, budget.neighbours)
    charges = Counter(dict(claim.privacy_spent(plan)))
    for _ in range(len(asked) - len(set(asked))):
        charges.update(dict(claim.privacy_spent(once)))
    is_closed = all(kind != "poisson" for kind, *_ in charges)  # a formula, for any number of steps
    if not is_closed and (sum(charges.values()) > _MOST_STEPS or accounting.mean_loss(charges) > _MOST_LOSS):
        return (
            f"{rows} rows, {len(asked)} participations of {steps} steps: more than can be accounted here (a mean "
            f"privacy loss of at most {_MOST_LOSS:g} in {_MOST_STEPS:,} steps). Take epsilon for infinite."
        )
    found, alone = (
        stated(accounting.epsilon(c, budget.delta, budget.neighbours), budget.delta, budget.neighbours)
        for c in (charges, accounting.against_all(charges))
    )
    all_others = f"; {alone} against the server and all other sites together" if isinstance(claim, InSum) else ""
    return f"{rows} rows, {len(asked)} participations of {steps} steps: at most {found}{all_others}, this run alone."


def _count(value: object, least: int, most: int) -> int | None:
    """A number that a site reported; None if it is missing, or no whole number from `least` to `most`."""
    known = isinstance(value, int | float) and least <= value <= most and value == int(value)
    return int(value) if known else None  # type: ignore[call-overload]
