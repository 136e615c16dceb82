"""The federation in one process: what it says of itself."""

from __future__ import annotations

from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.strategies.fedper import FedPer
from tests.contract import test_contract as contract


def test_the_last_cohort_is_whom_the_last_round_asked():
    exchange = MessageExchange(FedPer(), "fedper", contract.spec_for(FedPer()))
    whole = contract.federation(exchange, sites=("a", "b", "c", "d"))
    asked: dict[int, list[str]] = {}

    def trainer_for(site, ctx):
        asked.setdefault(ctx.round, []).append(site)
        return whole.trainer_for(site, ctx)

    run = InProcessFederation(exchange, whole.config, trainer_for, whole.sites, whole.server)
    run.run()
    assert run.last_cohort == asked[max(asked)]
    assert set(run.last_cohort) < run.participated
