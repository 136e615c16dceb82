from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil import rng, strategies
from fedveil.adapters.residual_lora import ResidualLoraAdapter, factor_names, residual_names
from fedveil.config import parse
from fedveil.contract.layout import MessageLayout, Payload
from fedveil.contract.method import AcceptedUpload, FederatedState, RoundContext
from fedveil.contract.param_spec import ParamSpec
from fedveil.contract.trainer import TrainingResult
from fedveil.errors import ConfigError, StateError, UploadRefused, WireError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.ops.running_sums import RunningSums
from fedveil.server_app.upload_limits import UploadLimits
from fedveil.server_app.upload_validation import judge_upload
from fedveil.strategies.fedex_lora import FedExLoRA
from fedveil.wire.envelope import EnvelopeStamp, pack_message, unpack_message
from tests.conftest import ToyTrainer
from tools.forge import with_header

SPEC = {
    "h.0.lora_A": ParamSpec((2, 30)),
    "h.0.lora_B": ParamSpec((20, 2)),
    "h.1.lora_A": ParamSpec((2, 24)),
    "h.1.lora_B": ParamSpec((33, 2)),
    "h.0.residual": ParamSpec((20, 30), fixed=True),
    "h.1.residual": ParamSpec((33, 24), fixed=True),
}
METHOD = FedExLoRA(adapter=ResidualLoraAdapter(rank=2))
CTX = RoundContext(0, "a", True, bytes(32))


class Site:
    """Every turn moves each entry by another amount, drawn from site and round."""

    def __init__(self, site: str, round_: int, spec=SPEC, std: float = 0.3) -> None:
        self.spec, self.num_examples = spec, 1 + ord(site) % 5
        self._seed, self._std = 1000 * round_ + ord(site), std
        self.frozen: list[str] = []

    def train(self, weights, frozen=None, penalty=None) -> TrainingResult:
        generator = torch.Generator().manual_seed(self._seed)
        self.frozen = sorted(name for name, mask in frozen.items() if bool(mask.all()))
        moved = {n: w + self._std * torch.randn(w.shape, generator=generator) for n, w in weights.items()}
        return TrainingResult({**moved, **{n: weights[n] for n in self.frozen}}, {"steps": 1.0})


def weights_of(spec=SPEC):
    return METHOD.adapter.draw({n: t.shape for n, t in spec.items()}, rng.initial_stream(0, "w"), {})


def federation(method=METHOD, sites="abc", fraction: float = 1.0, rounds: int = 4, **keys) -> InProcessFederation:
    config = parse({"run.deterministic": True, "run.rounds": rounds, "cohort.fraction": fraction, **keys})
    state = method.init(SPEC, weights_of(), rng.initial_stream(0, "m"))
    return InProcessFederation(
        MessageExchange(method, "fedex_lora", SPEC), config, lambda site, ctx: Site(site, ctx.round), list(sites), state
    )


def change_of(weights, module: str, scaled: float = 1.0):
    """R + B A in fp64."""
    r, a, b = (weights[f"{module}.{part}"].double() for part in ("residual", "lora_A", "lora_B"))
    return r + scaled * b @ a


def sent_by(run: InProcessFederation, round_: int, site: str):
    """What a site sends, by the same trainer from the same broadcast, without the method."""
    start = run.exchange.method.models(run.server)["server"]
    frozen_masks = {n: torch.tensor(True) for n in residual_names(SPEC)}
    return Site(site, round_).train(start, frozen_masks).weights


def check_rounds(run: InProcessFederation, rounds: int) -> None:
    """Each round against the naive mean of the clients' whole models, in plain loops and fp64."""
    for round_ in range(rounds):
        before = run.exchange.method.models(run.server)["server"]
        sent = {site: sent_by(run, round_, site) for site in run.sites}
        run.round(round_)
        total = sum(1 + ord(site) % 5 for site in run.last_cohort)
        after = run.exchange.method.models(run.server)["server"]
        for module in ("h.0", "h.1"):
            models = {site: change_of({**w, f"{module}.residual": before[f"{module}.residual"]}, module)
                      for site, w in sent.items()}  # fmt: skip
            wanted = sum((1 + ord(site) % 5) / total * models[site] for site in run.last_cohort)
            change = change_of(after, module)
            assert float((change - wanted).norm()) <= 2e-6 * float(wanted.norm())


