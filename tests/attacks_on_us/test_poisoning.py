"""Hostile but well-formed sites: what the bounds on share and norm and the robust rules stop, and what they do not.

Five sites hold about 1 in every entry; the poisoner wants 1000 there. What it gains is how far the result moves from 1.
"""

from __future__ import annotations

import math

import pytest
import torch
from flwr.app import ArrayRecord

from fedveil import rng, strategies
from fedveil.algebra.robust import HeldSums, sums_of
from fedveil.client_app.app import app
from fedveil.client_app.site import permits
from fedveil.config import AggregateConfig, CohortConfig, parse
from fedveil.contract.address import Address
from fedveil.contract.layout import Payload
from fedveil.contract.method import RoundContext, State, Upload
from fedveil.contract.spec import TensorSpec
from fedveil.contract.sums import Term, Terms
from fedveil.errors import ConfigError
from fedveil.federation.exchange import Exchange
from fedveil.federation.shares import bounded
from fedveil.privacy.dp_sgd import checked_claim
from fedveil.server_app.settings import RunSettings
from fedveil.server_app.strategy import MethodStrategy
from fedveil.strategies.fedavg import FedAvg
from fedveil.wire.envelope import Stamp, pack
from tests.attacks_on_us.test_one_site_ends_the_run import bytes_of, sent
from tests.server_app.grid import SHAPES, LocalGrid, use_toy_task

SPEC = {"w": TensorSpec((2, 3))}
HONEST = [0.9, 0.95, 1.0, 1.05]


def upload(value: float, examples: int = 10, site: str = "x") -> Upload:
    ctx = RoundContext(0, site, False, bytes(32))
    return Upload(Payload({"w": torch.full((2, 3), value)}), examples, ctx)


def gained(hostile: list[float], **how) -> float:
    """How far from 1 the hostile uploads move a round of the four honest ones."""
    return abs(result(hostile, **how) - 1)


def result(hostile: list[float], share: float = 1.0, rule: str = "mean", trim: float = 0.2, examples: int = 10):
    """Every entry of the new state."""
    uploads = [*(upload(v, site=f"h{v}") for v in HONEST), *(upload(v, examples, f"p{v}") for v in hostile)]
    kept = bounded(uploads, share, lambda site, counted: None)
    exchange = Exchange(FedAvg(), "fedavg", SPEC)
    after = exchange.aggregate(State({"w": torch.zeros(2, 3)}), kept, lambda: sums_of(rule, trim))
    assert len(after.tensors["w"].unique()) == 1
    return float(after.tensors["w"][0, 0])


def test_a_claim_of_many_rows_weighs_no_more_than_all_others_together():
    everything = gained([1000.0], share=1.0, examples=10**8)
    assert everything > 998
    assert gained([1000.0], share=0.5, examples=10**8) == pytest.approx(499.5, abs=0.1)
    # Not stopped: half of the weight is still half of the way, and two sites together have more than half.
    assert gained([1000.0, 1000.0], share=0.5, examples=10**8) > 900


def test_the_bound_passes_honest_rounds_on_in_their_order_and_holds_at_most_three():
    counts = [40, 32, 24, 7, 90, 1]
    alive: list[int] = []

    def uploads():
        for i, n in enumerate(counts):
            alive.append(i)
            yield upload(1.0, n, str(i))

    cut: dict[str, int] = {}
    order = []
    for found in bounded(uploads(), 0.5, cut.__setitem__):
        order.append(int(found.ctx.client))
        assert len(alive) - len(order) <= 2
    assert order == [0, 1, 2, 3, 4, 5]
    assert not cut


@pytest.mark.parametrize("counts", [[1000, 3, 4], [3, 1000, 4], [3, 4, 1000], [1000, 1], [5, 5, 11]])
@pytest.mark.parametrize("share", [0.5, 0.75])
def test_no_site_is_above_its_share_and_nobody_else_is_cut(counts, share):
    cut: dict[str, int] = {}
    found = {
        u.ctx.client: u.num_examples
        for u in bounded((upload(1.0, n, str(i)) for i, n in enumerate(counts)), share, cut.__setitem__)
    }
    assert len(found) == len(counts)
    assert max(found.values()) <= share * sum(found.values())
    heavy = str(counts.index(max(counts)))
    assert cut in ({}, {heavy: found[heavy]})
    assert all(found[str(i)] == n for i, n in enumerate(counts) if str(i) not in cut)


def test_a_site_alone_is_not_cut():
    assert [u.num_examples for u in bounded([upload(1.0, 7)], 0.5, lambda *_: pytest.fail("cut"))] == [7]


@pytest.mark.parametrize("rule", ["median", "trimmed"])
def test_one_poisoner_moves_a_robust_mean_no_further_than_an_honest_site_could(rule):
    assert gained([1000.0]) > 190
    assert gained([1000.0], rule=rule) <= 0.05
    assert gained([-1000.0], rule=rule) <= 0.1
    assert gained([1000.0], rule=rule, examples=10**8) <= 0.05  # claims do not count either


@pytest.mark.parametrize("rule", ["median", "trimmed"])
def test_what_robust_means_do_not_stop(rule):
    assert gained([1000.0] * 5, rule=rule) > 300  # a majority
    inside = [1.05] * 3  # a minority that stays within the honest range moves the result to its end
    assert result(inside, rule=rule) > result([], rule=rule) + 0.04


