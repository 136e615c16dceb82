"""A run's formal guarantee, if it has one, and what remains unprotected in either case."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedveil.cards.card import Epsilon, PartyBound, PrivacyGuaranteeEntry, SiteCost, card_text, short_digest
from fedveil.config import RunConfig
from fedveil.contract.method import Method
from fedveil.contract.privacy import PrivacyGuarantee, SamplingPlan, Spent, stated_guarantee
from fedveil.federation.secagg.adversary_model import BROADCASTS, single_site
from fedveil.privacy import gdp
from fedveil.privacy.distributed_dgauss import DistributedDiscreteGaussian
from fedveil.privacy.dp_sgd import DpSgdConfig
from fedveil.privacy.guarantee_source import guarantee_of, untimed
from fedveil.privacy.guarantee_words import (
    board_sentences,
    conditions,
    describe_accountant,
    describe_guarantee,
    describe_sampling,
    describe_unit,
    party_epsilons,
)
from fedveil.privacy.server_side_bound import ServerSideBound, server_side_bound
from fedveil.records import disclosure_summary

NONE = "There is NO formal guarantee"
IN_THIS_RUN = "in this run alone"
LYING = (
    "The server wrote this card and can write anything. A signature shows whose key signed these bytes, not that "
    "they are true. A site that also signs vouches only for what it saw itself: its own messages, log and ledger. It "
    "knows nothing about what other sites sent, what the server kept, or what the attacks found."
)


def formal_guarantees(
    method: Method, config: RunConfig, attempts: Sequence[Mapping[str, Any]], sites: Sequence[str], whole: bool
) -> PrivacyGuaranteeEntry:
    """Build the card's guarantee entry.

    Args:
        attempts: the lines in metrics.jsonl that are attempts at a round.
        whole: whether to include mu for subsampled steps, which takes seconds per site.
    """
    claim = guarantee_of(method, config)
    if claim is None:
        return _none("the run makes no claim of differential privacy, so epsilon is infinite.")
    if config.run.deterministic:
        return _none("its noise was seeded (run.deterministic = true), and anyone who knows the seed can remove it.")
    budget, batch = claim.budget, config.train.batch_size
    costs = {site: server_side_bound(claim, batch, attempts, site) for site in sites}
    each = [_site(site, cost, claim, whole) for site, cost in costs.items()]
    worst = _worst(each, budget.epsilon)
    known = [cost for cost in costs.values() if isinstance(cost, ServerSideBound)]
    seen = {step: count for cost in known for step, count in cost.charges.items()}
    charges = seen if known else _planned(claim)
    against_all = _against_all(known, is_complete=len(known) == len(costs))
    return PrivacyGuaranteeEntry(
        formal=isinstance(worst, float),
        says=_says(worst, claim, config),
        unit=f"{describe_unit(config)}, {IN_THIS_RUN}",
        relation=budget.neighbours.value,
        sampling=describe_sampling(charges, config),
        against=_against(claim, config, worst, known, against_all),
        for_the_board=_for_the_board(claim, config, worst, against_all),
        delta=budget.delta,
        nominal=budget.nominal,
        allowed=_number(budget.epsilon),
        epsilon=worst,
        model=_model(claim),
        mechanism=_mechanism(claim, config),
        accountant=f"dp-accounting {importlib.metadata.version('dp-accounting')}: {describe_accountant(charges)}",
        sites=each,
        assumptions=_assumptions(claim),
    )


def _planned(claim: PrivacyGuarantee) -> Spent:
    """Return the charge of a single step, for a run whose charges are unknown."""
    return claim.privacy_spent(SamplingPlan(1, 1, 1, 2, claim.budget.neighbours))


def _against_all(known: Sequence[ServerSideBound], is_complete: bool) -> float | None:
    """Return the largest epsilon against all others together; None if it is unknown for any site."""
    values = [cost.against_all for cost in known if cost.against_all is not None]
    return max(values) if values and is_complete else None


def _against(
    claim: PrivacyGuarantee,
    config: RunConfig,
    worst: Epsilon,
    known: Sequence[ServerSideBound],
    against_all: float | None,
) -> list[PartyBound]:
    """Return the epsilon against each party; [] if no bound is known."""
    if not isinstance(worst, float):
        return []
    most = max(known, key=lambda cost: cost.epsilon, default=None)
    parties = party_epsilons(claim, config, worst, against_all)
    if most is not None and most.epsilon == worst:
        parties = describe_guarantee(claim, config, most.charges).parties
    return [
        PartyBound(party=one.party, epsilon="not known" if one.epsilon is None else _number(one.epsilon))
        for one in parties
    ]


def _for_the_board(claim: PrivacyGuarantee, config: RunConfig, worst: Epsilon, against_all: float | None) -> list[str]:
    """Return the three sentences, with the limit that the sites' ledgers set for this run, if any."""
    if not isinstance(worst, float):
        return []
    limit = claim.budget.epsilon
    return board_sentences(claim, config, limit if math.isfinite(limit) else worst, against_all)


