"""Hostile but well-formed sites: what the bounds on share and norm and the robust rules stop, and what they do not.

Five sites hold about 1 in every entry; the poisoner wants 1000 there. What it gains is how far the result moves from 1.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord

from fedveil import rng, strategies
from fedveil.client_app.app import app
from fedveil.client_app.policy import run_config_rules
from fedveil.config import AggregateConfig, CohortConfig, parse
from fedveil.contract.contributions import ClientContributions, Contribution
from fedveil.contract.layout import Payload
from fedveil.contract.message_address import MessageAddress
from fedveil.contract.method import AcceptedUpload, FederatedState, RoundContext
from fedveil.contract.param_spec import ParamSpec
from fedveil.errors import ConfigError, QuorumError
from fedveil.federation.aggregation_rules import bound_weights, check_rule, make_aggregator
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.ops.robust_means import RobustAggregator
from fedveil.privacy.guarantee_source import check_guarantee
from fedveil.records import disclosure_ledger
from fedveil.server_app.flower_strategy import MethodStrategy
from fedveil.server_app.run_folder import RunFolder
from fedveil.server_app.run_settings import RunSettings
from fedveil.strategies.fedavg import FedAvg
from fedveil.wire.envelope import EnvelopeStamp, pack_message
from tests.attacks_on_us.test_one_site_ends_the_run import bytes_of, sent
from tests.conftest import ToyTrainer
from tests.server_app.grid import SHAPES, LocalGrid, use_toy_task

SPEC = {"w": ParamSpec((2, 3))}
HONEST = [0.9, 0.95, 1.0, 1.05]


def upload(value: float, examples: int = 10, site: str = "x") -> AcceptedUpload:
    ctx = RoundContext(0, site, False, bytes(32))
    return AcceptedUpload(Payload({"w": torch.full((2, 3), value)}), examples, ctx)


def gained(hostile: list[float], /, **how) -> float:
    """How far from 1 the hostile uploads move a round of the four honest ones."""
    return abs(result(hostile, **how) - 1)


def result(hostile: list[float], /, share: float = 1.0, examples: int = 10, **aggregate):
    """Every entry of the new state."""
    uploads = [
        *(upload(v, site=f"h{v}") for v in HONEST),
        *(upload(v, examples, f"p{i}") for i, v in enumerate(hostile)),
    ]
    bounded_uploads = bound_weights(uploads, share, lambda site, counted: None)
    exchange = MessageExchange(FedAvg(), "fedavg", SPEC)
    after = exchange.aggregate(
        FederatedState({"w": torch.zeros(2, 3)}), bounded_uploads, lambda: make_aggregator(AggregateConfig(**aggregate))
    )
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
    for bounded_upload in bound_weights(uploads(), 0.5, cut.__setitem__):
        order.append(int(bounded_upload.ctx.client))
        assert len(alive) - len(order) <= 2
    assert order == [0, 1, 2, 3, 4, 5]
    assert not cut


@pytest.mark.parametrize("counts", [[1000, 3, 4], [3, 1000, 4], [3, 4, 1000], [1000, 1], [5, 5, 11]])
@pytest.mark.parametrize("share", [0.5, 0.75])
def test_no_site_is_above_its_share_and_nobody_else_is_cut(counts, share):
    cut: dict[str, int] = {}
    examples_by_client = {
        u.ctx.client: u.num_examples
        for u in bound_weights((upload(1.0, n, str(i)) for i, n in enumerate(counts)), share, cut.__setitem__)
    }
    assert len(examples_by_client) == len(counts)
    assert max(examples_by_client.values()) <= share * sum(examples_by_client.values())
    heavy = str(counts.index(max(counts)))
    assert cut in ({}, {heavy: examples_by_client[heavy]})
    assert all(examples_by_client[str(i)] == n for i, n in enumerate(counts) if str(i) not in cut)


def test_a_site_alone_is_not_cut():
    assert [u.num_examples for u in bound_weights([upload(1.0, 7)], 0.5, lambda *_: pytest.fail("cut"))] == [7]


@pytest.mark.parametrize("rule", ["median", "trimmed", "multi-krum"])
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
    assert gained([1000.0, 1000.0], rule="trimmed", trim_fraction=0.34) <= 0.1


def test_multi_krum_leaves_out_colluders_that_agree_and_fails_with_one_more_than_it_is_told():
    """A majority of the nearest is honest as long as hostile uploads are at most f."""
    pair = [1000.0, 1000.0]
    assert gained([*pair, 1.0], rule="multi-krum", num_byzantine=2) <= 0.05
    assert gained([*pair, 1.0], rule="trimmed") > 100
    assert gained([*pair, 1000.0], rule="multi-krum", num_byzantine=2) <= 0.05  # one more than told, and still too few
    assert gained([1000.0] * 5, rule="multi-krum", num_byzantine=2) > 300  # a majority


def test_multi_krum_does_not_stop_a_poisoner_that_puts_its_whole_distance_into_one_entry():
    """The honest uploads differ a little in each of 10,000 entries, and so are far from one another over all."""
    generator = torch.Generator().manual_seed(161803)
    honest = [1 + 0.05 * torch.randn(10_000, generator=generator) for _ in range(4)]
    hostile = torch.stack(honest).mean(0)
    hostile[0] += 5.0

    def of(rule: str) -> float:
        sums = make_aggregator(AggregateConfig(rule=rule))
        for i, value in enumerate([*honest, hostile]):
            sums.add("abcde"[i], 10, ClientContributions([Contribution("w", value, 10.0)]))
        return float(sums.mean("w")[0])

    assert of("multi-krum") > 3.0  # 2 of 5 are averaged, and it is one of them
    assert abs(of("median") - 1) < 0.1
    assert abs(of("trimmed") - 1) < 0.1


def test_robust_means_count_entry_by_entry_who_sent_it():
    sums = RobustAggregator(0.5)
    rows = [([1.0, 9.0, 0.0], [1, 1, 0]), ([2.0, 0.0, 0.0], [1, 0, 0]), ([1000.0, 0.0, 0.0], [1, 0, 0])]
    for i, (value, mask) in enumerate(rows):
        sums.add(str(i), 5, ClientContributions([Contribution("w", torch.tensor(value), 1.0, torch.tensor(mask) == 1)]))
    assert sums.mean("w").tolist() == [2.0, 9.0, 0.0]
    assert sums.moved("w").tolist() == [True, True, False]
    assert (sums.weight("w"), sums.examples) == (3.0, 15)
    other = {"v": torch.ones(1)}
    assert sums.means(other)["v"] is other["v"]


WITHOUT_COMMON_ENTRIES = {"fedper", "fedqsn", "fedrand", "random_binary", "rolora"}


@pytest.mark.parametrize("rule", ["median", "trimmed", "multi-krum"])
@pytest.mark.parametrize("name", strategies.list_methods())
def test_every_method_settles_robust_sums_and_equal_uploads_are_their_mean(name, rule, random_weights):
    from tests.contract.test_contract import as_upload, equal, one_turn, start

    method = strategies.create_method(name)
    exchange = MessageExchange(method, name, dict(method.adapter.example_spec()))
    aggregate = AggregateConfig(rule=rule, trim_fraction=0.4)
    if rule == "multi-krum" and name in WITHOUT_COMMON_ENTRIES:
        with pytest.raises(ConfigError, match=f"aggregate.rule: expected .* found {name}, which has .*; choose"):
            check_rule(exchange, aggregate)
        return
    check_rule(exchange, aggregate)
    server = start(exchange)
    _, _, up = one_turn(exchange, server)
    uploads = [as_upload(exchange, up, RoundContext(0, "abcdef"[i], True, bytes(32))) for i in range(6)]
    robust = exchange.aggregate(server, uploads, lambda: make_aggregator(aggregate))
    assert equal(robust.tensors, exchange.aggregate(server, uploads).tensors)


def test_a_robust_rule_is_refused_where_the_server_s_noise_is_made_for_a_mean():
    fields = 'mode = "paper"\nepsilon = 8.0'
    flat = {"method.name": "dp_fpl", "method.params": fields, "aggregate.rule": "median"}
    with pytest.raises(ConfigError, match='aggregate.rule: expected "mean" with dp_fpl'):
        check_guarantee(strategies.create_method("dp_fpl", fields), parse(flat), True)


@pytest.fixture
def rounds(tmp_path, monkeypatch):
    """Six rounds over the grid, in which east multiplies its upload by `factor` of the round.

    The sites let in any change of a broadcast: else they refuse to train from a model that was poisoned so.
    """
    names = ["north", "east", "south", "west", "centre"]
    task = use_toy_task(monkeypatch)

    def run(factor, sites: int = 3, aggregate: AggregateConfig = AggregateConfig(), folder=None, **cohort):
        def poisoned(message, reply):
            order = message.content.config_records["order"]
            exchange = MessageExchange(FedAvg(), "fedavg", {n: ParamSpec(s) for n, s in SHAPES.items()})
            address = MessageAddress(order["run"], order["attempt"], "east")
            payload = exchange.receive(bytes_of(reply), order["round"], address).payload
            worse = Payload({n: v * factor(order["round"]) for n, v in payload.fields.items()})
            stamp = EnvelopeStamp("fedavg", 1, order["round"], "up", address)
            return sent(message, pack_message(exchange.layout, stamp, worse, 4))

        config = {"run.deterministic": True, "run.seed": 9, "run.rounds": 6, "method.name": "fedavg"}
        grid = LocalGrid(app, names[:sites], tmp_path / "state", config, tamper={"east": poisoned})
        policy = tmp_path / "policy.toml"
        bounds = "max-broadcast-change = 1e9\nmax-broadcast-drift = 1e9\n"
        policy.write_text(f"{bounds}{run_config_rules.permits_for_run(parse(grid.run_config))}")
        grid.node_config = {site: {"policy": str(policy)} for site in names[:sites]}
        quick = {"min_sites": 2, "deadline_seconds": 1.0, "wait_seconds": 1.0} | cohort
        settings = RunSettings(CohortConfig(**quick), aggregate, 9, True, tap=folder is not None)
        strategy = MethodStrategy(FedAvg(), settings, folder=folder)
        strategy.start(grid, ArrayRecord(dict(task.initial(rng.initial_stream(9, "weights")))), num_rounds=6)
        return strategy

    return run


def norm(strategy: MethodStrategy) -> float:
    return math.hypot(*(float(w.norm()) for w in strategy.rounds.models().values()))


@pytest.mark.long
@pytest.mark.parametrize("when", [0, 3])
def test_an_upload_far_above_the_norms_of_its_round_is_refused(when, rounds):
    boosted = lambda round_: 1000.0 if round_ == when else 1.0  # noqa: E731
    without = norm(rounds(boosted))
    strategy = rounds(boosted, max_norm_ratio=4.0)
    assert without > 50 * norm(strategy)
    refused = [(r.round, r.failed) for r in strategy.history if r.failed]
    assert [round_ for round_, _ in refused] == [when]
    assert "upload: its norm of" in refused[0][1]["east"]
    assert strategy.history[when].accepted == ["north", "south"]
    assert sorted(strategy.history[when].reports) == ["north", "south"]


@pytest.mark.long
def test_no_record_says_accepted_of_an_upload_that_the_factor_refused(rounds, tmp_path):
    folder = RunFolder(tmp_path / "runs" / "r")
    rounds(lambda round_: 1000.0 if round_ == 2 else 1.0, folder=folder, max_norm_ratio=4.0)
    lines = [json.loads(line) for line in (tmp_path / "runs" / "audit-log.jsonl").read_text().splitlines()]
    events = {(line["site"], line["event"]): line for line in lines if line.get("round") == 2}
    assert sorted(events) == sorted(
        [*((site, "sent") for site in ("east", "north", "south")), ("east", "failed"),
         ("north", "accepted"), ("south", "accepted")]
    )  # fmt: skip
    refused = events["east", "failed"]
    assert "upload: its norm of" in refused["reason"]
    assert refused["up_bytes"] > 0
    seen = [m for m in folder.tap().messages() if m.direction == "up"]
    assert {(m.round, m.site) for m in seen if not m.accepted} == {(2, "east")}
    assert len(seen) == 18
    messages = disclosure_ledger.read_messages(folder.folder / "disclosure.jsonl")
    assert {(m["round"], m["site"]) for m in messages if m["direction"] == "up"} == {
        (m.round, m.site) for m in seen if m.accepted
    }


@pytest.mark.long
def test_what_the_factor_does_not_stop(rounds):
    """Weights of the right norm that point the other way."""
    flipped = rounds(lambda round_: -1.0, max_norm_ratio=4.0)
    assert not any(record.failed for record in flipped.history)


KRUM = AggregateConfig(rule="multi-krum")


@pytest.mark.long
def test_multi_krum_over_the_grid_leaves_the_poisoner_out_and_the_record_says_so(rounds):
    strategy = rounds(lambda round_: -1.0 if round_ else 1.0, sites=5, aggregate=KRUM, min_sites=5)
    assert all("east" in record.left_out and "east" in record.accepted for record in strategy.history[1:])
    assert all(len(record.left_out) == 3 for record in strategy.history)
    assert rounds(lambda round_: -1.0, sites=5).history[0].left_out == []


def test_a_cohort_too_small_for_multi_krum_is_refused_before_anybody_trains(rounds, tmp_path):
    """At the start of the run by its settings, and in a round by the sites that are there."""
    with pytest.raises(
        ConfigError, match=r"cohort.min-sites: expected at least 5 .*num-byzantine = 1, found 2; raise it"
    ):
        rounds(lambda round_: 1.0, sites=5, aggregate=KRUM)
    with pytest.raises(ConfigError, match=r"cohort.fraction of cohort.sites: expected at least 5 .* found 4; raise it"):
        rounds(lambda round_: 1.0, sites=5, aggregate=KRUM, min_sites=5, fraction=0.8)
    with pytest.raises(ConfigError, match=r"at least 6 .*num-byzantine = 1 and aggregate.num-selected = 3, found 5"):
        rounds(lambda round_: 1.0, sites=5, aggregate=KRUM.model_copy(update={"num_selected": 3}), min_sites=5)
    assert not (tmp_path / "state").exists()  # no site was asked


def test_a_round_whose_cohort_has_become_too_small_for_multi_krum_is_refused_before_anybody_trains(
    monkeypatch, tmp_path
):
    task = use_toy_task(monkeypatch)
    cohort = CohortConfig(min_sites=5, fraction=0.7, sites=8, wait_seconds=0.1)
    strategy = MethodStrategy(FedAvg(), RunSettings(cohort, KRUM))
    strategy.rounds.initialise(task.initial(rng.initial_stream(9, "weights")))
    begin = lambda names: strategy.rounds.open_attempt(LocalGrid(app, names, tmp_path), 1, 0, 1.0, ConfigRecord())  # noqa: E731
    assert len(begin([f"site{i}" for i in range(6)])[1]) == 5
    with pytest.raises(
        QuorumError, match=r"6 sites must connect within .* but only 5 did .*lower aggregate.num-byzantine"
    ):
        begin([f"site{i}" for i in range(5)])


def test_in_one_process_too_few_sites_for_multi_krum_are_refused():
    exchange = MessageExchange(FedAvg(), "fedavg", SPEC)
    start = FederatedState({"w": torch.zeros(2, 3)})
    make = lambda *sites: InProcessFederation(  # noqa: E731
        exchange, parse({"aggregate.rule": "multi-krum"}), lambda site, ctx: ToyTrainer(SPEC), list(sites), start
    )
    with pytest.raises(ConfigError, match="sites in a cohort: expected at least 5 .*found 4"):
        make(*"abcd")
    assert len(make(*"abcde").run().tensors["w"].unique()) > 0
