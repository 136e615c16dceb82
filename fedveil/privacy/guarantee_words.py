"""The wording of a differential privacy guarantee: unit, relation, sampling, accountant, and the adversaries.

Every command, page and card takes its wording from here, so that it changes in one place. `describe_guarantee` covers
charges, and `board_sentences` gives the three sentences for an ethics board.

| party | epsilon, with the noise at the site | with the noise in the sum, h honest and c colluding sites |
|---|---|---|
| the server | from the charges; infinite if it receives values without noise | from the charges |
| other sites | from the charges | from the charges; with c = 0, only the noise of h - 1 sites counts |
| the server with c other sites | same as the server | from the charges |
| the server and all other sites | same as the server | from the site's own share of the noise |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedveil.config import RunConfig
from fedveil.contract.privacy import (
    OWN_SHARE,
    SUMMED,
    Adjacency,
    PrivacyGuarantee,
    SamplingPlan,
    Spent,
    is_poisson_sampled,
    joint_budget,
    stated_guarantee,
)
from fedveil.privacy import accounting
from fedveil.privacy.distributed_dgauss import DistributedDiscreteGaussian
from fedveil.privacy.guarantee_source import untimed
from fedveil.sanitize import sanitize

__all__ = [
    "UNIT",
    "GuaranteeWords",
    "PartyEpsilon",
    "board_sentences",
    "conditions",
    "describe_accountant",
    "describe_claim",
    "describe_guarantee",
    "describe_relation",
    "describe_sampling",
    "describe_unit",
    "party_epsilons",
]

UNIT = "one example of one site's data set"
_LONGEST_COLUMN = 80  # maximum number of characters in a column name
# Mean privacy loss; beyond it, accounting for Poisson batches takes minutes and then exhausts memory.
_MOST_LOSS = 1200.0
_ACCOUNTANTS = {
    "gaussian": "the analytic Gaussian mechanism (exact; Balle, Wang 2018)",
    "poisson": "privacy loss distributions (an upper bound; Zhu, Dong, Wang 2022)",
    "fixed": "privacy loss distributions of a joint pair for fixed batch sizes (an upper bound; Zhu, Dong, Wang 2022)",
    SUMMED: (
        "the continuous mechanism that a sum rounds or, where sums are too coarse, Renyi divergences of the discrete "
        "Gaussian (an upper bound; Kairouz, Liu, Steinke 2021; Canonne, Kamath, Steinke 2020)"
    ),
}


@dataclass(frozen=True)
class PartyEpsilon:
    """The epsilon against one party; None if it is unknown."""

    party: str
    epsilon: float | None


@dataclass(frozen=True)
class GuaranteeWords:
    """A guarantee with everything needed to interpret its epsilon.

    Attributes:
        unit, relation, sampling, accountant: descriptions in words.
        delta, neighbours: delta and adjacency of each epsilon.
        epsilon: epsilon of the charges.
        parties: the parties against which each epsilon holds.
        conditions: the guarantee's assumptions, each phrased to follow "provided that".
    """

    unit: str
    relation: str
    sampling: str
    accountant: str
    delta: float
    neighbours: Adjacency
    epsilon: float
    parties: tuple[PartyEpsilon, ...]
    conditions: tuple[str, ...]

    @property
    def against_whom(self) -> str:
        """Return each epsilon with the parties it holds against, grouping parties with the same epsilon."""
        groups: dict[float | None, list[str]] = {}
        for one in self.parties:
            groups.setdefault(one.epsilon, []).append(one.party)
        return "; ".join(
            f"{_stated(epsilon, self.delta, self.neighbours)} against {_listed(names)}"
            for epsilon, names in groups.items()
        )

    @property
    def sentence(self) -> str:
        """Return the guarantee as one sentence without a final period."""
        provided = f"; provided that {_listed(self.conditions)}" if self.conditions else ""
        return (
            f"{self.against_whom}; unit: {self.unit}; relation: {self.relation}; sampling: {self.sampling}; "
            f"accountant: {self.accountant}{provided}"
        )


def describe_guarantee(
    claim: PrivacyGuarantee,
    config: RunConfig,
    charges: Spent,
    epsilon_of: Callable[[Spent, float, Adjacency], float] = accounting.compute_epsilon,
) -> GuaranteeWords:
    """Return the guarantee that follows from these charges to one record.

    An epsilon beyond the accountant's range counts as infinite: with almost no noise, accounting would exhaust memory.
    """
    budget = claim.budget

    def epsilon(spent: Spent) -> float:
        if is_poisson_sampled(spent) and accounting.mean_loss(spent) > _MOST_LOSS:
            return math.inf
        return epsilon_of(spent, budget.delta, budget.neighbours)

    counted = epsilon(charges)
    against_all = other_site = None
    if isinstance(claim, DistributedDiscreteGaussian):
        against_all = epsilon(accounting.epsilon_against_all(charges))
        if not config.secure.max_colluders:
            other_site = epsilon(_without_one_share(claim, charges))
    return GuaranteeWords(
        describe_unit(config),
        describe_relation(budget.neighbours, config),
        describe_sampling(charges, config),
        describe_accountant(charges),
        budget.delta,
        budget.neighbours,
        counted,
        party_epsilons(claim, config, counted, against_all, other_site),
        conditions(claim, config),
    )


def describe_claim(claim: PrivacyGuarantee, config: RunConfig) -> str:
    """Return the parts of a guarantee's description that do not depend on a site's number of examples."""
    plan = SamplingPlan(rounds=1, steps=1, batch=1, examples=2, neighbours=claim.budget.neighbours)
    charges = claim.privacy_spent(plan)
    return (
        f"unit: {describe_unit(config)}; relation: {describe_relation(claim.budget.neighbours, config)}; sampling: "
        f"{describe_sampling(charges, config)}; accountant: {describe_accountant(charges)}"
    )


def party_epsilons(
    claim: PrivacyGuarantee,
    config: RunConfig,
    epsilon: float,
    against_all: float | None,
    other_site: float | None = None,
) -> tuple[PartyEpsilon, ...]:
    """Return the epsilon against each party.

    Args:
        epsilon: epsilon of the charges.
        against_all: with the noise in the sum, the epsilon of the site's own share; None if unknown.
        other_site: with the noise in the sum and no colluding site, the epsilon against another site, which knows its
            own share; None if unknown.
    """
    if not isinstance(claim, DistributedDiscreteGaussian):
        with_server = math.inf if claim.budget.server_trusted else epsilon
        values = (with_server, epsilon, with_server)
        return tuple(map(PartyEpsilon, ("the server", "other sites", "all of them together"), values))
    colluders = config.secure.max_colluders
    parties = [PartyEpsilon("the server", epsilon)]
    if colluders:
        some = "1 other site" if colluders == 1 else f"{colluders} other sites"
        parties += [PartyEpsilon("other sites", epsilon), PartyEpsilon(f"the server with {some}", epsilon)]
    else:
        parties += [PartyEpsilon("another site", other_site)]
    return (*parties, PartyEpsilon("all of them together", against_all))


def conditions(claim: PrivacyGuarantee, config: RunConfig) -> tuple[str, ...]:
    """Return the guarantee's assumptions about other parties, each phrased to follow "provided that"."""
    assumed = []
    if isinstance(claim, DistributedDiscreteGaussian):
        assumed.append(f"{claim.honest} sites in every sum keep their share of the noise secret")
        assumed.append("the server follows the protocol")
    if untimed(claim):
        assumed.append("the server does not time the site")
    if config.task.name == "own-model":  # its file claims this (independent_rows), and FedVeil cannot check it
        assumed.append(f"the own model's file {config.task.module}.py makes each row from that row alone")
    return tuple(assumed)


