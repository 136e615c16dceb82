"""A federation whose server steps do not wait for slow sites, against a twin in plain floats."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil import rng
from fedveil.config import parse
from fedveil.contract.method import FederatedState, RoundContext
from fedveil.contract.param_spec import ParamSpec
from fedveil.errors import ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.federation.update_buffer import SitesInFlight
from fedveil.strategies import create_method
from fedveil.strategies.fedavg import FedAvg
from fedveil.wire.capture import MessageCapture
from tests.strategies.quadratics import Quadratic, quadratic_twin

SPEC = {"w": ParamSpec((2,))}
CENTERS = {"a": -1.0, "b": 1.0, "c": 2.0, "d": 4.0}
COUNTS = {"a": 3, "b": 1, "c": 2, "d": 2}


def federation(method="fedavg", params="", seconds=None, **config) -> InProcessFederation:
    made = create_method(method, params)
    flat = {"run.deterministic": True, "method.name": method, "cohort.min-sites": 1, "run.rounds": 6, **config}
    state = made.init(SPEC, {"w": torch.full((2,), 0.5)}, rng.initial_stream(0, "x"))
    return InProcessFederation(
        MessageExchange(made, method, SPEC),
        parse(flat),
        lambda site, ctx: Quadratic(SPEC, CENTERS[site], COUNTS[site]),
        list(CENTERS),
        state,
        site_seconds=seconds or {},
    )


def twin(size: int, most: int, seconds: dict[str, float], steps: int):
    """The server's weight, the accepted sites' staleness and the time after each step."""
    states, flying, clock, seen = [0.5], {}, 0.0, []
    for version in range(steps):
        for site in CENTERS:
            if site not in flying:
                flying[site] = (clock + seconds.get(site, 1.0), version)
        accepted, discarded = {}, set()
        while len(accepted) < size:
            site = min(flying, key=lambda s: (flying[s][0], list(CENTERS).index(s)))
            at, of = flying.pop(site)
            clock = max(clock, at)
            if version - of > most:
                discarded.add(site)
            else:
                accepted[site] = of
        total = sum(COUNTS[site] for site in accepted)
        now = states[-1]
        for site, of in accepted.items():
            change = quadratic_twin(states[of], lambda w, c=CENTERS[site]: w - c) - states[of]
            now += COUNTS[site] / total / math.sqrt(1 + version - of) * change
        states.append(now)
        seen.append((now, {site: version - of for site, of in accepted.items()}, discarded, clock))
    return seen


@settings(max_examples=12)
@given(
    st.integers(1, 4),
    st.integers(0, 3),
    st.lists(st.sampled_from([0.5, 1.0, 1.7, 6.0]), min_size=4, max_size=4),
)
def test_every_step_equals_the_twin(size, most, speeds):
    seconds = dict(zip(CENTERS, speeds, strict=True))
    ours = federation(seconds=seconds, **{"cohort.buffer-size": size, "cohort.max-staleness": most})
    for round_, (weight, staleness, discarded, clock) in enumerate(twin(size, most, seconds, 6)):
        ours.round(round_)
        assert ours.server.tensors["w"].tolist() == pytest.approx([weight] * 2, rel=1e-5, abs=1e-5)
        assert (ours.staleness, set(ours.discarded), ours.clock) == (staleness, discarded, pytest.approx(clock))
        assert len(ours.in_flight.states) <= 5


@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedprox"])
def test_all_sites_of_equal_speed_are_the_synchronous_run_bit_for_bit(method):
    rounds, steps = federation(method), federation(method, **{"cohort.buffer-size": 4})
    assert torch.equal(rounds.run().tensors["w"], steps.run().tensors["w"])
    assert (rounds.clock, steps.clock) == (6.0, 6.0)
    assert rounds.upload_bytes == steps.upload_bytes


def test_one_slow_site_does_not_set_the_pace():
    seconds = {"d": 10.0}
    rounds, steps = federation(seconds=seconds), federation(seconds=seconds, **{"cohort.buffer-size": 3})
    rounds.run()
    steps.run()
    assert (rounds.clock, steps.clock) == (60.0, 6.0)
    assert steps.in_flight.rounds == {"d": 0}


def test_a_step_is_the_current_round_s_even_if_its_last_upload_is_late(monkeypatch):
    real, rounds = FedAvg.server_update, []
    monkeypatch.setattr(
        FedAvg,
        "server_update",
        lambda self, server, sums, ctx: (rounds.append(ctx.round), real(self, server, sums, ctx))[1],
    )
    steps = federation(seconds={"d": 2.0}, **{"cohort.buffer-size": 4})
    steps.run()
    late = federation(seconds={"a": 1.2, "d": 2.9}, **{"cohort.buffer-size": 2})
    late.run()
    assert rounds == [*range(6), *range(6)]


def test_a_late_site_counts_once_and_is_asked_again():
    steps = federation(seconds={"d": 2.5}, **{"cohort.buffer-size": 3})
    seen = []
    steps.run(lambda ours, round_: seen.append((ours.staleness.get("d"), "d" in ours.asked)))
    assert seen == [(None, True), (None, False), (2, False), (None, True), (None, False), (2, False)]


def test_an_upload_that_is_too_old_is_discarded_with_its_private_state(tmp_path):
    """d's upload comes two steps late; its own model must stay as it was before that client round."""
    steps = federation("ditto", seconds={"d": 2.5}, **{"cohort.buffer-size": 3, "cohort.max-staleness": 1})
    steps.tap, heard = MessageCapture(tmp_path / "tap"), []
    steps.on_message = lambda data, ctx, direction: heard.append((ctx.round, ctx.client, direction))
    for round_ in range(3):
        steps.round(round_)
    assert list(steps.staleness) == ["a", "b", "c"]
    size, reason = steps.discarded["d"]
    assert size > 0
    assert reason == "it is 2 server steps old, above the limit of 1 (cohort.max-staleness)"
    assert steps.private.get("d") is None
    assert "d" not in steps.participated
    assert ("d" in {site for _, site, way in heard if way == "up"}, (0, "d", "down") in heard) == (False, True)


