"""The attacks that read one site's upload before plans, rows and lists were bound to each other, against real sites."""

from __future__ import annotations

import numpy as np
import pytest

from fedveil.errors import PolicyError, QuorumError, WireError
from fedveil.federation.secagg.unmasking import UnmaskingAttempt
from fedveil.testing.lying_server import (
    POISONED_BROADCAST,
    TRUE_BROADCAST,
    LyingServer,
    terms_of,
    true_vector,
    with_fields,
)

HONEST, COLLUDER = ["a", "b", "c"], "z"
ALL = [*HONEST, COLLUDER]


@pytest.fixture
def server() -> LyingServer:
    return LyingServer(HONEST, [COLLUDER])


def test_decoy_plans_and_a_list_for_each_holder(server):
    """Two holders open other lists of one plan, and the target opens what is missing for plans nobody began."""
    plan = server.plan()
    for site in HONEST:
        assert server.mask(site, plan)
    assert server.open("b", plan, "abz") is None
    assert server.open("c", plan, "acz") is None
    ready = {site: server.prekey(site) for site in ALL}
    members = {"a": ready["a"], "b": plan.by_name["b"], "c": plan.by_name["c"], "z": ready["z"]}
    decoys = [
        with_fields(plan, round=round_, members=[members[site].model_dump() for site in ALL]) for round_ in (1, 2)
    ]
    for decoy, in_sum in zip(decoys, ("acz", "abz"), strict=True):
        for holder in HONEST:
            assert server.agree(holder, decoy, in_sum) is None
            assert server.open(holder, decoy, in_sum, rows=server.rows(holder, decoy, in_sum, plan)) is None
    assert server.sums().attack() == 0
    assert server.agree("a", plan, "abz")
    assert server.agree("b", plan, "abz")
    assert server.agree("c", plan, "acz")
    assert server.open("a", plan, "abz")
    assert server.open("b", plan, "abz")
    assert server.open("c", plan, "acz") is None
    assert server.sums().attack() == 2


def test_decoy_plan_that_the_target_masks_for(server):
    """The target masks for a decoy as well. The others open the sum of all three, and nothing of the decoy."""
    plan = server.plan()
    for site in HONEST:
        assert server.mask(site, plan)
    ready = {site: server.prekey(site) for site in ALL}
    old = {site: plan.by_name[site] for site in ("b", "c")}
    decoy = with_fields(plan, round=1, members=[(old.get(site) or ready[site]).model_dump() for site in ALL])
    assert server.mask("a", decoy)
    for holder in HONEST:
        for shown in (plan, decoy):
            server.agree(holder, shown, ALL)
            server.open(holder, shown, ALL)
    assert server.sums(lambda upload: upload.plan is decoy).attack() == 0
    assert server.sums().attack() == 3


def test_inconsistent_broadcasts_give_noise(server):
    """The target gets the weights, the others zeros: the sum of their uploads would be the target's, without masks."""
    plan = server.plan(broadcast=TRUE_BROADCAST)
    poisoned = with_fields(plan, broadcast=POISONED_BROADCAST)
    uploads = [server.mask("a", plan), server.mask("b", poisoned), server.mask("c", poisoned)]
    honest = UnmaskingAttempt(plan)
    honest.add("a", uploads[0].vector, uploads[0].attached)
    for upload in uploads[1:]:
        with pytest.raises(WireError, match="is for a different plan"):
            honest.add(upload.site, upload.vector, upload.attached)
    with pytest.raises(QuorumError):
        honest.close()
    for site, shown in (("a", plan), ("b", poisoned), ("c", poisoned)):
        assert server.agree(site, shown, ALL)
    for site, shown in (("a", plan), ("b", poisoned), ("c", poisoned)):
        server.open(site, shown, ALL)
    assert server.sums().attack() == 0
    total = sum((upload.vector for upload in uploads), np.zeros(4, np.uint32))
    assert not np.array_equal(total, true_vector("a", plan))


def test_a_holder_says_nothing_before_it_masks_and_nothing_without_itself(server):
    plan = server.plan()
    never_begun = with_fields(plan, round=99, attempt=7)
    for shown, in_sum in ((plan, "bcz"), (plan, ALL), (never_begun, "bcz"), (never_begun, ALL)):
        assert server.agree("a", shown, in_sum) is None
        assert server.open("a", shown, in_sum) is None
    for site in HONEST:
        assert server.mask(site, plan)
    assert server.open("a", plan, "bcz") is None
    assert server.agree("a", plan, "bcz") is None
    assert server.sums().attack() == 0


def begin(server: LyingServer, round_: int, states: dict[str, str]) -> dict[str, bool]:
    """Show a plan to all honest sites; return which of them masked."""
    plan = server.plan(round_=round_)
    masked = {}
    for site, state in states.items():
        terms = terms_of(plan, server.roster, state=state)
        try:
            server.sites[site].begin(plan, terms)
        except PolicyError:
            masked[site] = False
            continue
        masked[site] = server.mask(site, plan, terms) is not None
    return masked


def test_private_state_is_not_reset_once_a_site_went_on_from_it(server):
    """All get one broadcast; the target continues from its private factors, and the others are told to start over."""
    reset = {"a": "continues", "b": "begins", "c": "begins"}
    assert all(begin(server, 0, dict.fromkeys(HONEST, "begins")).values())
    assert all(begin(server, 1, dict.fromkeys(HONEST, "continues")).values())
    assert begin(server, 2, reset) == {"a": True, "b": False, "c": False}
    assert server.sums().attack() == 0


def test_private_state_can_be_reset_before_a_site_ever_went_on(server):
    """This is no claim: an honest server says the same after a lost first round."""
    assert all(begin(server, 0, dict.fromkeys(HONEST, "begins")).values())
    assert all(begin(server, 1, {"a": "continues", "b": "begins", "c": "begins"}).values())