def _none(why: str) -> PrivacyGuaranteeEntry:
    return PrivacyGuaranteeEntry(formal=False, says=f"{NONE}: {why}", unit="none")


def _site(site: str, found: ServerSideBound | str, claim: PrivacyGuarantee, whole: bool) -> SiteCost:
    name = short_digest(site)
    if isinstance(found, str):
        return SiteCost(site=name, unknown=card_text(found))
    quick = {step[0] for step in found.charges} <= {"gaussian"}
    mu = gdp.compute_mu(found.charges, claim.budget.delta, claim.budget.neighbours) if whole or quick else None
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
    """Return the epsilon of the site that was charged most, or the ledger's limit `allowed` if one is unknown."""
    values = [
        _number(allowed) if site.epsilon == "not known" and allowed < math.inf else site.epsilon for site in sites
    ]
    for none in ("infinite", "not known"):
        if none in values:
            return none
    return max((value for value in values if isinstance(value, float)), default=_number(allowed))


def _says(worst: Epsilon, claim: PrivacyGuarantee, config: RunConfig) -> str:
    budget = claim.budget
    if worst == "not known":
        return (
            f"{NONE} that this card can give: the server does not know the charges of some site's examples, and no "
            "ledger bounds it. Treat epsilon as infinite."
        )
    if not isinstance(worst, float):
        return f"{NONE}: the charges of some site's examples have no finite epsilon."
    whom = "everyone but the site itself"
    if budget.server_trusted:
        whom += " and the server, which saw sums without noise: against the server epsilon is infinite"
    assumed = conditions(claim, config)
    whom += f", provided that {' and '.join(assumed)}" if assumed else ""
    stated = stated_guarantee(worst, budget.delta, budget.neighbours)
    return f"{stated} at most, for {describe_unit(config)}, {IN_THIS_RUN}, against {whom}."


def _model(claim: PrivacyGuarantee) -> str:
    if claim.budget.server_trusted:
        return "central: the sites send values without noise, and trust the server to add it"
    if isinstance(claim, DistributedDiscreteGaussian):
        return f"distributed: the {claim.words}"
    return (
        "at the site: each site adds all of its noise before anything leaves it, and need not trust the server to "
        "add it"
    )


def _mechanism(claim: PrivacyGuarantee, config: RunConfig) -> str:
    inner = claim.claim if isinstance(claim, DistributedDiscreteGaussian) else claim
    if isinstance(inner, DpSgdConfig):
        return (
            f"DP-SGD: each example's gradient clipped to norm {inner.clip:g}, Gaussian noise of {inner.noise:g} "
            "times that on every step's sum, batches by Poisson sampling"
        )
    return (
        f"Gaussian noise of the method {config.method.name} on sums that are clipped per example; its page has the "
        "equations"
    )