def test_two_uploads_by_hand():
    """A: (3 * [1, 0] + 1 * [5, 8]) / 4 = [2, 2]; B: (3 * 2 + 1 * -2) / 4 = 1; B A: (3 * [2, 0] + [-10, -16]) / 4 =
    [-1, -4], so R = [-1, -4] - [2, 2] = [-3, -6]: the model is [-1, -4].
    """
    spec = {"m.lora_A": ParamSpec((1, 2)), "m.lora_B": ParamSpec((1, 1)), "m.residual": ParamSpec((1, 2))}
    method, sums = FedExLoRA(), RunningSums()
    server = method.init(spec, {n: torch.zeros(t.shape) for n, t in spec.items()}, rng.initial_stream(0, "m"))
    for site, a, b, n in (("x", [[1.0, 0.0]], 2.0, 3), ("y", [[5.0, 8.0]], -2.0, 1)):
        payload = Payload({"m.lora_A": torch.tensor(a), "m.lora_B": torch.tensor([[b]])})
        sums.add(site, n, method.contributions(payload, n, spec, CTX))
    new = method.server_update(server, sums, CTX).tensors
    assert new["m.lora_A"].tolist() == [[2.0, 2.0]]
    assert new["m.lora_B"].tolist() == [[1.0]]
    torch.testing.assert_close(new["m.residual"], torch.tensor([[-3.0, -6.0]]))


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_the_model_is_the_mean_of_the_clients_models(fraction):
    check_rounds(federation(sites="abcd", fraction=fraction), 5)


@settings(max_examples=12, deadline=None)
@given(
    sites=st.text("abcdefgh", min_size=1, max_size=6).map(lambda text: "".join(sorted(set(text)))),
    fraction=st.floats(0.2, 1.0),
)
def test_it_is_for_any_sites_and_cohorts(sites, fraction):
    check_rounds(federation(sites=sites, fraction=fraction), 3)


def test_fedavg_is_not_the_mean_of_the_models_and_this_is():
    """The difference that the paper is about, on the same uploads."""
    run = federation(rounds=1)
    run.run()
    r = run.server.tensors["h.0.residual"]
    assert float(r.norm()) > 0.05 * float(change_of(run.server.tensors, "h.0").norm())


def test_one_site_alone_has_no_residual_and_is_fedavg():
    run = federation(sites="a")
    run.run()
    assert not any(bool(r.any()) for r in residual_names(run.exchange.method.models(run.server)["server"]).values())
    spec = factor_names(SPEC)
    plain = strategies.create_method("fedavg", "adapter = {rank = 2}")
    state = plain.init(spec, factor_names(weights_of()), rng.initial_stream(0, "m"))
    trainer_for = lambda site, ctx: Of(Site(site, ctx.round))  # noqa: E731
    other = InProcessFederation(MessageExchange(plain, "fedavg", spec), run.config, trainer_for, ["a"], state)
    other.run()
    for name in spec:
        assert torch.equal(other.server.tensors[name], run.server.tensors[name])


class Of:
    """The same training for a method without R."""

    def __init__(self, site: Site) -> None:
        self._site, self.spec, self.num_examples = site, factor_names(SPEC), site.num_examples

    def train(self, weights, frozen=None, penalty=None) -> TrainingResult:
        result = self._site.train({n: weights.get(n, torch.zeros(t.shape)) for n, t in SPEC.items()}, {})
        return TrainingResult(factor_names(result.weights), result.report)