def describe_unit(config: RunConfig) -> str:
    """Return the unit that a guarantee protects: an example, or all examples of a unit under dp.unit-column."""
    column = sanitize(config.dp.unit_column, _LONGEST_COLUMN)
    if not column:
        return UNIT
    words = f'one unit of one site\'s data set, all examples with its id in the column "{column}"'
    if config.dp.no_unit == "one":
        words += "; all examples without an id are one more unit, so that a person with both kinds is protected less"
    return words


def _noun(config: RunConfig) -> str:
    return "unit" if config.dp.unit_column else "example"


def describe_relation(neighbours: Adjacency, config: RunConfig) -> str:
    """Return the adjacency relation in words, with its name."""
    noun = _noun(config)
    if neighbours is Adjacency.REPLACE_ONE:
        return f"the {noun} is replaced by any other one ({neighbours.value})"
    return f"the {noun} adds nothing to any sum ({neighbours.value}; the number of {noun}s is public)"


def describe_sampling(charges: Spent, config: RunConfig) -> str:
    """Describe how the batches behind these charges are drawn, as far as it affects epsilon."""
    words = []
    if is_poisson_sampled(charges):
        words.append(f"Poisson batches (each {_noun(config)} is drawn independently)")
    if any(step.kind == "fixed" for step in charges):
        words.append("batches of fixed size, drawn without replacement")
    if any(step.kind == "gaussian" or (step.kind == SUMMED and not step.examples) for step in charges):
        words.append("no gain from sampling (each use counts in full)")
    return " and ".join(words) or "none"


