"""Shares of noise in masked vectors, and whole rounds in which the sum alone has enough of it."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedveil import rng, strategies
from fedveil.adapters import heterogeneous_ranks
from fedveil.adapters.lora import LoraAdapter
from fedveil.adapters.prompt import PromptAdapter
from fedveil.config import parse
from fedveil.contract.contributions import ClientContributions, Contribution
from fedveil.contract.layout import Payload
from fedveil.contract.method import RoundContext
from fedveil.contract.param_spec import ParamSpec
from fedveil.errors import ConfigError, PolicyError, QuorumError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.federation.secagg.distributed_noise import DistributedNoise, require_the_step_alone
from fedveil.federation.secagg.fixed_point import FixedPointRing
from fedveil.federation.secagg.flatten import VectorLayout, VectorSlot
from fedveil.federation.secagg.masked_upload import MaskedUploadCodec
from fedveil.federation.secagg.plan_checks import SiteRequirements
from fedveil.privacy import discrete_gaussian
from fedveil.privacy.dp_sgd import DpSgdConfig, NoisyTrainer
from fedveil.privacy.guarantee_source import guarantee_of
from fedveil.training.unit_gradients import UnitTrainer
from tests.conftest import ToyTrainer
from tests.fedveil.federation.secagg import sites as few
from tests.prompt_toy import LENGTH, WIDTH, local_of

SITES = ["a", "b", "c", "d"]
FLAT = {
    "secure.enabled": True, "secure.noise": "sum", "secure.min-sites": 4, "secure.clip-bound": 4.0, "dp.clip-norm": 2.0,
    "dp.noise-multiplier": 1.5, "dp.learning-rate": 0.5, "train.max-steps": 1, "train.batch-size": 2, "run.rounds": 1,
    "run.deterministic": True,
}  # fmt: skip
FPL = {
    "rank": 3,
    "adapter": PromptAdapter(LENGTH),
    "noise_local": 0.5,
    "noise_global": 1.5,
    "clip_global": 0.3,
    "learning_rate": 1.0,
}


class OneStep(ToyTrainer):
    """Rows that say the same, and one step a turn."""

    steps = 1


def federation(name: str = "fedavg", method=None, sites=SITES, trainer=None, **changes) -> InProcessFederation:
    flat = FLAT | {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}
    method = method or strategies.create_method(name)
    spec = dict(method.adapter.example_spec()) if trainer is None else {"prompt": ParamSpec((LENGTH, WIDTH))}
    exchange = MessageExchange(method, name, spec)
    generator = torch.Generator().manual_seed(31415)
    weights = {n: 0.1 * torch.randn(t.shape, generator=generator) for n, t in spec.items()}
    state = method.init(spec, weights, rng.initial_stream(0, "method init"))
    return InProcessFederation(
        exchange, parse(flat), trainer or (lambda site, ctx: OneStep(spec, 9)), list(sites), state
    )


def noise_of(run: InProcessFederation, round_: int = 0, summands: int = 4) -> tuple[DistributedNoise, FixedPointRing]:
    noise = MaskedUploadCodec.from_exchange(run.exchange, round_, 32, run._claim).noise
    assert noise is not None
    return noise, noise.ring(FixedPointRing(32, summands, 1, 4.0))


def shares(run: InProcessFederation, round_: int = 0) -> dict[str, torch.Tensor]:
    """The sum of all sites' noise by name, in units of the mean, drawn once more."""
    noise, ring = noise_of(run, round_, len(run.sites))
    total = np.zeros(noise.slots.length, ring.dtype)
    for site in run.sites:
        noise.add(total, ring, run._context(round_, site, run._client_secrets[site]).noise("noise in the sum"))
    noise_by_name = {}
    for slot in noise.slots.slots:
        noise_by_name[slot.name] = ring.decode(total[slot.start : slot.start + slot.values]).reshape(slot.shape) / len(
            run.sites
        )
    return noise_by_name


@pytest.mark.long
def test_the_sum_of_the_honest_sites_has_the_variance_that_an_epsilon_counts():
    """h = 4 - 1 sites: z P S of the exact Gaussian, and what rounding adds. Within 5 standard errors."""
    claim = guarantee_of(strategies.create_method("fedavg"), parse(FLAT))
    slots = VectorLayout((VectorSlot("w", (400, 300), (), 0),))
    noise = DistributedNoise(claim, slots)
    ring = noise.ring(FixedPointRing(32, 4, 1, 4.0))
    total = np.zeros(slots.length, ring.dtype)
    for i in range(3):
        noise.add(total, ring, rng.RandomStream.derive(bytes(32), i, "a", "x").bytes)
    values = ring.decode(total[:-2]).numpy()
    assert total[-2:].tolist() == [0, 0]  # the weight and the examples
    wanted = 1.5 * 0.5 * 2.0 / 2 * (1 + claim.excess(ring.scale, 120_000, 4.0))
    assert values.std() == pytest.approx(wanted, rel=5 / (2 * len(values)) ** 0.5)
    assert claim.excess(ring.scale, 120_000, 4.0) < 0.02
    assert abs(values.mean()) < 5 * wanted / len(values) ** 0.5


