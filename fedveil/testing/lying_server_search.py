"""Random games between a lying server and real sites: with all rules in force, and with each rule removed in turn.

The claim, for plans with q signatures that withstand c colluding sites: no combination of vectors from one plan covers
fewer than max(q, least) - c honest sites, and none from all plans in a round covers fewer than q - c. For whole-cohort
plans, m replaces q and least. `search_for_violation` plays until it finds a lighter combination. `RULE_REMOVALS` lists
the rules whose removal lets it find one.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from fedveil.errors import PolicyError
from fedveil.federation.secagg import graph_connectivity, plan_checks
from fedveil.federation.secagg.plan import AttemptPlan
from fedveil.federation.secagg.plan_checks import RoundTerms, SiteRequirements
from fedveil.federation.secagg.site import SecAggSite
from fedveil.federation.secagg.state import Fence, LivePlan, SiteSecAggState
from fedveil.testing.lying_server import POISONED_BROADCAST, TRUE_BROADCAST, site_names
from fedveil.testing.lying_server_games import LyingServerGame, SiteList, SiteRequests

__all__ = [
    "AGAIN",
    "REDUNDANT_RULES",
    "RING",
    "RULE_REMOVALS",
    "WHOLE",
    "WHOLE_AGAIN",
    "LyingServerScenario",
    "RuleRemoval",
    "claimed_honest_sites",
    "claimed_in_round",
    "find_violation",
    "least_quorum",
    "plan_numbers",
    "play_random",
    "random_lists",
    "random_plan",
    "random_requests",
    "search_for_violation",
]


def least_quorum(sites: int, colluding: int) -> int:
    """Return the smallest q that withstands `colluding` colluding sites."""
    return (sites + colluding) // 2 + 1


def claimed_honest_sites(plan: AttemptPlan, colluding: int) -> int:
    """Return the claimed minimum number of honest vectors in every sum of a plan."""
    return plan.least_in_sum - colluding


def claimed_in_round(plan: AttemptPlan, colluding: int) -> int:
    """Return the claimed minimum number of honest vectors in every combination of sums in this plan's round."""
    return (len(plan.members) if plan.is_whole else plan.quorum) - colluding


def find_violation(game: LyingServerGame, colluding: int) -> int:
    """Return the number of honest vectors in a combination that is lighter than claimed; 0 if there is none."""
    for plan in game.plans:
        if 0 < (found := game.fewest(plan)) < claimed_honest_sites(plan, colluding):
            return found
    found = game.fewest()
    return found if 0 < found < min(claimed_in_round(plan, colluding) for plan in game.plans) else 0


def plan_numbers(sites: int, colluding: int, quorum: int | None = None, **others: Any) -> dict[str, Any]:
    """Return a plan's numbers for this many sites, with the smallest quorum unless another is given."""
    quorum = quorum or least_quorum(sites, colluding)
    return {"colluding": colluding, "quorum": quorum, "threshold": quorum, "least": min(3, sites)} | others


@dataclass
class LyingServerScenario:
    """Random games of one kind.

    Attributes:
        colluding: c in the plans.
        attempts: the plans' rounds and attempts, and any numbers that differ from `plan_numbers`.
        cohorts: minimum number of sites in a cohort; 0 = every cohort has all sites.
        extra_colluders: number of colluding sites beyond c.
        set_back: number of sites whose state the adversary rolls back; they count toward c.
        unlisted: whether the colluders are missing from the roster.
        is_poisoned: whether all honest sites but one get a different message under an otherwise identical plan.
        is_split: whether lists are as small as possible and chosen for each site separately.
        absent, follows: the fraction of sites that get no request, and the fraction that are asked for the same list.
        is_cut: whether the sites in two windows of the circle are silent and all others sign a list without them.
    """

    sites: int
    colluding: int
    attempts: tuple[dict[str, Any], ...] = ({},)
    cohorts: int = 0
    extra_colluders: int = 0
    set_back: int = 0
    unlisted: bool = False
    is_poisoned: bool = False
    is_split: bool = False
    is_cut: bool = False
    absent: float = 0.15
    follows: float = 0.6
    demands: dict[str, Any] = field(default_factory=dict)

    def game(self) -> LyingServerGame:
        """Return a game between the scenario's server and sites."""
        sites = site_names(self.sites)
        count = self.colluding - self.set_back + self.extra_colluders
        colluders = sites[: max(count, 0)]
        kwargs = {"unlisted": colluders} if self.unlisted else {}
        game = LyingServerGame(sites[len(colluders) :], colluders, **kwargs)
        if self.demands:
            for name, site in game.sites.items():
                game.sites[name] = replace(site, demands=replace(site.demands, **self.demands))
        game.set_back = set(game.honest[: self.set_back])
        return game


