"""APFL compared with a reference that runs every client's steps and its alpha in plain Python."""

from __future__ import annotations

import pytest

from fedveil import strategies
from fedveil.config import parse
from fedveil.errors import ConfigError
from fedveil.privacy.guarantee_source import check_guarantee
from fedveil.strategies.apfl import APFL
from tests.strategies.quadratics import federation, quadratic_twin


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_four_rounds_of_three_clients_equal_the_twin(rate):
    """alpha = 0.4 at first; the gradient of f at u is u - c, in each of two equal entries."""
    centers, counts = {"a": 1.0, "b": -2.0, "c": 4.0}, {"a": 1, "b": 2, "c": 3}
    run = federation(APFL(0.4, rate), "apfl", centers, counts)
    w, v, alpha, used = 0.5, dict.fromkeys(centers, 0.5), dict.fromkeys(centers, 0.4), set()
    for round_ in range(4):
        run.round(round_)
        sent = {}
        for site, c in centers.items():
            own = v[site] if round_ else w
            u = alpha[site] * own + (1 - alpha[site]) * w
            alpha[site] = min(1.0, max(0.05, alpha[site] - rate * 2 * (own - w) * (u - c)))
            u = quadratic_twin(alpha[site] * own + (1 - alpha[site]) * w, lambda x, c=c: x - c)
            v[site] = (u - (1 - alpha[site]) * w) / alpha[site]
            sent[site] = quadratic_twin(w, lambda x, c=c: x - c)
        w = sum(counts[s] * sent[s] for s in centers) / 6
        assert run.models()["server"]["w"].tolist() == pytest.approx([w] * 2, rel=1e-5)
        for site in centers:
            mixed = alpha[site] * v[site] + (1 - alpha[site]) * w
            assert run.models(site)["client"]["w"].tolist() == pytest.approx([mixed] * 2, rel=1e-4)
        used |= {round(a, 6) for a in alpha.values()}
    assert (len(used) == 1) == (rate == 0)


def test_an_alpha_of_one_never_sees_the_others():
    centers, counts = {"a": 1.0, "b": -2.0}, {"a": 1, "b": 1}
    run = federation(APFL(1.0), "apfl", centers, counts)
    for round_ in range(3):
        run.round(round_)
    assert run.models("a")["client"]["w"].tolist() == pytest.approx([1 - 0.5 * 0.75**6] * 2, rel=1e-5)


def test_noisy_steps_cover_a_fixed_alpha_only():
    noisy = parse({"method.name": "apfl", "dp.clip-norm": 1.0, "dp.noise-multiplier": 1.0})
    check_guarantee(APFL(), noisy, True)
    with pytest.raises(ConfigError, match="plain gradients"):
        check_guarantee(APFL(alpha_rate=0.1), noisy, True)


@pytest.mark.parametrize("fields", ["alpha = 0.0", "alpha = 1.5", "alpha = nan", "alpha_rate = -1.0"])
def test_bad_fields_are_refused(fields):
    with pytest.raises(ConfigError, match="alpha"):
        strategies.create_method("apfl", fields)
