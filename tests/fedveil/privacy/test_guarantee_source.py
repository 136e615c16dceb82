"""What an epsilon assumes of the server beside its noise."""

from __future__ import annotations

import pytest

from fedveil import strategies
from fedveil.config import parse
from fedveil.contract.privacy import OWN_SHARE, SUMMED, UNTIMED, Step, is_poisson_sampled
from fedveil.privacy.guarantee_source import guarantee_of, untimed

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