def broadcasts(run: InProcessFederation, rounds: int) -> dict[tuple[int, str], tuple[str, int]]:
    """The kind and the bytes of every broadcast."""
    message_info = {}
    for round_ in range(rounds):
        for site in run.sites:
            ctx = run._context(round_, site, run._server_secret)
            data = run.exchange.broadcast(run.server, ctx)
            stamp = EnvelopeStamp.from_exchange(run.exchange.method, "fedex_lora", round_, "down")
            message_info[round_, site] = (unpack_message(data, run.exchange.layout, stamp).payload.variant, len(data))
        run.round(round_)
        for site in run.last_cohort:  # a site keeps what it received, which the server had
            assert run.private.get(site) is not None
    return message_info


def test_a_site_that_stays_gets_factors_and_has_the_servers_residual_bit_for_bit():
    run, before = federation(sites="ab"), None
    for round_ in range(4):
        before = residual_names(run.exchange.method.models(run.server)["server"])
        run.round(round_)
        for site in "ab":
            for name, r in run.private.get(site).tensors.items():
                assert torch.equal(r, before[name])
    assert bool(before["h.0.residual"].any())
    kinds = broadcasts(federation(sites="ab"), 4)
    assert [kinds[i, "a"][0] for i in range(4)] == ["start", "step", "step", "step"]
    assert kinds[0, "a"][1] < kinds[1, "a"][1]


def test_who_was_absent_gets_the_residual_whole_and_it_is_the_same():
    run = federation(sites="abcd", fraction=0.5, rounds=6)
    kinds = {}
    for round_ in range(6):
        for site in "abcd":
            ctx = run._context(round_, site, run._server_secret)
            payload = run.exchange.method.broadcast(run.server, ctx)
            kinds.setdefault(payload.variant, []).append(len(run.exchange.broadcast(run.server, ctx)))
            member = site in (run.last_cohort if round_ else [])
            assert payload.variant == ("start" if round_ == 0 else "step" if member else "whole")
        before = residual_names(run.exchange.method.models(run.server)["server"])
        run.round(round_)
        for site in run.last_cohort:
            assert all(torch.equal(r, before[name]) for name, r in run.private.get(site).tensors.items())
    assert max(kinds["start"]) < min(kinds["step"]) <= max(kinds["step"]) < min(kinds["whole"])


def test_many_sites_have_no_smaller_factors_so_it_goes_down_whole():
    """Eight uploads of rank 2 span 16 directions; factors of 20 x 30 are smaller up to rank 12."""
    run = federation(sites="abcdefgh")
    run.run()
    assert run.server.tensors["step.known"].item() == 0
    payload = run.exchange.method.broadcast(run.server, run._context(4, "a", bytes(32)))
    assert payload.variant == "whole"
    check_rounds(federation(sites="abcdefgh"), 3)


def test_a_site_without_its_residual_says_so_and_gets_it_whole():
    run = federation(sites="ab")
    run.run()
    exchange = run.exchange
    down = exchange.broadcast(run.server, RoundContext(4, "a", False, bytes(32)))
    with pytest.raises(StateError, match="private state: the residual of an earlier participation is missing"):
        exchange.participate(down, None, Site("a", 4), RoundContext(4, "a", False, bytes(32)))
    again = exchange.broadcast(run.server, RoundContext(4, "a", True, bytes(32)))  # as after a turn that failed
    private_state, _ = exchange.participate(again, None, Site("a", 4), RoundContext(4, "a", True, bytes(32)))
    assert torch.equal(private_state.tensors["h.1.residual"], run.server.tensors["h.1.residual"])


def test_the_residual_is_frozen_and_no_upload_holds_it():
    run = federation(sites="ab")
    run.run()
    trainer = Site("a", 4)
    down = run.exchange.broadcast(run.server, RoundContext(4, "a", False, bytes(32)))
    _, parts = run.exchange.participate(down, run.private.get("a"), trainer, RoundContext(4, "a", False, bytes(32)))
    assert trainer.frozen == ["h.0.residual", "h.1.residual"]
    assert set(run.exchange.receive(b"".join(parts), 4).payload.fields) == set(factor_names(SPEC))


