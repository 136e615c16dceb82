"""Assumptions of an epsilon about the server, apart from its noise."""

from __future__ import annotations

import pytest

from fedveil import strategies
from fedveil.config import parse
from fedveil.contract.privacy import OWN_SHARE, SUMMED, UNTIMED, Step, is_poisson_sampled
from fedveil.errors import ConfigError
from fedveil.privacy.guarantee_source import check_guarantee, check_public_length, guarantee_of, untimed

NOISY = {"dp.clip-norm": 1.0, "dp.noise-multiplier": 2.0, "dp.epsilon": 3.0}
IN_SUM = {"train.max-steps": 1, "secure.enabled": True, "secure.noise": "sum", "secure.min-sites": 5}


@pytest.mark.parametrize(
    "name,fields,flat,assumed",
    [
        ("fedavg", "", NOISY, True),
        ("fedavg", "", NOISY | IN_SUM, True),
        ("dp_fpl", 'sampling = "poisson"', {}, True),
        ("dp_fpl", 'sampling = "disjoint"', {}, False),
        ("dp_fpl", 'sampling = "fixed"', {}, False),
        ("dp_fpl", 'sampling = "disjoint"', IN_SUM, False),
        ("dp_fpl", 'sampling = "poisson"', IN_SUM, True),
    ],
)
def test_an_epsilon_assumes_a_server_that_does_not_time_the_site_where_it_counts_on_poisson_sampling(
    name, fields, flat, assumed
):
    claim = guarantee_of(strategies.create_method(name, fields), parse(flat))
    assert claim is not None
    assert untimed(claim) == (UNTIMED if assumed else "")


def test_steps_of_a_ledger_tell_the_same():
    assert is_poisson_sampled({Step("poisson", 40, 4, 1.1): 6, Step("gaussian", 0, 0, 1.1): 1})
    assert is_poisson_sampled({Step(SUMMED, 400, 8, 2.0): 1})
    assert is_poisson_sampled({Step(OWN_SHARE, 400, 8, 2.0): 1})
    assert not is_poisson_sampled(
        {Step("gaussian", 0, 0, 1.1): 1, Step("fixed", 40, 4, 1.1): 1, Step(SUMMED, 0, 0, 2.0): 1}
    )


@pytest.mark.parametrize(
    "flat,reason",
    [
        ({"method.name": "fedavg"}, "fedavg without .dp., which has no guarantee; set dp.clip-norm"),
        ({"method.name": "dp_fpl", "method.params": 'mode = "paper"\nepsilon = 2.0'}, 'set its mode to "strict"'),
        ({"method.name": "dp_fpl", "method.params": 'mode = "code"\nepsilon = 2.0'}, 'set its mode to "strict"'),
        ({"method.name": "dp_fpl", "method.params": 'sampling = "fixed"'}, "not drawn by Poisson sampling"),
        ({"method.name": "dp_fpl", "method.params": 'sampling = "disjoint"'}, "not drawn by Poisson sampling"),
        ({"method.name": "dp_fpl", "task.examples-per-site": 9}, "task.examples-per-site = 9"),
        (
            {"method.name": "fedavg", "dp.clip-norm": 1.0, "dp.noise-multiplier": 1.0, "task.examples-per-site": 9},
            "= 9",
        ),
        ({"method.name": "fedavg", "dp.unit-column": "", "dp.unit-rows": 4}, "it requires dp.unit-column"),
        (
            {"method.name": "fedavg", "dp.unit-column": "", "dp.no-unit": "one"},
            "dp.no-unit: it requires dp.unit-column",
        ),
        ({"method.name": "fedavg", "dp.unit-column": "", "dp.unit": "row"}, "dp.unit: .* found a run without one"),
        ({"method.name": "dp_fpl", "dp.unit": "row"}, 'dp.unit: .* found dp.unit-column = "patient"'),
    ],
)
def test_a_unit_that_the_guarantee_cannot_be_for_is_refused(flat, reason):
    config = parse({"dp.unit-column": "patient", **flat})
    with pytest.raises(ConfigError, match=reason):
        check_guarantee(strategies.create_method(config.method.name, config.method.params), config, True)


@pytest.mark.parametrize(
    "noise,secure",
    [(0.0, {}), (1.0, {}), (1.0, {"secure.enabled": True, "secure.noise": "sum", "train.max-steps": 1})],
)
def test_a_unit_is_taken_with_dp_and_with_strict_dp_fpl(noise, secure):
    unit = {"dp.unit-column": "patient", "dp.unit-rows": 4, **secure}
    dp = parse({"method.name": "fedavg", "dp.clip-norm": 1.0, "dp.noise-multiplier": noise, **unit})
    assert check_guarantee(strategies.create_method("fedavg"), dp, True) is not None
    fpl = parse({"method.name": "dp_fpl", **unit})
    method = strategies.create_method("dp_fpl", f"noise_local = {noise}\nnoise_global = {noise}")
    assert check_guarantee(method, fpl, True) is not None


@pytest.mark.parametrize(
    "task", ["text-generation", "preference", "text-classification", "token-classification", "vision-language"]
)
def test_a_guarantee_needs_a_length_that_does_not_depend_on_the_rows(task):
    config = parse({"task.name": task, "method.name": "fedavg", **NOISY})
    claim = guarantee_of(strategies.create_method("fedavg"), config)
    with pytest.raises(
        ConfigError, match=r"task.max-tokens: a privacy claim requires a length, .*; add task.max-tokens = 512"
    ):
        check_public_length(claim, config)
    check_public_length(claim, parse(config.flat() | {"task.max-tokens": 64}))
    check_public_length(None, config)
    check_public_length(claim, parse(config.flat() | {"task.name": "image-classification"}))


@pytest.mark.parametrize("name", ["ditto", "apfl"])
def test_noise_in_the_sum_is_refused_for_a_method_that_trains_twice_before_anything_is_charged(name):
    method = strategies.create_method(name)
    assert method.trainings == 2
    keys = NOISY | {"method.name": name, "task.max-tokens": 32}
    assert check_guarantee(method, parse(keys), True) is not None
    with pytest.raises(ConfigError, match=f'^secure.noise: expected "site" with {name}, which trains 2 times'):
        check_guarantee(method, parse(keys | IN_SUM), True)
