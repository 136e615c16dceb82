"""Search for what a lying server can learn about real sites' masked vectors, with and without the rule against it.

Each row is an attack with a number of sites, a cohort size and c. The control removes the one rule that prevents the
attack; the unmodified code plays the same kind of games. All figures are counts, and are the same on every machine.

| attack | the server | rule |
|---|---|---|
| two lists | asks sites to sign and open different lists for one plan | a site signs only one list per plan |
| other message | sends all but the target a message with a known update, under one plan | its digest is in the plan |

| metric | meaning |
|---|---|
| claim | minimum number of honest vectors in every sum |
| control | fewest honest vectors in a combination that the control computed; a value below the claim wins |
| control_games | games until then |
| fewest | fewest honest vectors for the unmodified code; 0 if it computed no combination |
| games | games played against the unmodified code |
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fedveil.testing.lying_server import remembered_signatures
from fedveil.testing.lying_server_search import (
    AGAIN,
    RULE_REMOVALS,
    LyingServerScenario,
    least_quorum,
    search_for_violation,
)
from fedveil_bench.common import data
from fedveil_bench.runner import BenchOptions, BenchOutcome

ATTACKS = {"two lists": "one list a plan", "other message": "broadcast not in p"}  # the rule against each attack


def list_requirements(_settings: Mapping[str, Any]) -> list[data.DataRequirement]:
    """Return no requirements: no data is needed."""
    return []


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return a row and a sentence for each attack and case."""
    rows, verdicts = [], []
    with _quiet_sites(), remembered_signatures():
        for case in settings["cases"]:
            for attack in ATTACKS:
                found = play_case(attack, {**settings, **case})
                name = describe_case(attack, case)
                options.say(f"{name}: {found}")
                rows.append({"name": name, "metrics": {metric: _exact(value) for metric, value in found.items()}})
                verdicts.append(judge_case(name, found))
    return BenchOutcome(rows, verdicts)


def play_case(attack: str, case: Mapping[str, Any]) -> dict[str, int]:
    """Play one attack against the control and against the unmodified code. Return the metrics for its row."""
    sites, colluding, is_poisoned = case["sites"], case["colluding"], attack == "other message"
    scenario = LyingServerScenario(
        sites, colluding, AGAIN if not is_poisoned else ({},), cohorts=case["cohort"], is_poisoned=is_poisoned,
        absent=0.05, follows=0.6,
    )  # fmt: skip
    with RULE_REMOVALS[ATTACKS[attack]].removed():
        control_games, control, _ = search_for_violation(scenario, case["control_games"], case["seed"])
    games, violation, seen = search_for_violation(scenario, case["games"], case["seed"])
    quorum = least_quorum(sites, colluding)
    return {
        "claim": max(quorum, min(3, quorum)) - colluding,
        "control": control,
        "control_games": control_games,
        "fewest": violation or min(seen.keys() - {0}, default=0),
        "games": games,
    }


def describe_case(attack: str, case: Mapping[str, Any]) -> str:
    """Return the name of a case's row: sites, signatures and shares, smallest cohort, and colluding sites."""
    sites, colluding = case["sites"], case["colluding"]
    quorum = least_quorum(sites, colluding)
    return f"{attack}: N = {sites}, q = t = {quorum}, cohort {case['cohort']}, c = {colluding}"


def judge_case(name: str, found: Mapping[str, int]) -> str:
    """Return a sentence on the outcome: the attacker should win the control, and lose to the unmodified code."""
    claim, control, fewest = found["claim"], found["control"], found["fewest"]
    undefended = f"won, {control} honest" if 0 < control < claim else "not won: the row says nothing"
    defended = "lost" if not fewest or fewest >= claim else "WON"
    of = f"none below {claim} of {found['games']} games" if defended == "lost" else f"{fewest} honest"
    return f"{name}: without the rule {undefended} after {found['control_games']} games; with it {defended}, {of}."


def _exact(value: int) -> dict[str, float]:
    return {"mean": value, "low": value, "high": value, "n": 1}


@contextmanager
def _quiet_sites() -> Iterator[None]:
    """Silence the sites' log lines about thousands of refusals."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