@pytest.mark.parametrize("fields", ['wire_dtype = "bfloat16"', "upload_bits = 4"])
def test_what_is_rounded_on_the_wire_is_exact_too(fields):
    """The mean is of what was decoded; and what goes down is what the residual was formed from."""
    method = strategies.create_method("fedex_lora", fields + "\nadapter = {rank = 2}")
    run = federation(method, rounds=2)
    exchange, server, uploads, total = run.exchange, run.server, [], 0
    models = {}
    for site in "abc":
        ctx = RoundContext(0, site, True, bytes(32))
        _, parts = exchange.participate(exchange.broadcast(server, ctx), None, Site(site, 0), ctx)
        message = exchange.receive(b"".join(parts), 0)
        n, opened = message.num_examples, method._uploads.opened(message.payload)
        uploads.append(AcceptedUpload(message.payload, n, ctx))
        total += n
        for m in ("h.0", "h.1"):
            product = opened[f"{m}.lora_B"].double() @ opened[f"{m}.lora_A"].double()
            models[m] = models.get(m, 0) + n * product
    new = exchange.aggregate(server, uploads)
    down = exchange.opened(exchange.broadcast(new, RoundContext(1, "z", True, bytes(32))), CTX_1)
    for m in ("h.0", "h.1"):
        got = {name: w.float() for name, w in down.fields.items()}
        assert float((change_of(got, m) - models[m] / total).norm()) <= 2e-6 * float(models[m].norm() / total)


CTX_1 = RoundContext(1, "z", True, bytes(32))


def upload_of(exchange: MessageExchange, changes=None, layout: MessageLayout | None = None) -> bytes:
    """A message as a hostile site can make it: any fields, of any layout, under the run's digest."""
    weights = {n: torch.ones(t.shape) for n, t in factor_names(exchange.spec).items()} | (changes or {})
    data = pack_message(
        layout or exchange.layout, EnvelopeStamp.from_exchange(METHOD, "fedex_lora", 0, "up"), Payload(weights), 3
    )
    return with_header(data, layout=exchange.layout.digest)


@pytest.mark.parametrize("shape", [(3, 30), (1, 30), (2, 31)])
def test_an_upload_of_another_rank_or_size_is_refused_by_its_field(shape):
    exchange = MessageExchange(METHOD, "fedex_lora", SPEC)
    own = MessageLayout(tuple(replace(f, shape=shape) if f.name == "h.0.lora_A" else f for f in exchange.layout.fields))
    with pytest.raises(WireError, match=r"h\.0\.lora_A: expected shape \(2, 30\), found"):
        exchange.receive(upload_of(exchange, {"h.0.lora_A": torch.ones(shape)}, own), 0)


def test_an_upload_that_brings_a_residual_is_refused():
    exchange = MessageExchange(METHOD, "fedex_lora", SPEC)
    extra = replace(exchange.layout.fields[0], name="h.0.residual", direction="up", shape=(1, 1), variants=())
    own = MessageLayout((*exchange.layout.fields, extra))
    with pytest.raises(WireError, match=r"h\.0\.residual: there is no such field"):
        exchange.receive(upload_of(exchange, {"h.0.residual": torch.ones(1, 1)}, own), 0)


@pytest.mark.parametrize(
    "a,b,match",
    [
        (float("nan"), 1.0, r"h\.0\.lora_A: expected finite values"),
        (1.0, float("inf"), r"h\.0\.lora_B: expected finite values"),
        (1e5, 1e5, r"h\.0\.residual: expected a norm of at most 1e\+06"),
    ],
)
def test_values_that_would_spoil_the_sum_are_refused_by_field_also_where_only_their_product_is_large(a, b, match):
    exchange = MessageExchange(METHOD, "fedex_lora", SPEC)
    changes = {"h.0.lora_A": torch.full((2, 30), a), "h.0.lora_B": torch.full((20, 2), b)}
    message = exchange.receive(upload_of(exchange, changes), 0)
    with pytest.raises(UploadRefused, match=match):
        judge_upload(exchange, message, CTX, UploadLimits())


