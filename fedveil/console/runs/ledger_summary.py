"""Summarize a state folder's privacy ledger: for each party, the limit over all runs and how much is reserved."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from fedveil.client_app.node_config import SiteConfig
from fedveil.client_app.policy import site_policy as policies
from fedveil.client_app.state.client_state import LEDGER, open_ledger
from fedveil.console.runs.site_notes import read_site_note
from fedveil.contract.privacy import (
    OLD_OWN_SHARE,
    OWN_SHARE,
    UNTIMED,
    PrivacyBudget,
    is_poisson_sampled,
    stated_guarantee,
)
from fedveil.encrypted_files import FileSeal
from fedveil.errors import FedVeilError
from fedveil.privacy.ledger_account import LIMITED, MAX_RUNS, Party, PartyStanding, SiteAccount
from fedveil.sanitize import sanitize

_TITLE = "privacy ledger"


@dataclass(frozen=True)
class LedgerStanding:
    """A state folder's ledger.

    Attributes:
        account: its account, with the policy's current max-epsilon.
        parties: the account against each party; "the server with all sites" only if a run had noise in the sum.
        problem: why the site's policy does not match the ledger; "" if it does.
        poisson: whether the values assume Poisson sampling.
    """

    account: SiteAccount
    parties: tuple[PartyStanding, ...]
    problem: str
    poisson: bool

    @property
    def budget(self) -> PrivacyBudget:
        """Return the limit over all runs, with its delta and adjacency."""
        return self.account.own

    @property
    def left(self) -> float:
        """Return the unreserved part of the limit; infinity without a limit."""
        return max(0.0, self.budget.epsilon - max(one.reserved or 0.0 for one in self.parties))


def ledger_files(state_dir: Path) -> list[Path]:
    """Return the ledger file, and those from older versions."""
    return sorted((state_dir.expanduser() / LEDGER).glob("*.json"))


def ledger_lines(state_dir: Path, policy: str = "", key_file: str = "") -> list[str]:
    """Return the lines on the state folder's ledger for `fedveil site status`; [] if there is no ledger.

    Args:
        policy, key_file: needed if `fedveil site start` has not saved them, as in a container.
    """
    if open_ledger(state_dir).is_restored:
        return [f"{_TITLE}: restored from a backup; the site trains again after fedveil site ledger recover DATA"]
    if not ledger_files(state_dir):
        return []
    try:
        standing = ledger_standing(state_dir, policy, key_file)
    except (FedVeilError, OSError, ValueError) as error:
        return [f"{_TITLE}: cannot be read: {sanitize(error)}"]
    return [f"{_TITLE}: {line}" for line in standing_lines(standing)]


def ledger_standing(state_dir: Path, policy: str = "", key_file: str = "") -> LedgerStanding:
    """Read the ledger. Raises FedVeilError, OSError or ValueError if it cannot be read."""
    site = site_of_folder(state_dir, policy, key_file)
    budget = policies.load_policy(site).budget
    account = open_ledger(state_dir, FileSeal.from_key_file(site.key_file)).read(budget).account
    problem, now = "", (budget.delta, budget.neighbours)
    if (account.own.delta, account.own.neighbours) != now:
        problem = (
            f"the policy has delta {budget.delta:g} ({budget.neighbours.value}), for which this ledger was not made; "
            "no run with a claim is permitted until it is changed back"
        )
    elif site.policy:
        account = replace(account, own=budget)
    in_sum = any(step.kind in (OWN_SHARE, OLD_OWN_SHARE) for entry in account.entries for step in entry.largest)
    parties = [party for party in Party if party in LIMITED or in_sum]
    poisson = any(is_poisson_sampled(entry.largest) for entry in account.entries)
    return LedgerStanding(account, tuple(account.standing(party) for party in parties), problem, poisson)


def site_of_folder(state_dir: Path, policy: str = "", key_file: str = "") -> SiteConfig:
    """Return the site that `fedveil site start` saved in the state folder, overridden by the given policy or key file.

    If several sites share the folder, it is the first by name. Raises ConfigError, OSError or ValueError.
    """
    notes = sorted(file.stem for file in state_dir.expanduser().glob("*.toml"))
    return read_site_note(state_dir, notes[0] if notes else "", policy, key_file)


def standing_lines(standing: LedgerStanding) -> Iterator[str]:
    """Yield the ledger's contents: an overview, and a sentence or two for each party."""
    account, budget = standing.account, standing.budget
    if not account.entries:
        yield "nothing charged yet"
        return
    delta = f"delta {budget.delta:g} ({budget.neighbours.value})"
    yield f"{account.runs} of at most {MAX_RUNS} runs with a claim; {len(account.entries)} entries"
    for one in standing.parties:
        yield f"against {one.party}: {bound_of(one, budget)}. {if_planned(one, budget)}"
    if len(account.limits) > 1:
        limits = ", then ".join("none" if limit == math.inf else f"{limit:g}" for limit in account.limits)
        yield f"max-epsilon was {limits}, at {delta}: each larger limit was a new promise"
    if standing.problem:
        yield standing.problem
    if standing.poisson:
        yield UNTIMED


def bound_of(one: PartyStanding, budget: PrivacyBudget) -> str:
    """Return the guarantee against a party over all runs, regardless of what was decided between them."""
    if one.because:
        return f"over all runs, epsilon is infinite, because of run {sanitize(one.because, 100)}"
    if one.party not in LIMITED:
        return "no limit applies"
    if one.reserved is None:
        return "no limit over all runs: the policy sets no max-epsilon"
    limit = stated_guarantee(budget.epsilon, budget.delta, budget.neighbours)
    if math.isinf(one.reserved):
        return f"no limit over all runs: one has no bound, or more than {MAX_RUNS} have a claim; no new run can start"
    if one.reserved > budget.epsilon * (1 + 1e-9):
        return f"epsilon {one.reserved:.4g} is reserved, above {limit}, which was lowered since; no new run can start"
    share = 100 * one.reserved / budget.epsilon if budget.epsilon else 0.0
    return f"at most {limit} over all runs, regardless of decisions between them; {share:.0f} % of it is reserved"


def if_planned(one: PartyStanding, budget: PrivacyBudget) -> str:
    """Return the composition of all charges, with the condition under which it holds. It is not a claim."""
    figure = stated_guarantee(one.composed, budget.delta, budget.neighbours)
    rest = " for the runs with a claim" if one.because else ""
    return f"{figure} so far{rest}, if all runs had been planned together"
