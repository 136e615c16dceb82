"""What a run cost the records of each site at most: sentences from the run folder alone."""

from __future__ import annotations

import json
from collections import Counter

from fedveil import strategies
from fedveil.config import parse
from fedveil.console.runs.folder import Run
from fedveil.contract.budget import Plan, stated
from fedveil.errors import ConfigError
from fedveil.privacy import accounting
from fedveil.privacy.dp_sgd import DpSgd, claim_of


def statements(run: Run) -> list[str]:
    """What the run cost the records of each site at most, by itself: a sentence a site, from the run folder alone."""
    if "method" not in run.config:
        return []
    config = run.config["config"]
    try:
        method = strategies.create_from_json(run.method, json.dumps(run.config["method"]["fields"]))
    except ConfigError as error:  # a run of another version; the rest of its report is worth having
        return [f"Not known: this version cannot make the run's method ({error}). Take epsilon for infinite."]
    claim = claim_of(method, DpSgd.of(parse(config).dp))
    if claim is None:
        return ["The run makes no claim of differential privacy: epsilon infinite."]
    budget = claim.budget
    if config["run.deterministic"]:
        return ["Not private: seeded noise (run.deterministic = true). Epsilon infinite."]
    nominal = "" if budget.nominal is None else f" The nominal epsilon was {budget.nominal:g}; the honest one follows."
    trusted = (
        " It holds against everyone but the server, which saw the sums without noise." if budget.server_trusted else ""
    )
    sentences = [f"{run.method}: a Gaussian mechanism for every single row.{nominal}{trusted}"]
    for site in run.sites:
        asked = [int(a["round"]) for a in run.attempts if site in a.get("cohort", [])]
        reports = [a["reports"][site] for a in run.attempts if site in a.get("reports", {})]
        if not reports:
            sentences.append(
                f"{site}: no accepted upload, so its number of rows is not known here; its own ledger tells."
            )
            continue
        rows, steps = int(min(r["num_examples"] for r in reports)), int(max(r["steps"] for r in reports))
        # Every round up to the last: with an epoch cut over rounds a site that skips some meets more epochs.
        plan = Plan(max(asked) + 1, max(steps, 1), int(config["train.batch-size"]), rows, budget.neighbours)
        once = Plan(1, plan.steps, plan.batch, rows, budget.neighbours)
        charges = Counter(dict(claim.privacy_spent(plan)))
        for _ in range(len(asked) - len(set(asked))):
            charges.update(dict(claim.privacy_spent(once)))
        found = stated(accounting.epsilon(charges, budget.delta, budget.neighbours), budget.delta, budget.neighbours)
        sentences.append(
            f"{site}: {rows} rows, {len(asked)} participations of {steps} steps: at most {found}, this run alone."
        )
    return sentences
