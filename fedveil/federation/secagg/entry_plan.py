"""Plan the entries that each site sends in a round's secure sum (fedveil/contract/entry_table.py).

| a method whose sites ... | in a round |
|---|---|
| all send every entry | has no table; a site refuses to leave out an entry |
| send different entries, which the server can draw (`Method.plans_entries`) | has a table |
| draw entries themselves (`Method.has_single_site_entries`) | has no table: some entries may come from a single site |
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from fedveil.config import SecureConfig
from fedveil.contract.entry_table import EntryTable, fewest_senders
from fedveil.federation.secagg.plan import quorum_of

if TYPE_CHECKING:  # these import torch, which a site's client process must not load
    from fedveil.contract.method import Method, RoundContext
    from fedveil.federation.exchange import MessageExchange


def plan_entries(
    exchange: MessageExchange, secure: SecureConfig, cohort: Collection[str], ctx: RoundContext
) -> EntryTable | None:
    """Draw a round's table with the server's context; None if the method needs none, or the cohort is too small.

    Raises:
        PolicyError: a site would refuse the table that the method draws.
    """
    if not exchange.method.plans_entries or len(cohort) < secure.min_sites:
        return None
    quorum = required_uploads(secure, len(cohort))
    fewest = fewest_senders(len(cohort), secure.min_sites, quorum)
    table = exchange.method.plan_entries(exchange.spec, sorted(cohort), fewest, ctx)
    table.require_cohort(cohort, secure.min_sites, quorum, secure.max_colluders)
    return table


def required_uploads(secure: SecureConfig, sites: int) -> int:
    """Return how many of a cohort's sites a sum needs: q, or all sites if only whole-cohort sums can be revealed."""
    return sites if secure.whole_cohort else quorum_of(secure.threshold, sites, secure.max_colluders)


def names_to_send(method: Method, table: EntryTable | None, site: str, names: Collection[str]) -> frozenset[str] | None:
    """Return the vector names that a site must send; None if the site draws them itself."""
    if method.has_single_site_entries:
        return None
    planned = table.names_of(site) if table else None
    return frozenset(names) if planned is None else planned
