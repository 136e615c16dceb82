"""Every method under secure aggregation: each entry of a sum is of none or of at least `secure.min-sites` sites.

The tests look at every upload before it is masked, and count who sent which entry. As many sites may be silent as a sum
can do without, and any of them: an entry that c sites sent may be of c minus that number.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch

from fedveil import strategies
from fedveil.adapters.heterogeneous_ranks import HeterogeneousRankMethod
from fedveil.config import SecureConfig, parse
from fedveil.contract.codec import QuantizedTensor
from fedveil.contract.entry_table import EntryTable
from fedveil.contract.method import RoundContext
from fedveil.errors import ConfigError, PolicyError, QuorumError, WireError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.federation.secagg import plan_checks
from fedveil.federation.secagg.entry_plan import plan_entries
from fedveil.federation.secagg.flatten import VectorLayout
from fedveil.federation.secagg.plan import quorum_of
from tests.conftest import ToyTrainer
from tests.contract.test_contract import METHODS, SECRET, one_turn, spec_for, start

LEAST = 3
OWN_DRAWS = ("random_binary",)
RANKS = {"ranks": {"s00": 1, "s01": 2}}
PLANNED = [  # up to 10 sites
    *(("fedrand", fields, sites) for sites in (3, 5, 10) for fields in ({}, {"downlink": "selected"})),
    ("fedrand", {"rho": 1.0}, 3),
    *(("fedqsn", {"client_rate": 0.5, "mask_targets": "all"}, sites) for sites in (3, 10)),
    ("fedqsn", {"client_rate": 0.0, "server_rate": 0.4}, 5),
    *((name, RANKS, 8) for name in ("hetlora", "flora")),
]
LARGE = [
    ("fedrand", {}),
    ("fedrand", {"rho": 0.1}),
    ("fedqsn", {"client_rate": 0.5, "mask_targets": "all"}),
    ("fedqsn", {"client_rate": 0.5, "exact": True}),
    *((name, {"ranks": {"s00": 1} | {f"s{i:02}": 2 for i in range(1, 15)}}) for name in ("hetlora", "flora")),
]  # nine sites have rank 8, and ten must send a rank


def exchange_of(name: str, fields) -> MessageExchange:
    method = strategies.create_from_json(name, json.dumps(fields))
    return MessageExchange(method, name, spec_for(method))


def names(count: int) -> list[str]:
    return [f"s{i:02}" for i in range(count)]


def secure_federation(exchange: MessageExchange, sites: int, **changes) -> InProcessFederation:
    bound = {"dp_fpl": 256.0, "fedex_lora": 4096.0, "flora": 4096.0}.get(exchange.name, 16.0)
    config = {
        "secure.enabled": True, "secure.clip-bound": bound, "run.deterministic": True, "run.rounds": 3,
    } | changes  # fmt: skip
    trainer_for = lambda site, ctx: ToyTrainer(exchange.spec, 3, 0.25 * (1 + int(site[1:])))  # noqa: E731
    return InProcessFederation(exchange, parse(config), trainer_for, names(sites), start(exchange))


def entries_of(exchange: MessageExchange, payload, round_: int) -> dict[str, torch.Tensor]:
    """The entries that an upload has, by name; of a product of factors, those of the factors."""
    terms = exchange.method.contributions(payload, 1, exchange.spec, RoundContext(round_, "", False, b"")).tensors
    sent = {t.name: torch.ones(t.value.shape, dtype=torch.bool) if t.mask is None else t.mask.clone() for t in terms}
    if isinstance(exchange.method, HeterogeneousRankMethod):
        for name, value in payload.fields.items():
            shape = (value.codes if isinstance(value, QuantizedTensor) else value).shape
            sent[name] = torch.zeros(exchange.spec[name].shape, dtype=torch.bool)
            sent[name][: shape[0], : shape[1]] = True
    return sent


def counts(uploads: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """How many of the uploads have each entry."""
    found: dict[str, torch.Tensor] = {}
    for upload in uploads:
        for name, sent in upload.items():
            found[name] = found.get(name, torch.zeros(sent.shape, dtype=torch.int64)) + sent
    return found


def exposed(uploads: list[dict[str, torch.Tensor]], least: int = LEAST) -> list[str]:
    """Names with an entry that, for some silent sites, 1 to `least` - 1 sites of the sum sent."""
    silent = len(uploads) - max(least, quorum_of(0, len(uploads), 1))
    return sorted(name for name, n in counts(uploads).items() if bool(((n > 0) & (n < least + silent)).any()))


def exposed_by_search(uploads: list[dict[str, torch.Tensor]], least: int = LEAST) -> list[str]:
    """The same by trying every set of silent sites."""
    most = len(uploads) - max(least, quorum_of(0, len(uploads), 1))
    found = set()
    for kept in itertools.chain(*(itertools.combinations(uploads, len(uploads) - k) for k in range(most + 1))):
        found |= {name for name, n in counts(list(kept)).items() if bool(((n > 0) & (n < least)).any())}
    return sorted(found)


def spied(run: InProcessFederation, monkeypatch) -> list[list[dict[str, torch.Tensor]]]:
    """Run all rounds; what each site of each round sent."""
    rounds: list[list[dict[str, torch.Tensor]]] = [[] for _ in range(run.config.run.rounds)]
    vector = VectorLayout.vector

    def spy(slots, exchange, payload, examples, round_, ring, names=None):
        rounds[round_].append(entries_of(exchange, payload, round_))
        return vector(slots, exchange, payload, examples, round_, ring, names)

    with monkeypatch.context() as patch:
        patch.setattr(VectorLayout, "vector", spy)
        run.run()
    assert all(len(uploads) == len(run.sites) for uploads in rounds)
    return rounds


def sent(
    exchange: MessageExchange, sites: int, round_: int = 0, table: EntryTable | None = None
) -> list[dict[str, torch.Tensor]]:
    """What sites send before it is masked; without a table what they draw for themselves, as in the clear."""
    server, uploads = start(exchange), []
    for i, site in enumerate(names(sites)):
        down = exchange.method.broadcast(server, RoundContext(round_, site, True, SECRET, True, entries=table))
        ctx = RoundContext(round_, site, True, bytes([i + 1]) * 32, True, entries=table)
        _, up = exchange.method.client(None, down, ToyTrainer(exchange.spec), ctx)
        uploads.append(entries_of(exchange, up, round_))
    return uploads


def table_of(exchange: MessageExchange, sites: int, round_: int = 0, secret: bytes = SECRET) -> EntryTable:
    ctx = RoundContext(round_, "", False, secret, True)
    table = plan_entries(exchange, SecureConfig(enabled=True), names(sites), ctx)
    assert table is not None
    return table


@pytest.mark.parametrize("name", METHODS)
def test_each_entry_of_a_sum_is_of_enough_sites_or_the_method_says_so(name, monkeypatch):
    run = secure_federation(exchange_of(name, {}), 5)
    rounds = spied(run, monkeypatch)
    assert run.exchange.method.has_single_site_entries == (name in OWN_DRAWS)
    for uploads in rounds:
        assert exposed(uploads) == exposed_by_search(uploads)
        assert bool(exposed(uploads)) == (name in OWN_DRAWS)


@pytest.mark.long
@pytest.mark.parametrize(("name", "fields", "sites"), PLANNED)
def test_each_entry_of_a_planned_sum_is_of_enough_sites(name, fields, sites, monkeypatch):
    run = secure_federation(exchange_of(name, fields), sites)
    rounds = spied(run, monkeypatch)
    assert not run.exchange.method.has_single_site_entries
    assert [exposed(uploads) for uploads in rounds] == [[]] * 3
    assert any(bool(n.any()) for uploads in rounds for n in counts(uploads).values())


@pytest.mark.parametrize(
    ("name", "fields", "sites"),
    [
        ("fedrand", {}, 3), ("fedrand", {}, 5),
        ("fedqsn", {"client_rate": 0.5}, 3), ("fedqsn", {"client_rate": 0.5}, 10),
        ("hetlora", {"ranks": {"s00": 1, "s01": 1}}, 3), ("flora", {"ranks": {"s00": 1, "s01": 1}}, 3),
        ("random_binary", {}, 3),
    ],
)  # fmt: skip
def test_without_a_plan_some_entries_are_of_too_few_sites(name, fields, sites):
    """What the rule is for, and that this search finds it."""
    exchange = exchange_of(name, fields)
    assert any(exposed(sent(exchange, sites, round_)) for round_ in range(8))


@pytest.mark.long
@pytest.mark.parametrize(("name", "fields"), LARGE)
def test_each_entry_of_a_large_planned_cohort_is_of_enough_sites(name, fields):
    """24 sites, of which seven may be silent."""
    exchange = exchange_of(name, fields)
    for round_ in range(2):
        uploads = sent(exchange, 24, round_, table_of(exchange, 24, round_))
        assert exposed(uploads) == []
        kinds = len({tuple(sorted((n, t.numpy().tobytes()) for n, t in u.items())) for u in uploads})
        assert (kinds == 1) == (name == "fedqsn")  # whose sites all have one mask
    if (name, fields) != ("fedrand", {}):  # whose draws seldom leave a factor to so few of 24
        assert exposed(sent(exchange, 24)) != []  # the entries that sites would send without the table


def factors(table: EntryTable, sites: int) -> list[str]:
    """Which factor each site sends."""
    sides = []
    for site in names(sites):
        (side,) = {name[-1] for name in table.names_of(site)}
        sides.append(side)
    return sides


def test_sites_of_a_large_cohort_send_both_factors_and_of_a_small_one_the_same():
    for sites, kinds in ((3, 1), (11, 1), (12, 2), (24, 2)):  # 12 sites: 6 for each factor
        drawn = [factors(table_of(exchange_of("fedrand", {}), sites, round_), sites) for round_ in range(12)]
        assert {len(set(of_round)) for of_round in drawn} == {kinds}
        assert {side for of_round in drawn for side in of_round} == set("AB")  # over the rounds both factors move


@pytest.mark.parametrize("secret", [bytes([i]) * 32 for i in range(8)])
def test_two_rounds_of_a_small_cohort_send_each_factor_once_in_an_order_of_their_own(secret):
    """Else two draws of A would leave B, and so the server's model, untrained."""
    exchange = exchange_of("fedrand", {})
    drawn = [factors(table_of(exchange, 3, round_, secret), 3)[0] for round_ in range(64)]
    pairs = list(zip(drawn[::2], drawn[1::2], strict=True))
    assert set(pairs) == {("A", "B"), ("B", "A")}
    assert 6 <= pairs.count(("A", "B")) <= 26
    other = [factors(table_of(exchange, 3, round_, secret[:-1] + b"x"), 3)[0] for round_ in range(64)]
    assert other != drawn
    assert [factors(table_of(exchange_of("fedrand", {}), 3, r, secret), 3)[0] for r in (33, 32)] == drawn[33:31:-1]


