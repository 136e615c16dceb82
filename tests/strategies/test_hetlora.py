from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil import rng, strategies
from fedveil.config import parse
from fedveil.contract.layout import Payload
from fedveil.contract.message_address import MessageAddress
from fedveil.contract.method import AcceptedUpload, FederatedState, RoundContext
from fedveil.contract.param_spec import ParamSpec
from fedveil.contract.trainer import TrainingResult
from fedveil.errors import ConfigError, WireError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.ops.running_sums import RunningSums
from fedveil.strategies.fedavg import FedAvg
from fedveil.strategies.hetlora import HetLoRA
from tests.conftest import aggregated

SPEC = {
    "h.0.lora_A": ParamSpec((3, 5)),
    "h.0.lora_B": ParamSpec((7, 3)),
    "h.1.lora_A": ParamSpec((3, 7)),
    "h.1.lora_B": ParamSpec((4, 3)),
}
CTX = RoundContext(0, "a", True, bytes(32))


def adapter(rank: int = 3):
    return strategies.create_method("hetlora", f"adapter = {{rank = {rank}}}").adapter


def weights(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(t.shape, generator=generator) for n, t in SPEC.items()}


class Site:
    """Moves every entry that is not frozen by noise of site and round, and notes what it began from."""

    spec = SPEC

    def __init__(self, site: str, round_: int) -> None:
        self.num_examples = 1 + ord(site) % 4
        self._seed, self.began = 100 * round_ + ord(site), {}

    def train(self, begun, frozen=None, penalty=None) -> TrainingResult:
        generator = torch.Generator().manual_seed(self._seed)
        self.began = {n: w.clone() for n, w in begun.items()}
        after = {n: w + torch.randn(w.shape, generator=generator) for n, w in self.began.items()}
        after |= {n: torch.where(mask, self.began[n], after[n]) for n, mask in (frozen or {}).items()}
        return TrainingResult(after, {"steps": 1.0})


def federation(method, sites="abc", fraction=1.0, rounds=3, name="hetlora", **keys):
    config = parse({"run.deterministic": True, "run.rounds": rounds, "cohort.fraction": fraction, **keys})
    made: dict[tuple[str, int], Site] = {}

    def trainer_for(site, ctx):
        return made.setdefault((site, ctx.round), Site(site, ctx.round))

    state = method.init(SPEC, weights(), rng.initial_stream(0, "m"))
    return InProcessFederation(MessageExchange(method, name, SPEC), config, trainer_for, list(sites), state), made


def test_two_uploads_of_two_ranks_by_hand():
    """Rank 1 of 2 examples and rank 2 of 1: A's first row is (2*[1] + [4]) / 3 = 2, its second (2*0 + 9) / 3 = 3."""
    spec = {"m.lora_A": ParamSpec((2, 1)), "m.lora_B": ParamSpec((1, 2))}
    method = HetLoRA(ranks={"x": 1}, adapter=adapter(2))
    server = FederatedState({"m.lora_A": torch.tensor([[7.0], [7.0]]), "m.lora_B": torch.zeros(1, 2)})
    sums = RunningSums()
    for site, a, b, n in (("x", [[1.0]], [[3.0]], 2), ("y", [[4.0], [9.0]], [[6.0, 12.0]], 1)):
        payload = Payload({"m.lora_A": torch.tensor(a), "m.lora_B": torch.tensor(b)})
        sums.add(site, n, method.contributions(payload, n, spec, CTX))
    new = method.server_update(server, sums, CTX).tensors
    assert new["m.lora_A"].tolist() == [[2.0], [3.0]]
    assert new["m.lora_B"].tolist() == [[4.0, 4.0]]


def test_norms_weigh_by_hand_and_a_product_of_zero_weighs_nothing():
    """|B A| is 2 and 6: A = (2 * 1 + 6 * 3) / 8 = 2.5, B = (2 * 2 + 6 * 2) / 8 = 2; the third's B is 0."""
    spec = {"m.lora_A": ParamSpec((1, 1)), "m.lora_B": ParamSpec((1, 1))}
    method = HetLoRA(weights="norm", adapter=adapter(1))
    server = FederatedState({name: torch.zeros(1, 1) for name in spec})
    uploads = [
        AcceptedUpload(Payload({"m.lora_A": torch.tensor([[a]]), "m.lora_B": torch.tensor([[b]])}), n, CTX)
        for a, b, n in ((1.0, 2.0, 9), (3.0, 2.0, 1), (50.0, 0.0, 100))
    ]
    new = aggregated(method, server, iter(uploads)).tensors
    assert [new[name].item() for name in spec] == [pytest.approx(2.5), pytest.approx(2.0)]


def test_without_ranks_it_is_fedavg():
    mine, _ = federation(HetLoRA(adapter=adapter()))
    theirs, _ = federation(FedAvg(adapter=adapter()), name="fedavg")
    mine.run()
    theirs.run()
    assert all(torch.equal(mine.server.tensors[n], theirs.server.tensors[n]) for n in SPEC)
    assert mine.upload_bytes - theirs.upload_bytes < 200


