"""Broadcasts under secure aggregation: methods that send one message to all sites, and the sites' starting weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fedveil import strategies
from fedveil.adapters import heterogeneous_ranks
from fedveil.config import parse
from fedveil.contract.entry_table import EntryTable
from fedveil.contract.layout import Payload
from fedveil.contract.method import FederatedState, RoundContext
from fedveil.errors import WireError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.wire.capture import MessageCapture
from fedveil.wire.header import message_digest
from tests.conftest import ToyTrainer
from tests.contract.test_contract import METHODS, SECRET, spec_for, start

RANKS = {"ranks": {"s00": 1, "s01": 2}}
OTHER_FORMS = [
    ("fedrand", {"downlink": "selected"}), ("fedrand", {"cold": "initial"}), ("fedsp", {"proxy": "shared"}),
    ("hetlora", RANKS), ("flora", RANKS), ("fedqsn", {"client_rate": 0.5}),
    ("fedqsn", {"client_rate": 0.5, "quantiser": "none"}),
]  # fmt: skip
CASES = [*((name, {}) for name in METHODS), *OTHER_FORMS]
BOUND = {"dp_fpl": 256.0, "fedex_lora": 4096.0, "flora": 4096.0}


def exchange_of(name: str, fields) -> MessageExchange:
    method = strategies.create_from_json(name, json.dumps(fields))
    return MessageExchange(method, name, spec_for(method))


def broadcasts(exchange: MessageExchange, sites: int, folder: Path, **changes) -> dict[int, list[str]]:
    """Run a federation whose sums are nearly exact and whose rounds have newcomers; return the broadcasts' digests."""
    config = {
        "secure.enabled": True, "secure.ring-bits": 64, "secure.clip-bound": BOUND.get(exchange.name, 16.0),
        "run.deterministic": True, "run.rounds": 4, "cohort.fraction": 0.5,
    } | changes  # fmt: skip
    trainer_for = lambda site, ctx: ToyTrainer(exchange.spec, 3, 0.25 * (1 + int(site[1:]) % 4))  # noqa: E731
    names = [f"s{i:02}" for i in range(sites)]
    run = InProcessFederation(exchange, parse(config), trainer_for, names, start(exchange))
    run.tap, found = MessageCapture(folder), dict[int, list[str]]()
    run.run()
    for seen in run.tap.messages():
        if seen.direction == "down":
            found.setdefault(seen.round, []).append(message_digest(run.tap.read(seen)))
    keeps = any(state is not None for _, state in run.private.items())
    assert exchange.method.has_bound_broadcast == (exchange.method.sends_same_broadcast and not keeps)
    return found


@pytest.mark.parametrize(("name", "fields"), CASES, ids=[f"{name}-{','.join(fields)}" for name, fields in CASES])
def test_a_method_says_whether_all_sites_of_a_round_get_one_message(name, fields, tmp_path):
    exchange = exchange_of(name, fields)
    rounds = broadcasts(exchange, 8, tmp_path, **({"cohort.fraction": 1.0} if name in ("fedper", "hetlora") else {}))
    assert [len(digests) > 2 for digests in rounds.values()] == [True] * 4
    if exchange.method.sends_same_broadcast:
        assert [len(set(digests)) for digests in rounds.values()] == [1] * 4


def test_forty_sites_of_fedqsn_get_one_message_a_round_and_another_in_the_next(tmp_path):
    rounds = broadcasts(exchange_of("fedqsn", {"client_rate": 0.5}), 40, tmp_path, **{"run.rounds": 2})
    assert [(len(digests), len(set(digests))) for digests in rounds.values()] == [(20, 1)] * 2
    assert set(rounds[0]).isdisjoint(rounds[1])


def ctx_of(exchange: MessageExchange, site: str, table: EntryTable | None = None) -> RoundContext:
    return RoundContext(0, site, False, bytes(32), True, entries=table, in_secure_sum=True)


def filled(exchange: MessageExchange) -> FederatedState:
    """A server's state whose every float is set, so that a missing rank shows."""
    state = start(exchange)
    tensors = {
        name: torch.arange(1.0, w.numel() + 1).view(w.shape) / w.numel() if w.is_floating_point() else w
        for name, w in state.tensors.items()
    }
    return FederatedState(tensors, state.scalars)


def test_a_site_of_hetlora_trains_its_own_ranks_of_the_common_message():
    exchange = exchange_of("hetlora", RANKS)
    method, names = exchange.method, [f"s{i:02}" for i in range(6)]
    table = method.plan_entries(exchange.spec, names, 3, RoundContext(0, "", False, SECRET))
    server = filled(exchange)
    for site, rank in (("s00", 1), ("s01", 2), ("s02", method.adapter.rank)):
        down = method.broadcast(server, ctx_of(exchange, site, table))
        assert heterogeneous_ranks.rank_of_upload(down) == method.adapter.rank
        trainer = ToyTrainer(exchange.spec, 3, 0.0)  # ends where it starts
        _, up = method.client(None, down, trainer, ctx_of(exchange, site, table))
        own = heterogeneous_ranks.cut_to_rank(server.tensors, rank)
        assert all(torch.equal(up.fields[name], own[name]) for name in own)
        smaller = Payload(heterogeneous_ranks.cut_to_rank(down.fields, 1), down.variant)
        with pytest.raises(WireError, match=f"expected rank {method.adapter.rank}"):
            method.client(None, smaller, trainer, ctx_of(exchange, site, table))


def test_the_common_message_of_hetlora_has_no_rank_that_too_few_sites_train():
    exchange = exchange_of("hetlora", {"ranks": dict.fromkeys(("s00", "s01", "s02", "s03"), 2)})
    table = exchange.method.plan_entries(
        exchange.spec, [f"s{i:02}" for i in range(5)], 3, RoundContext(0, "", False, SECRET)
    )
    down = exchange.method.broadcast(filled(exchange), ctx_of(exchange, "s04", table))
    assert heterogeneous_ranks.rank_of_upload(down) == 2


@pytest.mark.parametrize("name", ["fedex_lora", "flora"])
def test_what_a_site_keeps_of_a_residual_moves_nothing_in_a_secure_sum(name):
    """And a server that sends it a change alone is refused."""
    exchange, trainer = exchange_of(name, {}), lambda: ToyTrainer(spec, 3, 0.25)
    method, spec, server = exchange.method, exchange.spec, filled(exchange)
    other = FederatedState({n: torch.full(t.shape, 7.0) for n, t in spec.items() if n.endswith(".residual")})
    ctx = ctx_of(exchange, "s00")
    holder = FederatedState(
        server.tensors | {"step.known": torch.tensor(1)}, {**server.scalars, "holders": ["s00", "s01"]}
    )
    whole = method.broadcast(holder, ctx)
    assert whole.variant == "whole"
    turns = [method.client(private, whole, trainer(), ctx) for private in (None, other)]
    assert [private for private, _ in turns] == [None, None]
    first, second = (up.fields for _, up in turns)
    assert all(torch.equal(first[n], second[n]) for n in first)
    step = method.broadcast(holder, RoundContext(0, "s00", False, bytes(32), True))
    assert step.variant == "step"
    with pytest.raises(WireError, match="variant: secure aggregation requires the whole residual"):
        method.client(other, step, trainer(), ctx)