def random_lists(
    rng: random.Random, scenario: LyingServerScenario, plan: AttemptPlan, game: LyingServerGame
) -> list[SiteList]:
    """Return up to three random lists and the whole cohort; most lists keep all colluders."""
    honest = [site for site in plan.cohort if site in game.honest]
    if scenario.is_split:
        chosen = itertools.combinations(honest, max(plan.quorum - len(game.colluders), 1))
        return [tuple(sorted([*game.colluders, *sites])) for sites in chosen]
    if scenario.is_cut:
        first, gap = rng.randrange(len(plan.circle)), rng.randint(3, 5)
        turned = plan.circle[first:] + plan.circle[:first]
        half = plan.neighbours // 2
        silent = {*turned[:half], *turned[half + gap : 2 * half + gap]} - set(game.colluders)
        return [tuple(site for site in plan.cohort if site not in silent)]
    lists = [tuple(plan.cohort)]
    for _ in range(rng.randint(1, 3)):
        absent = rng.sample(plan.cohort, rng.randint(0, max(len(plan.cohort) - plan.quorum, 0)))
        keep = set(game.colluders) if rng.random() < 0.9 else set()
        lists.append(tuple(site for site in plan.cohort if site not in absent or site in keep))
    return list(dict.fromkeys(lists))


def random_requests(
    rng: random.Random, scenario: LyingServerScenario, lists: list[SiteList], game: LyingServerGame
) -> SiteRequests:
    """Return a list, or none, for each honest site; many sites are asked for the same list."""
    favorite, order = rng.choice(lists), list(game.honest)
    rng.shuffle(order)
    requests: dict[str, SiteList | None] = {}
    for site in order:
        mine = [in_sum for in_sum in lists if site in in_sum]
        if not mine or (rng.random() < scenario.absent and not (scenario.is_split or scenario.is_cut)):
            requests[site] = None
        else:
            follows = favorite in mine and not scenario.is_split and rng.random() < scenario.follows
            requests[site] = favorite if follows else rng.choice(mine)
    return requests


def random_plan(
    rng: random.Random, scenario: LyingServerScenario, game: LyingServerGame, attempt: dict[str, Any]
) -> AttemptPlan:
    """Return a plan for an attempt, with all sites or a random cohort."""
    cohort, changes = game.names, {k: v for k, v in attempt.items() if k not in ("round_", "attempt")}
    if scenario.cohorts and game.plans:
        chosen = rng.sample(game.honest, rng.randint(scenario.cohorts - len(game.colluders), len(game.honest)))
        cohort = sorted([*chosen, *game.colluders])
    quorum = changes.get("quorum", least_quorum(len(cohort), scenario.colluding))
    fields = plan_numbers(len(cohort), scenario.colluding, quorum) | {"least": min(3, quorum)} | changes
    return game.plan(attempt.get("round_", 0), attempt.get("attempt", 0), cohort, **fields)


