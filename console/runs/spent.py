"""What a site's privacy ledger says, for people: how many records were charged, and what the most charged has spent.

The relation and the delta are those of the site's policy.
"""

from __future__ import annotations

from pathlib import Path

from fedveil.client_app.site import policy as policies
from fedveil.client_app.site.private import ledger_of
from fedveil.console.runs.noted import noted
from fedveil.contract.budget import OWN_SHARE, stated
from fedveil.errors import FedVeilError
from fedveil.foreign import shown
from fedveil.sealed import Seal


def spent(state_dir: Path, policy: str = "", key_file: str = "") -> list[str]:
    """A line for each site whose ledger is below the state folder; none where no run had a budget.

    Args:
        policy, key_file: where `fedveil site start` has not noted them, as in a container.
    """
    files = sorted((state_dir.expanduser() / ".ledger").glob("*.json"))
    return [f"privacy ledger of {shown(file.stem)}: {_of(state_dir, file.stem, policy, key_file)}" for file in files]


def _of(state_dir: Path, name: str, policy: str, key_file: str) -> str:
    try:
        site = noted(state_dir, name, policy, key_file)
        budget = policies.of(site).budget
        histories = ledger_of(state_dir, name, Seal.of(site.key_file)).histories()
    except (FedVeilError, OSError, ValueError) as error:
        return f"it cannot be read: {shown(error)}"
    from fedveil.privacy import accounting  # it takes a second, and a site without a budget needs none

    def most(own: bool) -> str:
        charged = [accounting.against_all(history) if own else history for history, _ in histories]
        epsilon = max(accounting.epsilon(history, budget.delta, budget.neighbours) for history in charged)
        return stated(epsilon, budget.delta, budget.neighbours)

    if not histories:
        return "nothing was charged yet"
    count = sum(records for _, records in histories)
    said = f"{count:,} rows charged, over all runs; the most charged has spent {most(own=False)}"
    if any(step[0] == OWN_SHARE for history, _ in histories for step in history):
        said += f", against the server and all other sites together {most(own=True)}"
    return said