@pytest.mark.parametrize(("rho", "least", "most"), [(0.0, 0, 0), (0.2, 0, 1), (0.5, 1, 1), (0.7, 1, 2), (1.0, 2, 2)])
def test_two_rounds_of_a_small_cohort_keep_to_rho(rho, least, most):
    exchange = exchange_of("fedrand", {"rho": rho})
    drawn = [factors(table_of(exchange, 3, round_), 3)[0] for round_ in range(400)]
    of_pairs = [pair.count("A") for pair in zip(drawn[::2], drawn[1::2], strict=True)]
    assert (min(of_pairs), max(of_pairs)) == (least, most)
    for place in (0, 1):  # each round sends A with probability rho: 200 draws, 4 standard deviations
        assert abs(drawn[place::2].count("A") - 200 * rho) <= 4 * (200 * rho * (1 - rho)) ** 0.5


def test_two_secure_rounds_at_three_sites_train_both_factors():
    for seed in range(4):
        run = secure_federation(exchange_of("fedrand", {}), 3, **{"run.seed": seed, "run.rounds": 2})
        before = run.models()["server"]
        run.run()
        after = run.models()["server"]
        assert {name[-1] for name in after if not torch.equal(after[name], before[name])} == {"A", "B"}


def test_the_server_draws_as_often_as_rho_says():
    exchange = exchange_of("fedrand", {"rho": 0.6})
    drawn = [factors(table_of(exchange, 60, round_), 60).count("A") for round_ in range(40)]
    assert max(drawn) <= 38  # B needs 22 of 60 senders
    assert min(drawn) >= 22
    assert 34 < sum(drawn) / len(drawn) < 37
    few = [factors(table_of(exchange, 3, round_), 3)[0] for round_ in range(100)]
    assert 45 < few.count("A") < 75