@pytest.mark.parametrize("name", ["fedavg", "promptfl"])
def test_the_model_after_a_round_is_the_clear_one_plus_that_noise(name):
    noisy, clear = (
        federation(name),
        federation(name, secure__enabled=False, secure__noise="site", dp__noise_multiplier=0.0),
    )
    expected, noise = clear.run().tensors, shares(noisy)
    _, ring = noise_of(noisy)
    for n, tensor in noisy.run().tensors.items():
        torch.testing.assert_close(
            tensor.double(), expected[n].double() + noise[n], rtol=1e-6, atol=2 / ring.scale + 1e-7
        )
        assert float(noise[n].abs().max()) > 10 / ring.scale


def test_dp_fpl_sends_its_shared_part_without_noise_and_keeps_the_private_one_noised():
    method = strategies.create_method("dp_fpl")
    method = replace(method, **FPL)
    quiet = replace(method, noise_global=0.0)
    trainer = lambda site, ctx: local_of(12, 1 + ord(site), batch_size=4)  # noqa: E731
    dp = {key.replace(".", "__").replace("-", "_"): 0.0 for key in ("dp.clip-norm", "dp.noise-multiplier")} | {
        "dp__learning_rate": 0.1
    }
    noisy = federation("dp_fpl", method=method, trainer=trainer, train__batch_size=4, **dp)
    clear = federation(
        "dp_fpl", method=quiet, trainer=trainer, secure__enabled=False, secure__noise="site", train__batch_size=4, **dp
    )
    expected, noise, server = clear.run().tensors["prompt"], shares(noisy)["prompt"], noisy.run().tensors["prompt"]
    _, ring = noise_of(noisy)
    torch.testing.assert_close(server.double(), expected.double() - noise, rtol=0, atol=2 / ring.scale + 1e-6)
    assert float(noise.abs().max()) > 100 / ring.scale
    for site in SITES:
        assert torch.equal(noisy.private[site].tensors["prompt"], clear.private[site].tensors["prompt"])
    silent = federation("dp_fpl", method=replace(method, noise_local=1e-9), trainer=trainer, train__batch_size=4, **dp)
    silent.run()
    assert not torch.equal(silent.private["a"].tensors["prompt"], noisy.private["a"].tensors["prompt"])


def test_patients_as_units_have_their_noise_in_the_sum():
    """P = eta C / M with M units: the sum is the clear one and the noise of this scale, whatever rows a unit has."""
    units = ((0, 4, 5, 6, 7, 8, 9, 10), (1,), (2, 3, 11))
    with_units = {"trainer": unit_trainer(units), "dp__unit_column": "patient", "dp__unit_rows": 4}
    noisy = federation(**with_units)
    assert noisy._dp.summable(2, 1).part == 0.5 * 2.0 / 2
    clear = federation(**with_units, secure__enabled=False, secure__noise="site", dp__noise_multiplier=0.0)
    expected, noise = clear.run().tensors["prompt"], shares(noisy)["prompt"]
    _, ring = noise_of(noisy)
    summed = noisy.run().tensors["prompt"]
    torch.testing.assert_close(summed.double(), expected.double() + noise, rtol=1e-6, atol=2 / ring.scale + 1e-7)
    assert {site: report["steps"] for site, report in clear.reports.items()} == dict.fromkeys(SITES, 1.0)


def test_a_unit_moves_an_upload_by_no_more_than_the_noise_in_the_sum_assumes():
    """Gradients of norms of some hundred, C = 0.01: with all three units drawn, one replaced unit moves it by 2 P."""
    how = DpSgdConfig(0.01, 0.0, 0.5)
    start, sent = {"prompt": torch.zeros(LENGTH, WIDTH)}, []
    for units in (((0, 4, 5, 6), (1,), (2, 3)), ((7, 8, 9, 10), (1,), (2, 3))):
        trainer = unit_trainer(units, batch=3)("a", None)
        ctx = RoundContext(0, "a", True, bytes(32), seeded=True)
        sent.append(NoisyTrainer(trainer.spec, trainer.rows, how, ctx).train(start).weights["prompt"])
    part = how.summable(3, 1).part
    assert 0.5 * part < float((sent[0] - sent[1]).norm()) <= 2 * part * (1 + 1e-4)