def play_random(scenario: LyingServerScenario, game: LyingServerGame, rng: random.Random) -> None:
    """Play one game with random plans, lists and orders. At the end, every site gets all remaining requests."""
    game.start_over()
    by_plan: dict[str, list[SiteList]] = {}
    for attempt in scenario.attempts:
        plan = random_plan(rng, scenario, game, attempt)
        shown = [(plan, [s for s in game.honest if rng.random() > scenario.absent / (1 if game.plans else 3)])]
        if scenario.is_poisoned:
            target = rng.choice(game.honest)
            poisoned_numbers = plan_numbers(len(game.names), scenario.colluding) | {"least": plan.least}
            poisoned = game.plan(**(poisoned_numbers | attempt | {"broadcast": POISONED_BROADCAST}))
            shown = [(plan, [target]), (poisoned, [site for site in game.honest if site != target])]
        lists = random_lists(rng, scenario, plan, game)
        for variant, maskers in shown:
            by_plan[variant.digest] = lists
            game.begin(variant, maskers)
        requests = random_requests(rng, scenario, lists, game)
        for variant, maskers in shown:
            game.request(variant, {site: in_sum for site, in_sum in requests.items() if site in maskers})
        if rng.random() < 0.05:
            game.restart(rng.choice(game.honest))
    game.ask_everything(by_plan)