def describe_accountant(charges: Spent) -> str:
    """Return the accountants that bound these charges, each with its source."""
    kinds = {step.kind for step in charges}
    return "; ".join(words for kind, words in _ACCOUNTANTS.items() if kind in kinds) or "nothing was charged"


def board_sentences(claim: PrivacyGuarantee, config: RunConfig, epsilon: float, against_all: float | None) -> list[str]:
    """Return three sentences for an ethics board; none if the server receives values without noise.

    Args:
        epsilon: the limit that a site's ledger enforces for this run, or the run's cost. A site's limit over all runs
            is in its own policy and ledger, which no card knows.
        against_all: the epsilon against all others together in this run; None if unknown.
    """
    budget = claim.budget
    if budget.server_trusted or not math.isfinite(epsilon):
        return []
    times, delta = f"{math.exp(min(epsilon, 700.0)):.3g}", f"{budget.delta:g} (one in {1 / budget.delta:,.0f})"
    noun = _noun(config)
    meant = f" ({describe_unit(config)})" if config.dp.unit_column else ""
    several = "" if config.dp.unit_column else "a patient with several examples, "
    change = (
        f"whether this {noun} or another one was used"
        if budget.neighbours is Adjacency.REPLACE_ONE
        else f"whether this {noun} was used or added nothing"
    )
    in_sum = isinstance(claim, DistributedDiscreteGaussian)
    if isinstance(claim, DistributedDiscreteGaussian):
        two = f"epsilon {2 * epsilon:.3g} at delta {(1 + math.exp(min(epsilon, 700.0))) * budget.delta:.2g}"
        others = "1 other hospital" if claim.honest == 2 else f"{claim.honest - 1} other hospitals"
        noise = f", at least {others} in every sum tell nobody their noise, the server follows the protocol of secure "
        noise += "aggregation"
    else:
        two, noise = f"epsilon {2 * epsilon:.3g} at delta {2 * budget.delta:.2g}", ""
    timing = " and the server does not time the hospital" if untimed(claim) else ""
    if not in_sum:
        everyone = f"epsilon {epsilon:.4g}, the same"
    elif against_all is None:
        everyone = "not known to the server (this hospital's own ledger has it)"
    else:
        everyone = "infinite" if math.isinf(against_all) else f"epsilon {against_all:.4g} in this run"
    return [
        (
            f"A person who sees everything that leaves this hospital, and even knows every other {noun}, can hardly "
            f"tell {change}: no conclusion becomes more than {times} times as likely (e^{epsilon:.4g}; 2.7 times for "
            f"epsilon 1), except with a chance of about {delta}."
        ),
        (
            f"This counts this run alone, for single {noun}s of this hospital's data only{meant}: other runs on the "
            f"same {noun}s add to it, which this hospital's own ledger counts together. It does not cover what is "
            f"learned about patients in general, {several}the same patient's examples in other hospitals (for two "
            f"hospitals with this figure: at most {two}), or the number of {noun}s, which is known."
        ),
        (
            f"It holds while the hospital's own computer, random numbers and ledger are sound{noise}{timing}; against "
            f"all others working together the figure is {everyone}. It is a computed upper bound, and proves nothing "
            "about "
            "data or attacks outside this statement."
        ),
    ]


def _without_one_share(claim: DistributedDiscreteGaussian, charges: Spent) -> Spent:
    """Return the charges against another site, which knows its own share of the noise."""
    fewer = joint_budget(claim.noise.multiplier * math.sqrt(1 - 1 / claim.honest), *claim.noise.kept)
    return {
        step._replace(multiplier=fewer) if step.kind == SUMMED else step: count
        for step, count in charges.items()
        if step.kind != OWN_SHARE
    }


def _stated(epsilon: float | None, delta: float, neighbours: Adjacency) -> str:
    return "an epsilon that is not known here" if epsilon is None else stated_guarantee(epsilon, delta, neighbours)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