def unit_trainer(units, batch=2):
    config = parse({"train.batch-size": batch, "train.max-steps": 1, "dp.unit-column": "patient", "dp.unit-rows": 4})
    return lambda site, ctx: UnitTrainer(local_of(12, 1 + ord(site), scale=100.0), units, config)


def test_a_federation_by_units_refuses_a_trainer_of_rows():
    with pytest.raises(ConfigError, match="every site needs a UnitTrainer"):
        federation(dp__unit_column="patient").run()


def test_sums_of_noise_under_names_that_no_site_has_sent_are_believed_and_have_no_mean():
    """Which sites had something to send under a name stands in the weights alone."""
    run = federation()
    attempt = run.unseen.begin(0, 0, SITES)
    summed = MaskedUploadCodec.from_exchange(run.exchange, 0, 32, run._claim)
    clear = {}
    for site in SITES:
        message, vector, attached = summed.receive(
            run._turn(0, site, summed.of_site(run.unseen.sites[site], attempt.plan, run.unseen.terms(attempt.plan)))
        )
        attempt.add(site, vector, attached)
        clear[site] = message.payload.scalars
    sums = run.unseen.sums(attempt, summed, clear)
    sums.check(1e6)
    slots = summed.slots.slots
    for slot in slots:
        assert sums._total[slot.start : slot.start + slot.values].any()
    loud = np.array(sums._total)
    for slot in slots:  # as if no site had sent anything but its noise
        loud[slot.start + slot.values : slot.end] = 0
    quiet = type(sums)(summed.slots, summed.ring(attempt.plan), loud, clear)
    quiet.check(1e6)
    assert not any(quiet.mean(slot.name).any() for slot in slots)


def test_a_sum_below_the_sites_that_are_counted_on_is_opened_by_nobody():
    run = federation()
    attempt = run.unseen.begin(0, 0, SITES)
    summed = MaskedUploadCodec.from_exchange(run.exchange, 0, 32, run._claim)
    for site in SITES[:3]:
        _, vector, attached = summed.receive(
            run._turn(0, site, summed.of_site(run.unseen.sites[site], attempt.plan, run.unseen.terms(attempt.plan)))
        )
        attempt.add(site, vector, attached)
    with pytest.raises(QuorumError, match="a sum needs at least 4 sites, but only 3"):
        attempt.close()
    uploads = {site: (None, attached) for site, attached in attempt.uploads.items()}
    for site in SITES[:3]:
        with pytest.raises(PolicyError, match="expected at least 4 sites in a sum"):
            run.unseen.sites[site].agree(few.agree_request(attempt.plan, SITES[:3]))
        with pytest.raises(PolicyError, match="expected at least 4 sites in a sum"):
            run.unseen.sites[site].open(few.open_request(attempt.plan, site, SITES[:3], uploads))
        assert run.unseen.sites[site].store.load().live.phase == "masked"


def test_a_cohort_below_the_sites_that_are_counted_on_is_refused():
    with pytest.raises(
        QuorumError, match="secure.min-sites, secure.threshold: expected at least 4 sites with keys, found 3"
    ):
        federation(sites=SITES[:3]).run()


