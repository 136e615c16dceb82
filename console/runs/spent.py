"""What a site's privacy ledger says, for people: how many records were charged, and what the most charged has spent.

The relation and the delta are those of the site's policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from fedveil.client_app.site import policy as policies
from fedveil.client_app.site.private import ledger_of
from fedveil.console.runs.noted import noted
from fedveil.contract.budget import OWN_SHARE, Budget, stated
from fedveil.errors import FedVeilError
from fedveil.foreign import shown
from fedveil.sealed import Seal


@dataclass(frozen=True)
class Standing:
    """One site's ledger.

    Attributes:
        histories: different ones that records have; 0 where nothing was charged.
        rows: that were charged, over all runs.
        epsilon: what the most charged of them has spent; 0 for none.
        own: the same against the server and all other sites together; None where no noise was in a sum.
        budget: the site's own: its epsilon is what the policy permits, and relation and delta are of all three.
    """

    histories: int
    rows: int
    epsilon: float
    own: float | None
    budget: Budget

    @property
    def left(self) -> float:
        """What the policy permits beyond what is spent. Charges compose: what a run will cost is no difference."""
        spent_ = max(self.epsilon, self.own or 0.0)
        return max(0.0, self.budget.epsilon - spent_) if self.budget.epsilon < math.inf else math.inf


def names(state_dir: Path) -> list[str]:
    """The sites whose ledgers are below the state folder."""
    return [file.stem for file in sorted((state_dir.expanduser() / ".ledger").glob("*.json"))]


def spent(state_dir: Path, policy: str = "", key_file: str = "") -> list[str]:
    """A line for each site whose ledger is below the state folder; none where no run had a budget.

    Args:
        policy, key_file: where `fedveil site start` has not noted them, as in a container.
    """
    found = names(state_dir)
    return [f"privacy ledger of {shown(name)}: {_of(state_dir, name, policy, key_file)}" for name in found]


def standing(state_dir: Path, name: str, policy: str = "", key_file: str = "") -> Standing:
    """What a site's ledger says. Raises FedVeilError, OSError, ValueError where it cannot be read."""
    site = noted(state_dir, name, policy, key_file)
    budget = policies.of(site).budget
    histories = ledger_of(state_dir, name, Seal.of(site.key_file)).histories()
    from fedveil.privacy import accounting  # it takes a second, and a site without a budget needs none

    def most(own: bool) -> float:
        charged = [accounting.against_all(history) if own else history for history, _ in histories]
        return max((accounting.epsilon(history, budget.delta, budget.neighbours) for history in charged), default=0.0)

    in_sum = any(step[0] == OWN_SHARE for history, _ in histories for step in history)
    rows = sum(records for _, records in histories)
    return Standing(len(histories), rows, most(own=False), most(own=True) if in_sum else None, budget)


def _of(state_dir: Path, name: str, policy: str, key_file: str) -> str:
    try:
        found = standing(state_dir, name, policy, key_file)
    except (FedVeilError, OSError, ValueError) as error:
        return f"it cannot be read: {shown(error)}"
    if not found.histories:
        return "nothing was charged yet"
    about = found.budget.delta, found.budget.neighbours
    said = f"{found.rows:,} rows charged, over all runs; the most charged has spent {stated(found.epsilon, *about)}"
    if found.own is not None:
        said += f", against the server and all other sites together {stated(found.own, *about)}"
    return said