def search_for_violation(
    scenario: LyingServerScenario, most: int, seed: int = 1, worlds: int = 1
) -> tuple[int, int, Counter[int]]:
    """Play until a combination lighter than claimed is found.

    Return the number of games, the number of honest vectors found (0 if none), and a tally of `fewest` over all games.
    """
    rng, played = random.Random(seed), 0
    seen: Counter[int] = Counter()
    for _ in range(worlds):
        game = scenario.game()
        for _ in range(most // worlds):
            play_random(scenario, game, rng)
            played += 1
            seen[game.fewest()] += 1
            if found := find_violation(game, scenario.colluding):
                return played, found, seen
    return played, 0, seen


def _forget_list(site: SecAggSite, state: SiteSecAggState, plan: AttemptPlan, live: LivePlan) -> None:
    site.store.save(state.model_copy(update={"fence": state.fence.model_copy(update={"signed": plan.round})}))


def _save_after_answer(site: SecAggSite, state: SiteSecAggState, plan: AttemptPlan, live: LivePlan) -> None:
    """Save nothing, as if the machine died after the answer and before the write."""


def _live_of_any_plan(site: SecAggSite, state: SiteSecAggState, plan: AttemptPlan) -> LivePlan:
    if state.live is None:
        raise PolicyError("expected a plan")
    keys = dict.fromkeys(plan.cohort, "0" * 64)  # dummy keys for rows that the site does not hold; they decrypt nothing
    return state.live.model_copy(update={"rows": keys | state.live.rows})


def _no_check(*_args: object) -> None: ...


def _require_listed_in_any_number(
    plan: AttemptPlan, in_sum: Collection[str], site: str, demands: SiteRequirements
) -> None:
    if not set(in_sum) <= plan.by_name.keys() or site not in in_sum:
        raise PolicyError("expected a list of sites of the plan")


def _require_later_attempt(plan: AttemptPlan, state: SiteSecAggState) -> None:
    if state.fence.masked is not None and (plan.round, plan.attempt) <= state.fence.masked:
        raise PolicyError("expected a later attempt")


_fence_after = SecAggSite._fence_after


def _fence_without_whole(site: SecAggSite, state: SiteSecAggState, plan: AttemptPlan, terms: RoundTerms) -> Fence:
    fence = _fence_after(site, state, plan, terms)
    return fence.model_copy(update={"signed": state.fence.signed}) if plan.is_whole else fence


def _require_connected_alone(plan: AttemptPlan, sites: Collection[str]) -> None:
    if not graph_connectivity.is_connected(plan, sites, plan.colluding):
        raise PolicyError("expected a connected graph")


def _digest_without_broadcast(plan: AttemptPlan) -> str:
    return hashlib.sha256(plan.model_copy(update={"broadcast": TRUE_BROADCAST}).to_bytes()).hexdigest()


_require_certificate = plan_checks.require_certificate  # the original function, for use while it is patched


def _short_way_for_any_threshold(
    plan: AttemptPlan, in_sum: Collection[str], listed: str, agreed: Mapping[str, str]
) -> Mapping[str, str]:
    return _require_certificate(plan, in_sum, listed, agreed) if len(in_sum) < len(plan.members) else {}


@dataclass(frozen=True)
class RuleRemoval:
    """The patches that remove a rule, and a scenario in which the claim is then violated."""

    patches: tuple[tuple[object, str, object], ...]
    scenario: LyingServerScenario

    @contextlib.contextmanager
    def removed(self) -> Iterator[None]:
        """Remove the rule."""
        with contextlib.ExitStack() as stack:
            for target, attribute, value in self.patches:
                stack.enter_context(mock.patch.object(target, attribute, value))
            yield


AGAIN: tuple[dict[str, Any], ...] = ({}, {"attempt": 1})
RING = {"neighbours": 4, "threshold": 2, "quorum": 7}
WHOLE: dict[str, Any] = {"quorum": 0, "threshold": 0, "least": 3}  # only the whole cohort's sum can be revealed
WHOLE_AGAIN: tuple[dict[str, Any], ...] = (WHOLE, {"attempt": 1, **WHOLE})
RULE_REMOVALS = {
    "one list a plan": RuleRemoval(((SecAggSite, "_save_agreed", _forget_list),), LyingServerScenario(4, 1)),
    "write before answer": RuleRemoval(((SecAggSite, "_save_agreed", _save_after_answer),), LyingServerScenario(4, 1)),
    "certificate": RuleRemoval(
        ((plan_checks, "require_certificate", _no_check),), LyingServerScenario(6, 1, is_split=True),
    ),
    "certificate with neighbors": RuleRemoval(
        ((plan_checks, "require_certificate", _no_check),), LyingServerScenario(12, 1, (RING,)),
    ),
    "quorum lower": RuleRemoval(
        ((plan_checks, "require_numbers", _no_check),), LyingServerScenario(5, 1, ({"quorum": 3, "threshold": 3},)),
    ),
    "lists of any size": RuleRemoval(
        ((plan_checks, "require_listed", _require_listed_in_any_number),), LyingServerScenario(6, 1, ({"least": 5},)),
    ),
    "broadcast not in p": RuleRemoval(
        ((AttemptPlan, "digest", property(_digest_without_broadcast)),),
        LyingServerScenario(4, 1, is_poisoned=True),
    ),
    "once a round": RuleRemoval(
        ((plan_checks, "require_later", _require_later_attempt),), LyingServerScenario(5, 1, AGAIN, cohorts=4),
    ),
    "once a round, whole cohorts": RuleRemoval(
        ((SecAggSite, "_fence_after", _fence_without_whole),),
        LyingServerScenario(5, 1, WHOLE_AGAIN, cohorts=4, demands={"min_threshold": 1}),
    ),
    "t <= c": RuleRemoval(
        ((plan_checks, "require_connected", _require_connected_alone),),
        LyingServerScenario(7, 1, ({"neighbours": 4, "threshold": 1},), demands={"min_threshold": 1}),
    ),
    "connectivity": RuleRemoval(
        ((graph_connectivity, "is_connected", lambda plan, sites, colluding: True),),
        LyingServerScenario(12, 1, (RING,), is_cut=True),
    ),
    "roster": RuleRemoval(
        ((plan_checks, "require_roster", _no_check),), LyingServerScenario(4, 1, extra_colluders=2, unlisted=True),
    ),
    "short way with t < q": RuleRemoval(
        (
            (plan_checks, "require_graph", _no_check),
            (plan_checks, "require_certificate", _short_way_for_any_threshold),
        ),
        LyingServerScenario(4, 1, ({"quorum": 3, "threshold": 2},)),
    ),
}  # fmt: skip


# If one of these rules is removed, another rule still refuses the same requests.
REDUNDANT_RULES = {
    "only plans that it masked for": RuleRemoval(
        ((SecAggSite, "_live", _live_of_any_plan),), LyingServerScenario(5, 1, AGAIN, cohorts=4),
    ),
    "only lists that it is in": RuleRemoval(
        ((plan_checks, "require_listed", lambda plan, in_sum, site, demands: None),), LyingServerScenario(5, 1),
    ),
    "t = q, where O3 asks for it too": RuleRemoval(
        ((plan_checks, "require_graph", _no_check),), LyingServerScenario(4, 1, ({"quorum": 3, "threshold": 2},)),
    ),
}  # fmt: skip
