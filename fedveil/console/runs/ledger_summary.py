"""Summarize a site's privacy ledger: the number of charged records and the highest spent budget.

The adjacency and delta come from the site's policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from fedveil.client_app.policy import site_policy as policies
from fedveil.client_app.state.client_state import open_ledger
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
from fedveil.sanitize import sanitize


@dataclass(frozen=True)
class LedgerStanding:
    """One site's ledger.

    Attributes:
        histories: number of different charge histories among the records; 0 if nothing was charged.
        rows: number of charged records, over all runs.
        epsilon: spent by the most charged record; 0 for none.
        own: the same against a coalition of the server and all other sites; None if no noise was in a sum.
        poisson: true if the values assume Poisson sampling.
        budget: the site's own: the epsilon that its policy permits, and the adjacency and delta of all three values.
    """

    histories: int
    rows: int
    epsilon: float
    own: float | None
    poisson: bool
    budget: PrivacyBudget

    @property
    def left(self) -> float:
        """Return the budget that the policy permits beyond the spent amount.

        Charges compose, so the cost of a further run cannot be subtracted from it.
        """
        spent_ = max(self.epsilon, self.own or 0.0)
        return max(0.0, self.budget.epsilon - spent_) if self.budget.epsilon < math.inf else math.inf


def charged_datasets(state_dir: Path) -> list[str]:
    """Return the sites whose ledgers are below the state folder."""
    return [file.stem for file in sorted((state_dir.expanduser() / ".ledger").glob("*.json"))]


def ledger_lines(state_dir: Path, policy: str = "", key_file: str = "") -> list[str]:
    """Return a line for each site with a ledger below the state folder; none if no run had a budget.

    Args:
        policy, key_file: needed if `fedveil site start` has not saved them, as in a container.
    """
    dataset_names = charged_datasets(state_dir)
    return [f"privacy ledger of {sanitize(name)}: {_of(state_dir, name, policy, key_file)}" for name in dataset_names]


def ledger_standing(state_dir: Path, name: str, policy: str = "", key_file: str = "") -> LedgerStanding:
    """Read a site's ledger. Raises FedVeilError, OSError or ValueError if it cannot be read."""
    site = read_site_note(state_dir, name, policy, key_file)
    budget = policies.load_policy(site).budget
    histories = open_ledger(state_dir, name, FileSeal.from_key_file(site.key_file)).histories()
    from fedveil.privacy import accounting  # this import takes a second, and a site without a budget does not need it

    def most(own: bool) -> float:
        charged = [accounting.epsilon_against_all(history) if own else history for history, _ in histories]
        return max(
            (accounting.compute_epsilon(history, budget.delta, budget.neighbours) for history in charged), default=0.0
        )

    in_sum = any(step.kind in (OWN_SHARE, OLD_OWN_SHARE) for history, _ in histories for step in history)
    rows = sum(records for _, records in histories)
    poisson = any(is_poisson_sampled(history) for history, _ in histories)
    return LedgerStanding(len(histories), rows, most(own=False), most(own=True) if in_sum else None, poisson, budget)


def _of(state_dir: Path, name: str, policy: str, key_file: str) -> str:
    try:
        standing = ledger_standing(state_dir, name, policy, key_file)
    except (FedVeilError, OSError, ValueError) as error:
        return f"cannot be read: {sanitize(error)}"
    if not standing.histories:
        return "nothing charged yet"
    about = standing.budget.delta, standing.budget.neighbours
    most = stated_guarantee(standing.epsilon, *about)
    summary = f"{standing.rows:,} examples charged over all runs; the highest charge is {most}"
    if standing.own is not None:
        summary += f", against the server and all other sites together {stated_guarantee(standing.own, *about)}"
    return f"{summary}. {UNTIMED}" if standing.poisson else summary