def test_two_poisoners_are_more_than_a_trim_of_one_in_five_takes_away():
    assert gained([1000.0, 1000.0], rule="trimmed") > 100
    assert gained([1000.0, 1000.0], rule="median") <= 0.1
    assert gained([1000.0, 1000.0], rule="trimmed", trim=0.34) <= 0.1


def test_robust_means_count_entry_by_entry_who_sent_it():
    sums = HeldSums(0.5)
    rows = [([1.0, 9.0, 0.0], [1, 1, 0]), ([2.0, 0.0, 0.0], [1, 0, 0]), ([1000.0, 0.0, 0.0], [1, 0, 0])]
    for i, (value, mask) in enumerate(rows):
        sums.add(str(i), 5, Terms([Term("w", torch.tensor(value), 1.0, torch.tensor(mask) == 1)]))
    assert sums.mean("w").tolist() == [2.0, 9.0, 0.0]
    assert sums.moved("w").tolist() == [True, True, False]
    assert (sums.weight("w"), sums.examples) == (3.0, 15)
    other = {"v": torch.ones(1)}
    assert sums.means(other)["v"] is other["v"]


@pytest.mark.parametrize("rule", ["median", "trimmed"])
@pytest.mark.parametrize("name", strategies.names())
def test_every_method_settles_robust_sums_and_equal_uploads_are_their_mean(name, rule, random_weights):
    from tests.contract.test_contract import as_upload, equal, one_turn, start

    method = strategies.create(name)
    exchange = Exchange(method, name, dict(method.adapter.example_spec()))
    server = start(exchange)
    _, _, up = one_turn(exchange, server)
    uploads = [as_upload(exchange, up, RoundContext(0, "abcd"[i], True, bytes(32))) for i in range(4)]
    robust = exchange.aggregate(server, uploads, lambda: sums_of(rule, 0.3))
    assert equal(robust.tensors, exchange.aggregate(server, uploads).tensors)


def test_a_robust_rule_is_refused_where_the_server_s_noise_is_made_for_a_mean():
    fields = 'mode = "paper"\nepsilon = 8.0'
    flat = {"method.name": "dp_fpl", "method.fields": fields, "aggregate.rule": "median"}
    with pytest.raises(ConfigError, match='aggregate.rule: expected "mean" with dp_fpl'):
        checked_claim(strategies.create("dp_fpl", fields), parse(flat), True)


@pytest.fixture
def rounds(tmp_path, monkeypatch):
    """Six rounds over the grid, in which east multiplies its upload by `factor` of the round.

    The sites let in any change of a broadcast: else they refuse to train from a model that was poisoned so.
    """
    task = use_toy_task(monkeypatch)

    def run(factor, **cohort) -> MethodStrategy:
        def poisoned(message, reply):
            order = message.content.config_records["order"]
            exchange = Exchange(FedAvg(), "fedavg", {n: TensorSpec(s) for n, s in SHAPES.items()})
            address = Address(order["run"], order["attempt"], "east")
            payload = exchange.receive(bytes_of(reply), order["round"], address).payload
            worse = Payload({n: v * factor(order["round"]) for n, v in payload.fields.items()})
            stamp = Stamp("fedavg", 1, order["round"], "up", address)
            return sent(message, pack(exchange.layout, stamp, worse, 4))

        config = {"run.deterministic": True, "run.seed": 9, "run.rounds": 6, "method.name": "fedavg"}
        grid = LocalGrid(app, ["north", "east", "south"], tmp_path / "state", config, tamper={"east": poisoned})
        policy = tmp_path / "policy.toml"
        policy.write_text(f"max-broadcast-change = 1e9\n{permits.needed(parse(grid.run_config))}")
        grid.node_config = {site: {"policy": str(policy)} for site in ("north", "east", "south")}
        quick = {"min_sites": 2, "deadline_seconds": 1.0, "wait_seconds": 1.0}
        settings = RunSettings(CohortConfig(**quick, **cohort), AggregateConfig(), 9, True)
        strategy = MethodStrategy(FedAvg(), settings)
        strategy.start(grid, ArrayRecord(dict(task.initial(rng.initial(9, "weights")))), num_rounds=6)
        return strategy

    return run


def norm(strategy: MethodStrategy) -> float:
    return math.hypot(*(float(w.norm()) for w in strategy.rounds.deployed().values()))


@pytest.mark.parametrize("when", [0, 3])
def test_an_upload_far_above_the_norms_of_its_round_is_refused(when, rounds):
    boosted = lambda round_: 1000.0 if round_ == when else 1.0  # noqa: E731
    without = norm(rounds(boosted))
    found = rounds(boosted, norm_factor=4.0)
    assert without > 50 * norm(found)
    refused = [(r.round, r.failed) for r in found.history if r.failed]
    assert [round_ for round_, _ in refused] == [when]
    assert "upload: expected a norm of at most" in refused[0][1]["east"]
    assert found.history[when].accepted == ["north", "south"]
    assert sorted(found.history[when].reports) == ["north", "south"]


def test_what_the_factor_does_not_stop(rounds):
    """Weights of the right norm that point the other way."""
    flipped = rounds(lambda round_: -1.0, norm_factor=4.0)
    assert not any(record.failed for record in flipped.history)