AS_THEY_ARE = {"fedavg", "fedlpp", "fedprox", "fedqsn", "ffa_lora", "hetlora", "la_lora", "promptfl", "rolora"}
NOT_SO = {
    "dp_fpl", "fedex_lora", "fedotp", "fedpara", "fedper", "fedpgp", "fedrand", "fedsa_lora", "fedsp", "fixed_position",
    "flora", "random_binary", "scaffold",
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", strategies.list_methods())
def test_only_methods_that_send_trained_weights_as_they_are_have_noise_in_the_sum(name):
    """Others are refused at the site, with the upload withheld, or before. A method in neither list may be either."""
    refused = r"secure\.noise: |this method (sends a plain gradient|takes its own steps)"
    newcomer = name not in AS_THEY_ARE | NOT_SO
    with pytest.raises(ConfigError, match=refused) if name in NOT_SO else suppress(*[ConfigError] * newcomer):
        federation(name).run()


def test_sites_of_lower_ranks_send_their_zeros_with_noise_and_what_nobody_trains_stays():
    """Every site masks the shapes of the adapter, so no sum has less noise than another."""
    sites = list("abcdefgh")  # rank 3 needs six of them: two may be silent, and four must be in the sum
    ranks = {"a": 1, "b": 2, **dict.fromkeys("cdefgh", 3)}
    method = replace(strategies.create_method("hetlora"), adapter=LoraAdapter(rank=4), ranks=ranks)
    noisy, clear = (
        federation("hetlora", method=method, sites=sites, **changes)
        for changes in ({}, {"secure__enabled": False, "secure__noise": "site", "dp__noise_multiplier": 0.0})
    )
    before, expected, noise = dict(noisy.server.tensors), clear.run().tensors, shares(noisy)
    _, ring = noise_of(noisy, summands=len(sites))
    after = noisy.run().tensors
    for name, unseen in heterogeneous_ranks.rows_beyond(after, 3).items():
        wanted = torch.where(unseen, before[name].double(), expected[name].double() + noise[name])
        torch.testing.assert_close(after[name].double(), wanted, rtol=1e-6, atol=2 / ring.scale + 1e-7)
        assert float(noise[name][~unseen.expand_as(noise[name])].abs().min()) > 0
        assert torch.equal(after[name][unseen.expand_as(after[name])], before[name][unseen.expand_as(after[name])])


def step_sent(sent: float, divisor: float) -> None:
    """A turn of one step whose change was made `sent` times as large, by a method with that divisor."""
    spec = {"w": ParamSpec((2,))}
    ctx = RoundContext(0, "a", True, bytes(32), True, noise_in_sum=True)
    local = NoisyTrainer(spec, OneStep(spec, 9), DpSgdConfig(1.0, 1.0, 0.5), ctx)
    local.train({"w": torch.ones(2)})
    change = local.without_noise["w"] - local.started["w"]
    assert change.abs().min() > 0
    terms = ClientContributions(iter([Contribution("w", change * sent, 1.0)]))
    require_the_step_alone(local, None, Payload({}), terms, 4.0, divisor)


@pytest.mark.parametrize("sent,divisor", [(1.0, 1.0), (1.0, 4.0), (0.25, 4.0)])
def test_a_change_over_the_methods_divisor_is_moved_by_no_more(sent, divisor):
    step_sent(sent, divisor)


@pytest.mark.parametrize(
    "sent,divisor", [(0.25, 1.0), (0.5, 4.0), (4.0, 0.25), (4.0, 4.0), (1.0, math.inf), (1.0, 0.5)]
)
def test_anything_else_of_it_is_refused(sent, divisor):
    with pytest.raises(ConfigError, match="found one (whose divisor is|that changes w further)"):
        step_sent(sent, divisor)


def test_fedqsns_columns_are_stretched_and_what_comes_back_is_over_as_much():
    method = strategies.create_method("fedqsn", "server_rate = 0.2\nclient_rate = 0.5")
    assert method.aggregate_divisor == method.scale == 2.5
    federation("fedqsn", method).run()


def test_received_weights_above_the_bound_are_refused():
    with pytest.raises(ConfigError, match=r"received with values above secure.clip-bound, 0.01"):
        federation(secure__clip_bound=0.01, dp__learning_rate=0.001).run()


def test_a_second_look_in_a_turn_is_refused_before_it_looks():
    ctx = RoundContext(0, "a", True, bytes(32), True, noise_in_sum=True)
    spec = {"w": ParamSpec((2,))}
    local = NoisyTrainer(spec, OneStep(spec, 9), DpSgdConfig(1.0, 1.0, 0.5), ctx)
    weights = {"w": torch.zeros(2)}
    local.train(weights)
    with pytest.raises(ConfigError, match=r'secure.noise: "sum" allows only one step per client round'):
        local.train(weights)
    two = NoisyTrainer(spec, ToyTrainer(spec, 9), DpSgdConfig(1.0, 1.0, 0.5), ctx)
    with pytest.raises(ConfigError, match=r'secure.noise: "sum" allows only one step per client round'):
        two.train(weights)


def test_the_noise_of_a_run_that_is_not_deterministic_is_the_operating_systems():
    one, two = (federation(run__deterministic=False).run().tensors for _ in range(2))
    assert all(not torch.equal(one[n], two[n]) for n in one)


def test_sites_that_work_with_a_lying_server_must_sign_no_two_lists():
    """2 q > m + c: with c = 2 of m = 4, q = 3 is not enough."""
    few.run(SITES, SiteRequirements(colluding=1), threshold=3).begin(0, 0, SITES)
    with pytest.raises(QuorumError, match=r"secure\.threshold: expected more than 3 of 4 sites, found 3"):
        few.run(SITES, threshold=3, colluding=2, least=4).begin(0, 0, SITES)
    few.run(SITES, threshold=4, colluding=2).begin(0, 0, SITES)


def test_no_sum_wraps_whatever_is_drawn():
    run = federation()
    noise, ring = noise_of(run)
    assert ring.noise == discrete_gaussian.max_draw(noise.deviation(ring))
    most = math.ceil(ring.scale * ring.bound) + ring.noise
    assert 4 * most < 2**31
    with pytest.raises(ValueError, match="noise: .* is too much"):
        replace(ring, noise=2**29)