def test_the_same_round_and_cohort_have_the_same_table_and_another_round_or_secret_another():
    exchange = exchange_of("fedrand", {})
    drawn = ((0, SECRET), (0, SECRET), (1, SECRET), (0, SECRET[::-1]))
    tables = [table_of(exchange, 40, round_, secret) for round_, secret in drawn]
    assert tables[0] == tables[1]
    assert len({table.digest for table in tables}) == 3


def ctx_of(table: EntryTable | None, site: str = "s00", round_: int = 0) -> RoundContext:
    return RoundContext(round_, site, True, bytes(32), True, entries=table)


def planned_turn(exchange: MessageExchange, at_server: EntryTable | None, at_site: EntryTable | None):
    down = exchange.method.broadcast(start(exchange), ctx_of(at_server))
    return exchange.method.client(None, down, ToyTrainer(exchange.spec), ctx_of(at_site))


def test_a_site_refuses_a_table_that_gives_it_both_factors_or_a_part_of_one():
    exchange, sites = exchange_of("fedrand", {}), tuple(names(3))
    one = table_of(exchange, 3)
    planned_turn(exchange, one, one)
    for blocks in (
        dict.fromkeys(exchange.spec, sites),
        {min(exchange.spec): sites},
        dict.fromkeys(exchange.spec, sites[1:]),
    ):
        with pytest.raises(WireError, match="the same factor, A or B, in every layer"):
            planned_turn(exchange, one, EntryTable(blocks=blocks, fewest=2))