@pytest.mark.long
@settings(max_examples=15, deadline=None)
@given(
    low=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 3)),
    fraction=st.floats(0.3, 1.0),
    by=st.sampled_from(["examples", "norm"]),
)
def test_rounds_are_the_naive_mean_of_padded_pairs(low, fraction, by):
    """In fp64 and plain loops: zeros beyond a site's rank, and what nobody has stays."""
    run, made = federation(HetLoRA(ranks=low, weights=by, adapter=adapter()), "abcd", fraction, 4)
    for round_ in range(4):
        before = {n: w.double() for n, w in run.server.tensors.items()}
        run.round(round_)
        total = {n: torch.zeros_like(w) for n, w in before.items()}
        weight = dict.fromkeys(before, 0.0)
        for site in run.last_cohort:
            rank, local = low.get(site, 3), made[site, round_]
            generator = torch.Generator().manual_seed(local._seed)
            sent = {}
            for n, w in before.items():
                whole = torch.zeros_like(w)
                keep = (slice(rank),) if n.endswith("A") else (slice(None), slice(rank))
                moved = torch.randn(w.shape, generator=generator).double()
                whole[keep] = w[keep] + moved[keep]
                sent[n] = whole
                assert torch.equal(local.began[n][keep], w[keep].float())
                assert float(local.began[n].sum()) == pytest.approx(float(w[keep].sum()), abs=1e-4)
            for n in before:
                module = n.rpartition(".")[0]
                norm = float((sent[f"{module}.lora_B"] @ sent[f"{module}.lora_A"]).norm())
                share = norm if by == "norm" else local.num_examples
                total[n] += share * sent[n]
                weight[n] += share
        most = max(low.get(site, 3) for site in run.last_cohort)
        for n, w in run.server.tensors.items():
            keep = (slice(most),) if n.endswith("A") else (slice(None), slice(most))
            wanted = before[n].clone()
            wanted[keep] = (total[n] / weight[n])[keep]
            torch.testing.assert_close(w.double(), wanted, rtol=2e-5, atol=2e-5)


def test_a_lower_rank_saves_bytes_both_ways():
    method = HetLoRA(ranks={"b": 1}, adapter=adapter())
    exchange, server = (
        MessageExchange(method, "hetlora", SPEC),
        method.init(SPEC, weights(), rng.initial_stream(0, "m")),
    )
    sizes = {}
    for site in "ab":
        ctx = RoundContext(0, site, True, bytes(32))
        down = exchange.broadcast(server, ctx)
        _, parts = exchange.participate(down, None, Site(site, 0), ctx)
        payload = exchange.receive(b"".join(parts), 0).payload
        method.check_site(payload, SPEC, site)
        sizes[site] = len(down), sum(map(len, parts))
        assert payload.fields["h.0.lora_A"].shape[0] == (1 if site == "b" else 3)
    assert sizes["b"][0] < 0.9 * sizes["a"][0]
    assert sizes["b"][1] < 0.9 * sizes["a"][1]


def test_another_rank_is_refused_on_both_sides():
    method = HetLoRA(ranks={"b": 1}, adapter=adapter())
    whole = Payload(weights())
    with pytest.raises(WireError, match=r"expected rank 1 .the rank of site b., found 3"):
        method.check_site(whole, SPEC, "b")
    method.check_site(whole, SPEC, "a")
    ctx = RoundContext(0, "b", True, bytes(32), address=MessageAddress(site="b"))
    with pytest.raises(WireError, match=r"expected rank 1 .the rank of site b., found 3"):
        method.client(None, whole, Site("b", 0), ctx)
    mixed = Payload({**weights(), "h.1.lora_B": torch.zeros(4, 2)})
    with pytest.raises(WireError, match="one rank for all factors"):
        method.check(mixed, SPEC)


def test_the_server_refuses_an_upload_of_another_rank_than_its_sites():
    method, loose = HetLoRA(ranks={"b": 1}, adapter=adapter()), HetLoRA(ranks={"c": 1}, adapter=adapter())
    exchange, theirs = MessageExchange(method, "hetlora", SPEC), MessageExchange(loose, "hetlora", SPEC)
    server = loose.init(SPEC, weights(), rng.initial_stream(0, "m"))
    _, parts = theirs.participate(theirs.broadcast(server, CTX), None, Site("a", 0), CTX)
    assert exchange.receive(b"".join(parts), 0, site="a").num_examples
    with pytest.raises(WireError, match=r"h\.0\.lora_A: expected rank 1 .the rank of site b., found 3"):
        exchange.receive(b"".join(parts), 0, site="b")


@pytest.mark.parametrize("fields", ["ranks = {north = 9}", "ranks = {north = 0}", 'weights = "loss"'])
def test_fields_are_checked(fields):
    with pytest.raises(ConfigError):
        strategies.create_method("hetlora", fields)


