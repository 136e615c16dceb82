"""A control that must not succeed counts as failed only if it fails on two samples of non-members."""

from __future__ import annotations

import numpy as np
import pytest

from fedveil.attacks.audit.findings import ALPHA, GATE, correct_for_multiple_tests, make_finding
from fedveil.attacks.audit.scoring import SecondSample
from fedveil.attacks.samples import AuditSample

SAMPLE = AuditSample(["other"] * 64, [""] * 64)
WRONG = "alignment, wrong site"


def control(shift: float, again: float, attack: str = WRONG):
    """A control at one site whose members score `shift` above the first non-members and `again` above the others."""
    rng = np.random.default_rng(3)
    members, first, others = (rng.normal(0.0, 1.0, 64) for _ in range(3))
    second = SecondSample(SAMPLE)

    def ask(sample):
        assert sample is SAMPLE
        return members + again, others

    second.asks["site-0", WRONG] = ask
    finding = make_finding("site-0", attack, members + shift, first, 0)
    return second, correct_for_multiple_tests([finding], GATE)


@pytest.mark.parametrize(("shift", "again", "verdict"), [(2.0, 2.0, "above"), (2.0, 0.0, "contains"),
                                                        (2.0, -2.0, "contains"), (-2.0, -2.0, "below")])  # fmt: skip
def test_a_control_fails_if_both_samples_say_so_and_in_the_same_direction(shift, again, verdict):
    second, found = control(shift, again)
    assert found[0].verdict == ("above" if shift > 0 else "below")
    (confirmed,), (note,) = second.confirm(found)
    assert confirmed.verdict == verdict
    assert note.startswith(f"{WRONG} on site-0: the control to lose was at {found[0].auroc[0]:.3f}, and at ")
    assert note.endswith(
        " on 64 other non-members, so it " + ("counts as held." if verdict == "contains" else "failed.")
    )


def test_a_control_that_holds_is_not_repeated_and_neither_is_a_finding_about_the_run():
    for shift, attack in ((0.0, WRONG), (2.0, "alignment")):
        second, found = control(shift, 0.0, attack)
        second.asks["site-0", attack] = None  # would fail if called
        assert second.confirm(found) == (found, [])


def test_only_controls_to_lose_have_the_stricter_level():
    rng = np.random.default_rng(8)
    weak = rng.normal(0.6, 1.0, 64), rng.normal(0.0, 1.0, 64)
    p = make_finding("site-0", WRONG, *weak, 0).p
    assert GATE < p < ALPHA
    findings = [make_finding("site-0", attack, *weak, 0) for attack in (WRONG, "alignment")]
    assert [f.verdict for f in correct_for_multiple_tests(findings, GATE)] == ["contains", "above"]
    assert [f.verdict for f in correct_for_multiple_tests(findings)] == ["above", "above"]
