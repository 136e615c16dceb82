"""What a run guarantees formally, or that it guarantees nothing; and what is not protected whatever it guarantees."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedveil.cards.card import Epsilon, Guarantee, SiteCost, short, text
from fedveil.config import RunConfig
from fedveil.contract.budget import Claim, stated
from fedveil.contract.method import Method
from fedveil.privacy import gaussian
from fedveil.privacy.claims import claim_of
from fedveil.privacy.dp_sgd import DpSgd
from fedveil.privacy.from_reports import Cost, cost
from fedveil.privacy.in_sum import InSum

NONE = "There is NO formal guarantee"
UNIT = "one row of one site's data set, in this run alone"
LYING = (
    "The server wrote this card, and can write what it wants. A signature says whose key signed these bytes, not that "
    "they are true. A site that signs too vouches for what that site itself saw: its own messages, its own log and "
    "ledger. Of what other sites sent, what the server kept, or what the attacks found it knows nothing."
)
_ACCOUNTANTS = {
    "gaussian": "the analytic Gaussian mechanism (exact)",
    "poisson": "privacy loss distributions (an upper bound)",
    "fixed": "Renyi divergences (an upper bound)",
    "summed": "Renyi divergences of the discrete Gaussian in the sum (an upper bound)",
}


def of(
    method: Method, config: RunConfig, attempts: Sequence[Mapping[str, Any]], sites: Sequence[str], whole: bool
) -> Guarantee:
    """The guarantee.

    Args:
        attempts: the lines of metrics.jsonl that are attempts at a round.
        whole: with mu of subsampled steps, which takes seconds a site.
    """
    claim = claim_of(method, config)
    if claim is None:
        return _none("the run makes no claim of differential privacy, so epsilon is infinite.")
    if config.run.deterministic:
        return _none("its noise was seeded (run.deterministic = true), and who knows the seed takes it away.")
    budget, batch = claim.budget, config.train.batch_size
    costs = {site: cost(claim, batch, attempts, site) for site in sites}
    each = [_site(site, found, claim, whole) for site, found in costs.items()]
    worst = _worst(each, budget.epsilon)
    kinds = {kind for found in costs.values() if isinstance(found, Cost) for kind, *_ in found.charges}
    used = "; ".join(words for kind, words in _ACCOUNTANTS.items() if kind in kinds)
    return Guarantee(
        formal=isinstance(worst, float),
        says=_says(worst, claim),
        unit=UNIT,
        relation=budget.neighbours.value,
        delta=budget.delta,
        nominal=budget.nominal,
        allowed=_number(budget.epsilon),
        epsilon=worst,
        model=_model(claim),
        mechanism=_mechanism(claim, config),
        accountant=f"dp-accounting {importlib.metadata.version('dp-accounting')}: {used or 'nothing was charged'}",
        sites=each,
        assumptions=_assumptions(claim),
    )


def _none(why: str) -> Guarantee:
    return Guarantee(formal=False, says=f"{NONE}: {why}", unit="none")


def _site(site: str, found: Cost | str, claim: Claim, whole: bool) -> SiteCost:
    name = short(site)
    if isinstance(found, str):
        return SiteCost(site=name, unknown=text(found))
    quick = {step[0] for step in found.charges} <= {"gaussian"}
    mu = gaussian.mu(found.charges, claim.budget.delta, claim.budget.neighbours) if whole or quick else None
    return SiteCost(
        site=name,
        rows=found.rows,
        participations=found.participations,
        steps=found.steps,
        epsilon=_number(found.epsilon),
        against_all=None if found.against_all is None else _number(found.against_all),
        mu=mu.value if mu else None,
        mu_down_to=mu.down_to if mu else 0.0,
    )


def _worst(sites: Sequence[SiteCost], allowed: float) -> Epsilon:
    """Of the most charged site. Where a site's figure is not known here, its ledger lets no more than `allowed`."""
    values = [
        _number(allowed) if site.epsilon == "not known" and allowed < math.inf else site.epsilon for site in sites
    ]
    for none in ("infinite", "not known"):
        if none in values:
            return none
    return max((value for value in values if isinstance(value, float)), default=_number(allowed))


def _says(worst: Epsilon, claim: Claim) -> str:
    budget = claim.budget
    if worst == "not known":
        return (
            f"{NONE} that this card can give: what some site's rows were charged is not known to the server, and no "
            "ledger bounds it. Take epsilon for infinite."
        )
    if not isinstance(worst, float):
        return f"{NONE}: the charges of some site's rows have no finite epsilon."
    whom = "everyone but the site itself"
    if budget.server_trusted:
        whom += " and the server, which saw sums without noise: against the server epsilon is infinite"
    if isinstance(claim, InSum):
        whom += f", while {claim.honest} sites of every sum tell nobody their share of the noise"
    return f"{stated(worst, budget.delta, budget.neighbours)} at most, for {UNIT}, against {whom}."


def _model(claim: Claim) -> str:
    if claim.budget.server_trusted:
        return "central: the sites send values before the noise, and trust the server to add it"
    if isinstance(claim, InSum):
        return f"distributed: the {claim.words}"
    return "at the site: each adds all of its noise before anything leaves it, and need not trust the server"


def _mechanism(claim: Claim, config: RunConfig) -> str:
    inner = claim.claim if isinstance(claim, InSum) else claim
    if isinstance(inner, DpSgd):
        return (
            f"DP-SGD: each row's gradient clipped to norm {inner.clip:g}, Gaussian noise of {inner.noise:g} times that "
            "on every step's sum, batches by Poisson sampling"
        )
    return f"Gaussian noise of the method {config.method.name} on sums of clipped rows; its page has the equations"


def _assumptions(claim: Claim) -> list[str]:
    said = [
        "A site's figure rests on the rows and steps that it reported; its own ledger is what holds it to a budget.",
        "This run alone: other runs on the same rows add up, and the site's ledger counts them.",
        "Noise and batches are drawn at random by the party that adds them, from its operating system.",
        "Noise is drawn in fp64 and sums are rounded to fp32; attacks on the rounding itself are not accounted for.",
        "Settings chosen by looking at the rows, and runs thrown away for their scores, are not counted.",
    ]
    if claim.budget.neighbours.value == "add-or-remove-one":
        said.append("The number of rows, which every upload in the clear carries, counts as public.")
    if isinstance(claim, InSum):
        said.append(f"{claim.honest} sites of every sum tell nobody their share of the noise.")
    return said


def not_protected(method: Method, config: RunConfig) -> list[str]:
    """What a reader must not take for protected."""
    claim = claim_of(method, config)
    said = [
        LYING,
        "Somebody with several rows, or with rows at several sites: the unit is a row, their bound several times that.",
        "What is true of a site's rows as a whole: how many there are, what they are about, how the model fits them.",
        "Who took part, when, and the sizes of messages.",
        "The machines: whoever is root there, the code that a site's policy lets in, time that a step takes.",
    ]
    if claim is None or config.run.deterministic:
        said.insert(
            1,
            "Single rows, from the server or from whoever gets the model: withholding is no bound on what can be told.",
        )
    if not config.secure.enabled:
        said.append("Single uploads from the server, with each site's number of examples and the losses it reported.")
    if config.run.tap:
        said.append("What the server kept of the messages (run.tap), which is as secret as they.")
    return said


def _number(value: float) -> Epsilon:
    return "infinite" if math.isinf(value) else float(value)