def test_norms_are_no_weights_of_a_sum_unseen():
    secure = {"secure.enabled": True, "secure.clip-bound": 64.0, "secure.max-weight": 10}
    run, _ = federation(HetLoRA(weights="norm", adapter=adapter()), "abcd", **secure)
    with pytest.raises(ConfigError, match="whole weight"):
        run.run()
    run, _ = federation(HetLoRA(ranks={"b": 1}, adapter=adapter()), "abcdefg", **secure)
    clear, _ = federation(HetLoRA(ranks={"b": 1}, adapter=adapter()), "abcdefg")
    run.run()
    clear.run()
    for n in SPEC:
        torch.testing.assert_close(run.server.tensors[n], clear.server.tensors[n], atol=1e-5, rtol=1e-5)


class Shrinks(Site):
    """One step of SGD at rate 0.1 on the method's term alone; it is zero where B is."""

    def train(self, begun, frozen=None, penalty=None) -> TrainingResult:
        self.began = {n: w.clone() for n, w in begun.items()}
        leaves = {n: w.clone().requires_grad_() for n, w in self.began.items()}
        if penalty is None:
            return TrainingResult(self.began, {"steps": 1.0})
        penalty(leaves).backward()
        return TrainingResult({n: (w - 0.1 * w.grad).detach() for n, w in leaves.items()}, {"steps": 1.0})


def test_a_site_prunes_its_last_rank_when_its_tail_shrank_and_gets_what_is_left():
    """gamma = 0.7: of rank 3 stay 2, of 2 stay 1, and 1 stays. The twin takes the step on the term by hand."""
    spec = {"m.lora_A": ParamSpec((3, 1)), "m.lora_B": ParamSpec((1, 3))}
    method = HetLoRA(adapter=adapter(3), pruning=0.5, pruning_factor=0.7)
    exchange = MessageExchange(method, "hetlora", spec)
    start = {"m.lora_A": torch.tensor([[1.0], [2.0], [3.0]]), "m.lora_B": torch.tensor([[4.0, 5.0, 6.0]])}
    server = method.init(spec, start, rng.initial_stream(0, "m"))
    seen = []
    for round_ in range(3):
        ctx = RoundContext(round_, "a", round_ == 0, bytes(32), address=MessageAddress("r", 0, "a"))
        site = Shrinks("a", round_)
        site.spec = spec
        down = exchange.broadcast(server, ctx)
        _, parts = exchange.participate(down, None, site, ctx)
        message = exchange.receive(b"".join(parts), round_, ctx.address)
        seen.append(tuple(message.payload.fields["m.lora_A"].shape))
        upload = AcceptedUpload(message.payload, 1, ctx)
        server = exchange.aggregate(server, iter([upload]))
    assert seen == [(2, 1), (1, 1), (1, 1)]
    assert server.scalars["ranks"] == {"a": 1}
    # Round 0: only the tail of rank 3 is pulled, then pruned. Round 1: that of rank 2: A 2 - 0.1 * 0.5 * 5 = 1.75.
    assert server.tensors["m.lora_A"].flatten().tolist() == pytest.approx([1.0, 2.0, 3.0])
    assert server.tensors["m.lora_B"].flatten().tolist() == pytest.approx([4.0, 5.0, 6.0])


def test_a_zero_factor_prunes_nothing_and_its_site_stays_at_its_rank():
    run, _ = federation(HetLoRA({"b": 2}, adapter=adapter(3), pruning=1.0))
    run.server = FederatedState(
        {n: w if n.endswith("A") else torch.zeros_like(w) for n, w in run.server.tensors.items()}, {"ranks": {}}
    )
    run.round(0)
    assert run.server.scalars["ranks"] == {"a": 3, "b": 2, "c": 3}


def test_pruning_is_refused_where_each_rank_needs_a_number_of_sites():
    method = HetLoRA(adapter=adapter(3), pruning=0.1)
    with pytest.raises(ConfigError, match="pruning: secure.enabled requires 0"):
        method.plan_entries(SPEC, list("abc"), 2, CTX)
    with pytest.raises(ConfigError, match="pruning: secure.enabled requires 0"):
        method.check_entries(3, 3, 2)


def test_with_pruning_an_upload_above_the_sites_first_rank_is_refused():
    method = HetLoRA({"b": 2}, adapter=adapter(3), pruning=0.1)
    for rank, refused in ((1, False), (2, False), (3, True)):
        payload = Payload({n: w[:rank] if n.endswith("A") else w[:, :rank] for n, w in weights().items()})
        if refused:
            with pytest.raises(WireError, match="expected rank 2"):
                method.check_site(payload, SPEC, "b")
        else:
            method.check_site(payload, SPEC, "b")


@pytest.mark.parametrize("fields", ["pruning = -1.0", "pruning_factor = 1.0", "pruning_factor = 0.0"])
def test_bad_pruning_is_refused(fields):
    with pytest.raises(ConfigError, match="pruning"):
        strategies.create_method("hetlora", fields)