def test_a_resumed_run_asks_every_site_again():
    steps = federation(seconds={"d": 10.0}, **{"cohort.buffer-size": 3})
    steps.round(0)
    steps.restore(steps.server, steps.participated, steps.secrets, {})
    steps.round(1)
    assert steps.asked == list(CENTERS)


ROUNDS = {"cohort.buffer-size": 3}
REFUSED = [
    ("fedavg", {"cohort.max-staleness": 3}, "cohort.max-staleness: expected 10 with cohort.buffer-size = 0"),
    ("fedavg", ROUNDS | {"cohort.fraction": 0.5}, "cohort.fraction: expected 1.0 with cohort.buffer-size"),
    ("fedavg", ROUNDS | {"cohort.max-norm-ratio": 2.0}, "cohort.max-norm-ratio: expected 0.0 with cohort.buffer-size"),
    ("fedavg", ROUNDS | {"cohort.min-sites": 4}, "cohort.buffer-size: expected at least cohort.min-sites, 4, found 3"),
    ("fedavg", {"cohort.buffer-size": 5}, "cohort.buffer-size: expected at most the number of sites, 4"),
    ("fedavg", ROUNDS | {"aggregate.rule": "multi-krum", "aggregate.num-byzantine": 1},
     "cohort.buffer-size: expected at least 5 for multi-krum"),
    ("scaffold", ROUNDS, "cohort.buffer-size: expected 0 with scaffold, found a method that adds changes of control"),
    ("fedavg", ROUNDS | {"secure.enabled": True, "secure.min-sites": 3, "secure.clip-bound": 1.0},
     "cohort.buffer-size: expected 0 with secure.enabled .a sum needs one cohort whose sites all got the same state"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "config", "message"), REFUSED, ids=[m[:30] + str(len(c)) for _, c, m in REFUSED])
def test_what_does_not_go_with_a_buffer_is_refused(method, config, message):
    with pytest.raises(ConfigError, match=message):
        federation(method, **config)


def test_fedrand_with_own_first_factors_does_not_go_with_a_buffer():
    assert create_method("fedrand", "").stale_upload_conflict == ""
    own = create_method("fedrand", 'init_factors = "independent"')
    assert "its own random factors" in own.stale_upload_conflict


@pytest.mark.parametrize("seconds", [{"e": 1.0}, {"a": 0.0}, {"a": math.inf}])
def test_speeds_of_other_sites_and_without_end_are_refused(seconds):
    with pytest.raises(ConfigError, match="site_seconds: "):
        federation(seconds=seconds)


def test_a_silent_site_is_not_asked_and_too_few_are_refused():
    steps = federation(**{"cohort.buffer-size": 3})
    steps.silent = {"a"}
    steps.round(0)
    assert list(steps.staleness) == ["b", "c", "d"]
    steps.silent = {"a", "b"}
    with pytest.raises(ConfigError, match="cohort.buffer-size: expected at most 2, the number of sites that send"):
        steps.round(1)


@pytest.mark.parametrize("rule", ["median", "trimmed"])
def test_robust_rules_see_moved_uploads(rule):
    """With K = 3 uploads after the same start, the median is one of the moved values."""
    steps = federation(seconds={"d": 1.5}, **{"cohort.buffer-size": 3, "aggregate.rule": rule})
    steps.run()
    assert torch.isfinite(steps.server.tensors["w"]).all()
    assert steps.staleness


def test_states_are_kept_only_while_they_can_be_needed():
    flight, states = SitesInFlight(2), [FederatedState({}) for _ in range(5)]
    flight.begin(0, states[0])
    flight.ask(ctx := RoundContext(0, "slow", True, bytes(32)))
    with pytest.raises(ValueError, match="slow: this site already has an open request"):
        flight.ask(ctx)
    for version in range(1, 5):
        flight.begin(version, states[version])
        assert set(flight.states) == ({0, version} if version <= 2 else {version})
    assert (flight.rounds, flight.is_too_stale(flight.land("slow")), flight.rounds) == ({"slow": 0}, True, {})
