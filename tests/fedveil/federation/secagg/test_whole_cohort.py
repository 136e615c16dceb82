"""`secure.whole-cohort`: one exchange, masks of pairs alone, and a sum of all sites of the cohort or none.

A site masks once a round and neither signs nor opens anything, so a lying server has its plans and its cohorts left.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from fedveil.config import AggregateConfig, CohortConfig, SecureConfig
from fedveil.errors import ConfigError, PolicyError, QuorumError, StateError, WireError
from fedveil.federation import aggregation_rules
from fedveil.federation.secagg import derivations, entry_plan, mask_streams, plan_checks
from fedveil.federation.secagg.adversary_model import AdversaryModel
from fedveil.federation.secagg.messages import AgreeRequest, OpenRequest
from fedveil.federation.secagg.plan import AttemptPlan
from fedveil.federation.secagg.plan_checks import SiteRequirements
from fedveil.federation.secagg.server import SecAggConfig
from fedveil.federation.secagg.state import MemorySecAggStore
from fedveil.testing.lying_server import LyingServer, remembered_signatures, site_names, terms_of, with_fields
from fedveil.testing.lying_server_games import LyingServerGame
from fedveil.testing.lying_server_search import (
    WHOLE,
    WHOLE_AGAIN,
    LyingServerScenario,
    find_violation,
    search_for_violation,
)
from tests.fedveil.federation.secagg import sites as s


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    with remembered_signatures():
        yield
    logging.disable(logging.NOTSET)


def whole_run(count: int, **settings):
    return s.run(s.names(count), is_whole=True, **settings)


# The honest server


@pytest.mark.parametrize("count", [3, 4, 7])
def test_the_masks_of_all_pairs_cancel_without_another_exchange(count):
    local, vectors = whole_run(count), {site: s.drawn(9, i) for i, site in enumerate(s.names(count))}
    for round_ in range(2):
        attempt = local.begin(round_, 0, s.names(count))
        uploads = s.masked(local, attempt, vectors)
        s.add(attempt, uploads)
        attempt.close()
        assert not attempt.needs_agreement
        assert attempt.open_requests() == {}
        assert np.array_equal(attempt.total(), sum(vectors.values()))
        assert len({hidden.tobytes() for hidden, _ in uploads.values()}) == count
        for site, attached in attempt.uploads.items():
            assert (attached.own, attached.rows, attached.shares) == ("", {}, {})
            local.coordinator.keep(site, attempt.plan, attached.next)


def test_an_upload_is_the_vector_and_the_masks_of_its_pairs_by_name():
    """By hand: first adds, second subtracts, and no further mask."""
    local, vector = whole_run(3), s.drawn(9, 1)
    attempt = local.begin(0, 0, s.names(3))
    streams = local.pair_masks("s01")
    hidden = vector.copy()
    local.mask("s01", attempt.plan, hidden)
    assert [streams[other].sign for other in ("s00", "s02")] == [1, -1]
    mask_streams.add_masks(hidden, streams.values())
    assert np.array_equal(hidden, vector)


@pytest.mark.parametrize("missing", [("s02",), ("s00", "s03")])
def test_without_one_upload_there_is_no_sum_and_the_site_is_named(missing):
    local = whole_run(4)
    attempt = local.begin(0, 0, s.names(4))
    vectors = {site: s.drawn(9, i) for i, site in enumerate(s.names(4)) if site not in missing}
    s.add(attempt, s.masked(local, attempt, vectors))
    with pytest.raises(QuorumError, match=f"secure.whole-cohort: the uploads of all .* from {', '.join(missing)};"):
        attempt.close()
    assert attempt.in_sum == ()
    with pytest.raises(QuorumError):  # not by leaving the site out either
        local.begin(0, 1, s.names(2))


def test_two_ends_that_name_different_secrets_are_found_before_the_sum():
    local = whole_run(3)
    attempt = local.begin(0, 0, s.names(3))
    uploads = s.masked(local, attempt, {site: s.drawn(9, 1) for site in s.names(3)})
    hidden, attached = uploads["s01"]
    other = s.changed(attached, pairs=attached.pairs | {"s00": "0" * 64})
    s.add(attempt, uploads | {"s01": (hidden, s.signed(other, "s01", local.sites["s01"].signing_key))})
    with pytest.raises(QuorumError, match="name different secrets"):
        attempt.close()


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_upload_with_a_mask_of_its_own_or_without_one_is_refused_where_it_does_not_belong(is_whole):
    local = s.run(s.names(3), is_whole=is_whole)
    attempt = local.begin(0, 0, s.names(3))
    hidden, attached = s.masked(local, attempt, {"s00": s.drawn(9, 1)})["s00"]
    other = s.changed(attached, own="1" * 64 if is_whole else "")
    with pytest.raises(WireError, match="own in addition to its pairwise masks"):
        attempt.add("s00", hidden, s.signed(other, "s00", local.sites["s00"].signing_key))


def test_more_sites_than_have_masks_in_all_pairs_are_refused():
    settings = SecAggConfig(is_whole=True)
    settings.check_cohort(100)
    with pytest.raises(QuorumError, match="secure.whole-cohort: it allows at most 100 sites, but there are 101"):
        settings.check_cohort(101)
    with pytest.raises(QuorumError, match="2 sites more than"):
        SecAggConfig(is_whole=True, least=2, colluding=2).check_cohort(3)
    with pytest.raises(QuorumError, match="at least 4 sites with keys"):
        SecAggConfig(is_whole=True, least=4).check_cohort(3)


# A site


def masked_site(**plan) -> tuple[LyingServer, AttemptPlan]:
    server = LyingServer(site_names(4), demands=SiteRequirements())
    shown = server.plan(**WHOLE, **plan)
    assert server.mask("s00", shown)
    return server, shown


def test_a_site_masks_once_a_round_and_has_nothing_to_sign_or_to_open():
    server, plan = masked_site()
    state = server.sites["s00"].store.load()
    assert (state.live, state.fence.masked, state.fence.signed) == (None, (0, 0), 0)
    everyone = tuple(site_names(4))
    with pytest.raises(PolicyError, match="last masked"):
        server.sites["s00"].agree(AgreeRequest(plan=plan, table="", in_sum=everyone))
    with pytest.raises(PolicyError, match="last masked"):
        server.sites["s00"].open(OpenRequest(plan=plan, table="", in_sum=everyone, agreed={}, rows={}))
    for numbers in (WHOLE, {}):  # not for a plan of the other kind either
        again = server.plan(attempt=1, **numbers)
        with pytest.raises(PolicyError, match="this site agreed to a sum in round 0"):
            server.sites["s00"].mask(again, terms_of(again, server.roster), s.drawn(4, 1))
    assert server.mask("s00", server.plan(round_=1, **WHOLE))


def test_a_site_that_signed_a_sum_of_the_round_masks_for_no_whole_cohort_in_it():
    server = LyingServer(site_names(4), demands=SiteRequirements())
    plan = server.plan()
    assert server.mask("s00", plan)
    assert server.agree("s00", plan, site_names(4))
    assert server.mask("s00", server.plan(attempt=1, **WHOLE)) is None


def test_a_site_that_dies_at_its_write_has_masked():
    class Dying(MemorySecAggStore):
        def save(self, kept):
            super().save(kept)
            if kept.fence.masked:
                raise StateError("killed")

    server = LyingServer(site_names(4), demands=SiteRequirements(), stores={"s00": Dying()})
    plan = server.plan(**WHOLE)
    assert server.mask("s00", plan) is None
    for attempt in range(3):
        assert server.mask("s00", server.plan(attempt=attempt, **WHOLE)) is None


@pytest.mark.parametrize("is_whole", [True, False])
def test_the_run_config_says_which_kind_a_plan_is_and_not_its_numbers(is_whole):
    server = LyingServer(site_names(4), demands=SiteRequirements())
    plan = server.plan(**(WHOLE if is_whole else {}))
    terms = terms_of(plan, server.roster)
    server.sites["s00"].begin(plan, terms)
    with pytest.raises(WireError, match="quorum: expected"):
        server.sites["s00"].begin(plan, replace(terms, is_whole=not is_whole))


@pytest.mark.parametrize(
    "inside,outside,demands",
    [
        ({"least": 4}, {"least": 5}, {}),
        ({"colluding": 2}, {"colluding": 3}, {}),
        ({"colluding": 2}, {"colluding": 1}, {"colluding": 2}),
        ({}, {"cohort": site_names(3)}, {"min_cohort": 4}),
        ({"least": 2, "noise": "sum"}, {"least": 1, "noise": "sum"}, {}),
    ],
)
def test_each_number_of_such_a_plan_is_judged_at_its_edge(inside, outside, demands):
    server = LyingServer(site_names(4), demands=SiteRequirements(**demands))
    for changes, refused in ((inside, False), (outside, True)):
        plan = server.plan(**(WHOLE | changes))
        if not refused:
            plan_checks.require_numbers(plan, server.sites["s00"].demands)
            continue
        with pytest.raises(PolicyError, match="expected at least"):
            plan_checks.require_numbers(plan, server.sites["s00"].demands)


@pytest.mark.parametrize(
    ("numbers", "key"), [(WHOLE | {"least": 5}, "secure.min-sites"), ({"quorum": 5}, "secure.threshold")]
)
def test_a_cohort_that_is_too_small_names_the_key_that_asks_for_more(numbers, key):
    plan = LyingServer(site_names(4)).plan(**numbers)
    with pytest.raises(PolicyError, match=f"^{key}: sites of the cohort: expected at least 5 with 4 sites"):
        plan_checks.require_numbers(plan, SiteRequirements())


def test_a_policy_that_asks_how_many_must_agree_refuses():
    plan = LyingServer(site_names(4)).plan(**WHOLE)
    plan_checks.require_numbers(plan, SiteRequirements(min_threshold=1))
    with pytest.raises(PolicyError, match="min-threshold: quorum: expected at least 2 .*, found 0"):
        plan_checks.require_numbers(plan, SiteRequirements(min_threshold=2))


@pytest.mark.parametrize("changes", [{"threshold": 3}, {"quorum": 3}, {"neighbours": 2}])
def test_numbers_of_both_kinds_are_no_plan(changes):
    plan = LyingServer(site_names(4)).plan(**WHOLE)
    with pytest.raises(ValueError, match="a quorum and a threshold, or neither"):
        with_fields(plan, **changes)


# A server that lies


@pytest.mark.long
def test_every_choice_of_two_cohorts_of_a_round():
    """Exhaustive for four sites: two attempts, of any three or four sites, and for which of them each site masks."""
    for colluders in (0, 1):
        names, seen = site_names(4), Counter()
        game = LyingServerGame(names[colluders:], names[:colluders], demands=SiteRequirements())
        cohorts = [c for size in (3, 4) for c in itertools.combinations(names, size) if {*names[:colluders]} <= {*c}]
        for first, second in itertools.product(cohorts, repeat=2):
            for choice in itertools.product((0, 1), repeat=len(game.honest)):
                game.start_over()
                for attempt, cohort in enumerate((first, second)):
                    plan = game.plan(attempt=attempt, cohort=cohort, **(WHOLE | {"colluding": colluders}))
                    game.begin(plan, [site for site, at in zip(game.honest, choice, strict=True) if at == attempt])
                game.ask_everything({plan.digest: [tuple(plan.cohort)] for plan in game.plans})
                assert not find_violation(game, colluders), (first, second, choice)
                seen[game.fewest()] += 1
        print(f"whole cohorts, {colluders} colluding: {seen.total()} games, fewest {dict(seen)}")
        assert min(seen.keys() - {0}) == 3 - colluders


MIXED = {
    "whole cohorts": LyingServerScenario(5, 1, WHOLE_AGAIN, cohorts=4, demands={"min_threshold": 1}),
    "two colluding": LyingServerScenario(6, 2, WHOLE_AGAIN, cohorts=5, demands={"min_threshold": 1}),
    "first one, then a list": LyingServerScenario(
        5, 1, (WHOLE, {"attempt": 1}), cohorts=4, demands={"min_threshold": 1}
    ),
    "first a list, then one": LyingServerScenario(
        5, 1, ({}, {"attempt": 1, **WHOLE}), cohorts=4, demands={"min_threshold": 1}
    ),
    "another message to the others": LyingServerScenario(
        5, 1, WHOLE_AGAIN, is_poisoned=True, demands={"min_threshold": 1}
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_finds_nothing_inside_the_claim(name):
    played, found, seen = search_for_violation(MIXED[name], 40, seed=4)
    print(f"whole: {name}: {found} after {played} games, fewest {dict(seen)}")
    assert (played, found) == (40, 0)


def test_finds_one_honest_site_less_with_one_colluder_more():
    scenario = LyingServerScenario(5, 1, (WHOLE,), extra_colluders=1, demands={"min_threshold": 1})
    _, found, seen = search_for_violation(scenario, 40)
    assert found == 3, seen


# What is said of it, and what the run config allows


def test_what_holds_needs_no_shares():
    model = AdversaryModel(0, 0, 5, 1, 0, False, True, None)
    assert (model.curious, model.fewest) == (3, 5)
    assert model.words[0] == "Holds against an honest but curious server and up to 3 sites with it."
    with pytest.raises(ValueError, match="no quorum"):
        AdversaryModel(0, 3, 5, 1, 0, False, True, None)


def test_an_entry_needs_no_more_sites_than_a_sum():
    """All of the cohort are in the sum, so no silent site has to be made up for."""
    secure = SecureConfig(enabled=True, whole_cohort=True, min_sites=3)
    assert [entry_plan.required_uploads(secure, m) for m in (3, 10)] == [3, 10]
    assert entry_plan.required_uploads(SecureConfig(enabled=True), 10) == 7


@pytest.mark.parametrize("key,value", [("threshold", 3), ("graph-degree", 4)])
def test_keys_of_lists_and_shares_are_refused_beside_it(key, value):
    secure = SecureConfig(**{"enabled": True, "whole-cohort": True, key: value})
    with pytest.raises(ConfigError, match=f"secure.{key}: expected 0 with secure.whole-cohort"):
        aggregation_rules.check_secure(secure, AggregateConfig(), CohortConfig())


def test_no_secret_of_a_pair_leaves_a_site():
    """An upload has digests of the pairs' secrets and nothing from which one follows."""
    server, plan = masked_site()
    (upload,) = server.uploads
    assert upload.attached.pairs.keys() == {"s01", "s02", "s03"}
    assert server.shares == {}
    assert derivations.pair_secret_digest(bytes(16), plan.digest, "s00", "s01") not in upload.attached.pairs.values()
