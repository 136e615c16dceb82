"""Search for what a server that lies learns of real sites' masked vectors, with a rule and without it.

A row is an attack on sites of one number, cohort and c. Its control takes the one rule out that stands against the
attack; the code as it is plays the same kind of games. All figures are counts, and the same on every machine.

| attack | the server | rule |
|---|---|---|
| two lists | asks sites to sign and to open different lists of one plan | a site signs one list of a plan |
| other message | shows all but the target a message whose update it knows, under one plan | its digest is in the plan |

| metric | is |
|---|---|
| claim | honest vectors that are in every sum, at least |
| control | the fewest honest vectors in a combination that the control computed; below the claim, the attack is won |
| control_games | games until then |
| fewest | the same for the code as it is; 0 if it computed none |
| games | games that were played against it |
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

ATTACKS = {"two lists": "one list a plan", "other message": "broadcast not in p"}  # and the rule against each


def list_requirements(_settings: Mapping[str, Any]) -> list[data.DataRequirement]:
    """Return the data that is needed: none."""
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
    """Play one attack against the control and against the code as it is. Return the metrics of its row."""
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
    """Return a sentence: the control is to be won, the code as it is to be lost by the attacker."""
    claim, control, fewest = found["claim"], found["control"], found["fewest"]
    undefended = f"won, {control} honest" if 0 < control < claim else "not won: the row says nothing"
    defended = "lost" if not fewest or fewest >= claim else "WON"
    of = f"none below {claim} of {found['games']} games" if defended == "lost" else f"{fewest} honest"
    return f"{name}: without the rule {undefended} after {found['control_games']} games; with it {defended}, {of}."


def _exact(value: int) -> dict[str, float]:
    return {"mean": value, "low": value, "high": value, "n": 1}


@contextmanager
def _quiet_sites() -> Iterator[None]:
    """Leave out the sites' own lines about thousands of refusals."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
