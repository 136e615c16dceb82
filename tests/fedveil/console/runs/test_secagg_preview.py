"""What `fedveil explain` says of a run with secure aggregation is what such a run does."""

from __future__ import annotations

import pytest
import torch

from fedveil import rng, strategies
from fedveil.config import parse
from fedveil.console.main import main
from fedveil.console.runs.secagg_preview import MaskedUploadPreview
from fedveil.contract.method import RoundContext
from fedveil.contract.param_spec import param_specs_of
from fedveil.errors import ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.secagg.adversary_model import BROADCASTS, DEVIATING, SINGLE_SITE, TWO_ROUNDS
from fedveil.federation.secagg.fixed_point import FixedPointRing
from fedveil.federation.secagg.in_process import InProcessSecureSums, secagg_config_of
from fedveil.federation.secagg.masked_upload import MaskedUploadCodec
from tests.conftest import ToyTrainer

ON = {"secure.enabled": True}


def exchange_of(spec, name: str = "fedavg", fields: str = "") -> MessageExchange:
    return MessageExchange(strategies.create_method(name, fields), name, spec)


@pytest.mark.parametrize("config", [{}, {"secure.ring-bits": 64}, {"secure.threshold": 4, "secure.max-weight": 9}])
def test_bytes_and_threshold_are_those_of_a_real_upload(config, lora_spec, lora_weights):
    config = parse(ON | {"cohort.sites": 5, **config})
    exchange = exchange_of(lora_spec)
    masked = MaskedUploadPreview.from_exchange(exchange, config)
    names = ["a", "b", "c", "d", "e"]
    sums = InProcessSecureSums("r", secagg_config_of(config.secure), names)
    attempt = sums.begin(0, 0, names)
    plan = attempt.plan
    assert (plan.neighbours, plan.quorum, plan.threshold) == (masked.neighbours, masked.quorum, masked.threshold)
    assert FixedPointRing.from_plan(attempt.plan) == masked.ring
    summed = MaskedUploadCodec.from_exchange(exchange, 0, config.secure.ring_bits)
    state = exchange.method.init(param_specs_of(lora_weights), lora_weights, rng.initial_stream(0, "weights"))
    ctx = RoundContext(0, "a", True, b"s" * 32)
    turn = summed.of_site(sums.sites["a"], plan, sums.terms(plan))
    _, parts = turn(exchange.broadcast(state, ctx), None, ToyTrainer(lora_spec), ctx)
    fields = sum(map(len, parts)) - 1000
    assert masked.length * config.secure.ring_bits // 8 < sum(map(len, parts))
    assert fields < masked.bytes


def test_rounding_moves_a_mean_by_no_more_than_it_says():
    ring = FixedPointRing(32, 5, 1, 64.0)
    torch.manual_seed(3)
    values = [torch.rand(1000) * 128 - 64 for _ in range(5)]
    total = torch.zeros(1000, dtype=torch.float64)
    import numpy as np

    for value in values:
        into = np.zeros(1000, ring.dtype)
        ring.encode(value, 1, None, into)
        total += ring.decode(into)
    exact = torch.stack([value.double() for value in values]).sum(0)
    assert float(((total - exact) / 5).abs().max()) <= ring.step


def test_in_plain_words(tmp_path, capsys):
    policy = tmp_path / "site-policy.toml"
    permits = 'methods = ["fedavg"]\n[permits]\n"cohort.sites" = 7\n"secure.clip-bound" = 8.0\n'
    demands = f'require-secure = true\nmin-cohort = 5\nroster = "sha256:{"ab" * 32}"\n'
    policy.write_text(demands + permits)
    sets = ["secure.enabled=true", "secure.min-sites=5", "secure.roster=/roster/roster.json", "secure.clip-bound=8"]
    chosen = [
        "explain",
        *(word for pair in ["method.name=fedavg", "cohort.sites=7", *sets] for word in ("--set", pair)),
    ]
    assert main([*chosen, "--policy", str(policy)]) == 0
    stdout = capsys.readouterr().out
    for words in (
        "masked for a sum with other sites", "not sent: its number of examples",
        "values are clipped to +-8 here; rounding changes a mean by at most 1.3e-08", "every site counts equally",
        "With 7 sites, of which 5 must agree to a sum before its masks are removed, and sums of at least 5 sites",
        "Holds against an honest but curious server and up to 3 sites with it.",
        "policy permits it", TWO_ROUNDS, DEVIATING,  # a policy that admits any code
    ):  # fmt: skip
        assert words in stdout, words
    assert BROADCASTS not in stdout
    assert "plus the number of examples" not in stdout
    assert SINGLE_SITE not in stdout
    policy.write_text(permits.replace("[permits]", '[permits]\n"secure.enabled" = true\n"secure.min-sites" = 5\n'
                                      '"secure.roster" = "/roster/roster.json"'))  # fmt: skip
    assert main([*chosen, "--policy", str(policy)]) == 0
    assert DEVIATING in capsys.readouterr().out
    policy.write_text(demands.replace("5", "6", 1) + permits)
    assert main([*chosen, "--policy", str(policy)]) == 1
    assert "FORBIDS it: secure.min-sites: this site permits at least 6, found 5" in capsys.readouterr().out


def test_a_sum_of_the_whole_cohort_alone(capsys):
    sets = ["secure.enabled=true", "secure.whole-cohort=true", "secure.min-sites=5", "cohort.sites=7"]
    chosen = [word for pair in ["method.name=fedavg", *sets] for word in ("--set", pair)]
    assert main(["explain", *chosen]) == 0
    stdout = capsys.readouterr().out
    for words in (
        "With 7 sites, all of which must send an upload, since no mask can be removed without it, and sums of at",
        "Holds against an honest but curious server and up to 3 sites with it.",
    ):
        assert words in stdout, words


@pytest.mark.parametrize(
    "config,sites,reason",
    [
        (
            {"secure.whole-cohort": True, "secure.threshold": 4},
            7,
            "secure.threshold: expected 0 with secure.whole-cohort",
        ),
        ({"secure.threshold": 4}, 3, "secure.threshold: expected at least 4 sites with keys, found 3; .* with --sites"),
        ({"secure.threshold": 3}, 6, r"secure\.threshold: expected more than 3 of 6 sites, found 3"),
        ({"secure.max-colluders": 3}, 4, r"2 sites more than the 3 that may collude \(secure\.max-colluders\)"),
        ({}, 2, "--sites: expected at least 3, the minimum for the run to start, found 2"),
        ({"aggregate.rule": "median"}, 0, "aggregate.rule: expected 'mean' with secure.enabled"),
        ({"secure.max-weight": 1_000_000}, 2000, "secure.ring-bits: expected at most"),
    ],
)
def test_a_run_that_cannot_be_is_refused_by_its_key(config, sites, reason, lora_spec):
    with pytest.raises(ConfigError, match=reason):
        MaskedUploadPreview.from_exchange(exchange_of(lora_spec), parse(ON | config), sites)
