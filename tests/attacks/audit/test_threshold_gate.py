"""Conditions under which an audit passes a gate, fails it, or is inconclusive."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fedveil.attacks.audit import threshold_gate
from fedveil.attacks.audit.findings import AuditReport
from fedveil.attacks.audit.threshold_gate import LeakageThreshold, decide_gate
from fedveil.errors import ConfigError
from tests.fedveil.console.web.report.made import controlled, found

LEAKS = found("site-1", 0.71, "above")  # from 0.66 to 0.76
QUIET = found("server", 0.51, "contains")  # from 0.46 to 0.56


def of(*about, undecided=(), **controls) -> AuditReport:
    return AuditReport(controlled(*about, **controls), [], [], list(undecided))


@pytest.mark.parametrize(
    ("above", "code"), [(0.65, threshold_gate.ABOVE), (0.66, threshold_gate.PASSES), (0.7, threshold_gate.PASSES)]
)
def test_the_lower_bound_decides_and_not_the_value(above, code):
    lower = replace(LEAKS, auroc=(0.71, 0.66, 0.76))
    assert decide_gate(of(lower, QUIET), LeakageThreshold(above)).code == code


def test_it_says_which_attack_and_what_is_not_ruled_out():
    verdict = decide_gate(of(LEAKS, QUIET), LeakageThreshold(0.6)).says
    assert verdict == "Gate: FAILS. auroc above 0.6: 1 of 2 findings; highest: alignment on site-1, at least 0.660."
    assert decide_gate(of(QUIET), LeakageThreshold(0.6)).says.endswith("values up to 0.560 are not ruled out.")


@pytest.mark.parametrize("failed", [{"won": "contains"}, {"lost": "above"}])
def test_where_controls_fail_it_cannot_tell_even_if_the_attack_finds_something(failed):
    assert decide_gate(of(LEAKS, QUIET, **failed), LeakageThreshold(0.6)).code == threshold_gate.CANNOT_TELL


def test_an_empty_audit_and_one_with_controls_alone_do_not_pass():
    assert decide_gate(AuditReport([], [], []), LeakageThreshold(0.6)).code == threshold_gate.CANNOT_TELL
    assert decide_gate(of(), LeakageThreshold(0.6)).code == threshold_gate.CANNOT_TELL


def test_what_was_not_attacked_keeps_it_from_passing_and_not_from_failing():
    gap = "site-2: no attack on what it sent whose controls hold was tried"
    decision = decide_gate(of(QUIET, undecided=[gap]), LeakageThreshold(0.6))
    assert decision.code == threshold_gate.CANNOT_TELL
    assert gap in decision.says
    assert decide_gate(of(LEAKS, undecided=[gap]), LeakageThreshold(0.6)).code == threshold_gate.ABOVE


@pytest.mark.parametrize(
    ("figure", "values"),
    [
        ("tpr-at-1", {"tpr_at_1": (0.3, 0.2, 0.4)}),
        ("tpr-at-01", {"tpr_at_01": (0.3, 0.2, 0.4)}),
        ("epsilon", {"epsilon_bound": 0.2}),
    ],
)
def test_another_figure_decides_by_its_own_lower_bound(figure, values):
    zero = {"auroc": (0.5, 0.4, 0.6), "tpr_at_1": (0.0, 0.0, 0.0), "tpr_at_01": (0.0, 0.0, 0.0), "epsilon_bound": 0.0}
    one = replace(QUIET, **(zero | values))
    assert decide_gate(of(one), LeakageThreshold(0.19, figure)).code == threshold_gate.ABOVE
    assert decide_gate(of(one), LeakageThreshold(0.2, figure)).code == threshold_gate.PASSES
    others = set(threshold_gate.FIGURES) - {figure, "auroc"}
    assert {decide_gate(of(one), LeakageThreshold(0.19, other)).code for other in others} == {threshold_gate.PASSES}


@pytest.mark.parametrize(
    ("shown", "code"), [(None, threshold_gate.PASSES), (1.2, threshold_gate.PASSES), (1.3, threshold_gate.ABOVE)]
)
def test_an_epsilon_that_canaries_show_counts_as_one_of_an_attack(shown, code):
    audit = replace(of(QUIET), epsilon_shown=shown)
    assert decide_gate(audit, LeakageThreshold(1.2, "epsilon")).code == code
    assert decide_gate(audit, LeakageThreshold(0.6)).code == threshold_gate.PASSES, "it is no AUROC"
    assert (
        decide_gate(AuditReport([], [], [], epsilon_shown=5.0), LeakageThreshold(1.2, "epsilon")).code
        == threshold_gate.ABOVE
    )


@pytest.mark.parametrize(
    ("above", "figure", "said"),
    [
        (math.nan, "auroc", "--fail-above: for auroc, expected at least 0 and less than 1, found nan"),
        (1.0, "auroc", "--fail-above"),
        (-0.1, "tpr-at-1", "--fail-above"),
        (math.inf, "epsilon", "--fail-above: for epsilon, expected at least 0 and less than 1000"),
        (0.5, "accuracy", "--figure: expected one of auroc, tpr-at-1, tpr-at-01, epsilon, found 'accuracy'"),
    ],
)
def test_what_is_no_limit_is_refused(above, figure, said):
    with pytest.raises(ConfigError, match=said):
        LeakageThreshold(above, figure)