def test_a_site_refuses_another_factor_than_the_tables():
    exchange, sites = exchange_of("fedrand", {"downlink": "selected"}), tuple(names(3))
    tables = {
        side: EntryTable(blocks={n: sites if n.endswith(side) else () for n in exchange.spec}, fewest=3)
        for side in "AB"
    }
    server = start(exchange)
    down = exchange.method.broadcast(server, replace(ctx_of(tables["A"]), is_new=False))
    assert down.variant == "A"
    _, private, _ = one_turn(exchange, server, "s00")
    with pytest.raises(WireError, match="variant: the table of entries assigns B to this site"):
        exchange.method.client(private, down, ToyTrainer(exchange.spec), ctx_of(tables["B"]))
    _, up = exchange.method.client(private, down, ToyTrainer(exchange.spec), ctx_of(tables["A"]))
    assert up.variant == "A"
    assert up.scalars == {"next_factor": "A"}


def test_a_site_refuses_columns_that_do_not_follow_from_the_table():
    exchange = exchange_of("fedqsn", {"client_rate": 0.5})
    one, other = table_of(exchange, 3), table_of(exchange, 3, 1)
    planned_turn(exchange, one, one)
    with pytest.raises(WireError, match="the columns differ from those that the table"):
        planned_turn(exchange, other, one)
    with pytest.raises(WireError, match="no seed from which this site"):
        exchange.method.broadcast(start(exchange), ctx_of(one, "z"))