def stepped(left: tuple[int, ...], right: tuple[int, ...]) -> Payload:
    """A broadcast of the kind "step"."""
    sent = {n: torch.ones(t.shape) for n, t in factor_names(SPEC).items()}
    sent |= {"step.h.0.left": torch.ones(left), "step.h.0.right": torch.ones(right)}
    return Payload({**sent, "step.h.1.left": torch.ones(33, 0), "step.h.1.right": torch.ones(0, 24)}, "step")


def test_a_hostile_broadcast_is_refused_by_its_field():
    exchange, private_state = MessageExchange(METHOD, "fedex_lora", SPEC), FederatedState(residual_names(weights_of()))
    stamp = EnvelopeStamp.from_exchange(METHOD, "fedex_lora", 0, "down")
    data = pack_message(exchange.layout, stamp, stepped((20, 3), (2, 30)))
    with pytest.raises(WireError, match=r"step\.h\.0\.right: expected 3 rows to match \.left, found 2"):
        exchange.participate(data, private_state, Site("a", 0), CTX)
    with pytest.raises(WireError, match=r"step\.h\.0\.left: expected shape \(20, None\) of at most \(20, 12\)"):
        pack_message(exchange.layout, stamp, stepped((20, 13), (13, 30)))
    good = pack_message(exchange.layout, stamp, stepped((20, 3), (3, 30)))
    new_private, _ = exchange.participate(good, private_state, Site("a", 0), CTX)
    assert torch.equal(new_private.tensors["h.0.residual"], torch.full((20, 30), 3.0))
    assert not new_private.tensors["h.1.residual"].any()


def test_its_adapter_has_no_other_kind():
    with pytest.raises(ConfigError, match="adapter"):
        strategies.create_method("fedex_lora", 'adapter = {kind = "all"}')
    assert strategies.create_method("fedex_lora", "adapter = {rank = 3, alpha = 6}").adapter == ResidualLoraAdapter(
        3, 6
    )
    with pytest.raises(ConfigError, match="bits"):
        FedExLoRA(upload_bits=1)


def test_a_toy_that_moves_all_alike_leaves_a_residual_of_rank_1():
    exchange = MessageExchange(METHOD, "fedex_lora", SPEC)
    server = METHOD.init(SPEC, weights_of(), rng.initial_stream(0, "m"))
    uploads = []
    for i, site in enumerate("abc"):
        ctx = RoundContext(0, site, True, bytes(32))
        _, parts = exchange.participate(exchange.broadcast(server, ctx), None, ToyTrainer(SPEC, step=1.0 + i), ctx)
        uploads.append(AcceptedUpload(exchange.receive(b"".join(parts), 0).payload, 1, ctx))
    new = exchange.aggregate(server, uploads)
    payload = METHOD.broadcast(new, RoundContext(1, "b", False, bytes(32)))
    assert payload.fields["step.h.0.left"].shape == (20, 1)
    assert payload.fields["step.h.1.right"].shape == (1, 24)


def test_rounded_pairs_need_one_rank_more_and_go_down_as_factors():
    """The rounded mean product is not in the span of the others: two uploads of rank 2 and it have rank 6."""
    run = federation(FedExLoRA(adapter=ResidualLoraAdapter(rank=2), wire_dtype="bfloat16"), sites="ab", rounds=1)
    run.run()
    down = run.exchange.opened(run.exchange.broadcast(run.server, replace(CTX_1, client="a", is_new=False)), CTX_1)
    assert down.variant == "step"
    assert down.fields["step.h.0.left"].shape[1] == 6