def _assumptions(claim: PrivacyGuarantee) -> list[str]:
    sentences = [
        (
            "A site's figure relies on the numbers of examples and steps that it reported; only its own ledger "
            "enforces a budget."
        ),
        (
            "The figures are for this run alone: other runs on the same examples add up, and the site's ledger counts "
            "them."
        ),
        (
            "A limit over several runs is kept if their settings are fixed before the first result: settings that "
            "follow from earlier results are not covered by composing the runs (Rogers et al. 2016; Feldman, Zrnic "
            "2021)."
        ),
        "Noise and batches are drawn at random by the party that adds them, from its operating system.",
        "Noise is drawn in fp64 and sums are rounded to fp32; attacks on the rounding itself are not accounted for.",
        "Settings chosen by looking at the examples, and runs discarded for their scores, are not counted.",
    ]
    if claim.budget.neighbours.value == "zero-out":
        sentences.append("The number of examples, which every upload in the clear carries, counts as public.")
    if isinstance(claim, DistributedDiscreteGaussian):
        sentences.append(f"{claim.honest} sites in every sum keep their share of the noise secret.")
        sentences.append("The server follows the protocol of secure aggregation: it neither deviates from it nor lies.")
    if timing := untimed(claim):
        sentences.append(timing)
    return sentences


def _several_examples(config: RunConfig) -> str:
    if config.dp.unit_column:
        return (
            f"A person with k units in a site's data (the unit is {describe_unit(config)}): their bound is k times "
            "epsilon, at a larger delta: delta (e^(k epsilon) - 1) / (e^epsilon - 1)."
        )
    return (
        "A person with k examples in a site's data: the unit is one example, so their bound is k times epsilon, at a "
        "larger delta: delta (e^(k epsilon) - 1) / (e^epsilon - 1)."
    )


def not_protected(method: Method, config: RunConfig, attempts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return sentences about what readers must not assume to be protected.

    `attempts`: as in `formal_guarantees`.
    """
    claim = guarantee_of(method, config)
    sentences = [
        LYING,
        _several_examples(config),
        "A person with examples at several sites: with the noise at each site the sites' epsilons and deltas add up "
        "at most; with the noise in the sum they do not bound it (two sites of epsilon 8: 19.1, not 16).",
        "Properties of a site's examples as a whole: how many there are, what they are about, how well the model "
        "fits them.",
        "Who took part, when, and the sizes of messages.",
        "The machines: their root users, the code a site's policy admits, and the time a step takes.",
    ]
    if claim is None or config.run.deterministic:
        sentences.insert(
            1,
            "Single examples, from the server or anyone who gets the model: withholding does not bound what can be "
            "inferred.",
        )
    if not config.secure.enabled:
        sentences.append(f"Single uploads, from the server{_with_reports(attempts)}.")
    elif exception := single_site(method.has_single_site_entries):
        sentences.append(exception)
    if config.secure.enabled:
        sentences.append(
            "A site's upload, from a server that lies or deviates from the protocol of secure aggregation, unless "
            "every "
            "site's policy requires secure aggregation, names the roster of signing keys and admits only known code."
        )
        if not method.has_bound_broadcast:
            sentences.append(BROADCASTS)
    if unsigned := _unsigned(attempts):
        sentences.append(unsigned)
    if config.run.capture_messages:
        sentences.append(
            "The copies of the messages that the server stored (run.capture-messages), which are as confidential "
            "as the messages."
        )
    return sentences


def _with_reports(attempts: Sequence[Mapping[str, Any]]) -> str:
    """Return a clause that says what sites reported with their uploads; "" if they reported nothing."""
    names = disclosure_summary.reported_metrics(attempts)
    parts = ["each site's number of examples"] * ("num_examples" in names)
    parts += ["the losses it reported"] * any("loss" in name for name in names)
    return f", with {' and '.join(parts)}" if parts else ""


def _unsigned(attempts: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence about the uploads that sites did not sign; "" if there are none."""
    count = sum(len(disclosure_summary.unsigned_sites(attempt)) for attempt in attempts)
    accepted = sum(len(attempt.get("accepted") or []) for attempt in attempts)
    if not count:
        return ""
    which = "of every upload" if count == accepted else f"of {count} of {accepted} uploads"
    return f"The origin {which}: the site did not sign it, so only the server's SuperLink vouches for the sender."


def _number(value: float) -> Epsilon:
    return "infinite" if math.isinf(value) else float(value)