@pytest.mark.parametrize("sites", [3, 24])
def test_a_table_with_several_masks_is_refused(sites):
    table = table_of(exchange_of("fedqsn", {"client_rate": 0.5}), sites)
    several = table.model_copy(update={"seeds": table.seeds | {"s01": "ab" * 32}})
    with pytest.raises(PolicyError, match=f"expected one seed for all {sites} sites, found several"):
        several.require_cohort(table.seeds, 3, sites, 1)


def test_a_site_refuses_a_rank_above_its_own_and_ranks_that_differ_by_layer():
    exchange, sites = exchange_of("hetlora", {"ranks": {"s00": 2}}), tuple(names(3))
    planned = exchange.method.plan_entries(exchange.spec, sites, 3, RoundContext(0, "", False, SECRET))
    _, up = planned_turn(exchange, planned, planned)
    assert {tuple(t.shape)[0 if n.endswith("A") else 1] for n, t in up.fields.items()} == {2}
    for blocks in (
        {f"{n}[0:3]": sites for n in exchange.spec},
        {f"{n}[0:{1 + n.endswith('A')}]": sites for n in exchange.spec},
        {f"{n}[0:2]": sites[1:] for n in exchange.spec},
    ):
        with pytest.raises(WireError, match="one rank for all factors"):
            planned_turn(exchange, planned, EntryTable(blocks=blocks, fewest=2))


@pytest.mark.parametrize("name", ["fedrand", "fedavg", "random_binary"])
def test_a_site_masks_with_a_table_exactly_where_the_method_needs_one(name, monkeypatch):
    run, planned = secure_federation(exchange_of(name, {}), 3), plan_entries
    wrong = lambda exchange, *rest: None if planned(exchange, *rest) else planned(exchange_of("fedrand", {}), *rest)  # noqa: E731
    monkeypatch.setattr("fedveil.federation.secagg.entry_plan.plan_entries", wrong)
    with pytest.raises(WireError, match="secure plan: entries: "):
        run.run()


def test_a_site_that_would_leave_out_its_lower_layers_sends_nothing(monkeypatch):
    """FedPer, round 0 again at sites that have trained since: they would send their top layers alone."""
    monkeypatch.setattr(plan_checks, "require_later", lambda plan, state: None)  # otherwise the round is over for them
    run = secure_federation(exchange_of("fedper", {"layers": 1}), 3)
    run.round(0)
    with pytest.raises(PolicyError, match="entries: the .* tensors to send"):
        run.round(0)


def test_a_sum_without_the_senders_that_a_table_needs_is_not_opened():
    run = secure_federation(exchange_of("fedrand", {}), 10)
    table = EntryTable(blocks={"w": tuple(names(6)), "v": tuple(names(10)[4:])}, fewest=6)
    with pytest.raises(QuorumError, match="found 2"):
        table.require_sum(run.sites, run.sites[4:], 3)


def test_a_config_whose_largest_rank_could_never_be_sent_is_refused_before_the_run():
    exchange = exchange_of("hetlora", {"ranks": {"s00": 1, "s01": 2}})
    with pytest.raises(ConfigError, match=r"ranks: .* at least 4 of the 5 sites .* 8, but only 3 of 5 .* at most 2"):
        secure_federation(exchange, 5)
    secure_federation(exchange, 6)
    everybody = exchange_of("hetlora", {"ranks": dict.fromkeys(names(3), 2)})
    secure_federation(everybody, 3).run()


def test_a_run_whose_sums_have_two_sites_is_refused_for_methods_with_a_table():
    two = {"secure.min-sites": 2}
    with pytest.raises(ConfigError, match="secure.min-sites: expected at least 3"):
        secure_federation(exchange_of("fedrand", {}), 3, **two)
    secure_federation(exchange_of("fedrand", {}), 3, **two, **{"secure.max-colluders": 0})
    secure_federation(exchange_of("fedavg", {}), 3, **two)
