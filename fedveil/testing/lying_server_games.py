"""Games between a lying server and the same sites, each played from scratch, and the lists it can ask for."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from fedveil.errors import StateError
from fedveil.federation.secagg.plan import AttemptPlan, list_digest
from fedveil.federation.secagg.state import SiteSecAggState
from fedveil.testing.lying_server import LyingServer, ShareKey

SiteList = tuple[str, ...]
SiteRequests = Mapping[str, SiteList | None]  # by site, the list that it is first asked to sign and open


class LyingServerGame(LyingServer):
    """A lying server that plays one game after another with the same sites.

    A site's answer depends only on its state and the request. So the real object gets each request only once in each of
    its states. Its answer and its next state are reused in all later games.

    Attributes:
        set_back: sites whose state the adversary rolls back before each request, to any earlier state.
        plans: all plans in this game.
        games: number of games played.
    """

    def __init__(self, honest: Collection[str], colluders: Collection[str] = (), **kwargs: Any) -> None:
        super().__init__(honest, colluders, **kwargs)
        for name in self.names:
            self.prekey(name)  # each game begins after this request
        self.set_back: set[str] = set()
        self.games = 0
        self.plans: list[AttemptPlan] = []
        self._first = {name: self._state_of(name) for name in self.names}
        self._answers: dict[tuple[object, ...], tuple[SiteSecAggState, Any, dict[ShareKey, bytes]]] = {}
        self._plans: dict[str, AttemptPlan] = {}
        self._kept: list[object] = []  # keeps objects alive, so that no id() is reused
        self._digests: dict[tuple[str, SiteList], str] = {}
        self._attacks: dict[tuple[object, ...], int] = {}
        self.start_over()

    def start_over(self) -> None:
        """Begin a new game: reset the sites and everything that the server learned."""
        self.games += 1
        self.uploads, self.shares, self.plans = [], {}, []
        self.signatures = defaultdict(dict)
        self.history = {name: [state] for name, state in self._first.items()}
        for name, state in self._first.items():
            self.sites[name].store.save(state)
            self.boots[name] = "boot-0"

    def plan(
        self, round_: int = 0, attempt: int = 0, cohort: Collection[str] | None = None, **changes: Any
    ) -> AttemptPlan:
        """Return the same object for equal plans, so that answers from earlier games are reused."""
        plan = super().plan(round_, attempt, cohort, **changes)
        return self._plans.setdefault(plan.digest + plan.broadcast, plan)

    def ask(
        self, kind: str, site: str, plan: AttemptPlan, in_sum: SiteList = (), source: AttemptPlan | None = None
    ) -> bool:
        """Ask a site; return whether it answered. A site that can be rolled back is asked in each past state."""
        store = self.sites[site].store
        states = self.history[site] if site in self.set_back else [self._state_of(site)]
        for state in list(states):
            store.save(state)
            is_answered = self._ask_in_state(kind, site, plan, in_sum, source or plan)
            after = self._state_of(site)
            if not any(after is known for known in self.history[site]):
                self.history[site].append(after)
            if is_answered and site not in self.set_back:
                return True
        return False

    def _ask_in_state(self, kind: str, site: str, plan: AttemptPlan, in_sum: SiteList, source: AttemptPlan) -> bool:
        store, state = self.sites[site].store, self._state_of(site)
        depends: tuple[object, ...] = ()
        if kind == "open":
            signers = frozenset(self.signatures[plan.digest, self._list_digest(plan, in_sum)])
            depends = (signers, *(u.number for u in self.uploads if u.plan.digest == source.digest))
        elif kind == "mask":
            depends = (sum(u.site == site and u.plan is plan for u in self.uploads),)
        key = (kind, site, id(state), self.boots[site], id(plan), in_sum, id(source), depends)
        if key not in self._answers:
            known, self.shares = self.shares, {}
            uploads, self.uploads = self.uploads, list(self.uploads)
            answer: Any
            if kind == "mask":
                answer = self.mask(site, plan)
            elif kind == "agree":
                answer = self.agree(site, plan, in_sum)
            else:
                answer = self.open(site, plan, in_sum, rows=self.rows(site, plan, in_sum, source))
            self._answers[key] = (self._state_of(site), answer, self.shares)
            self._kept += [state, self._state_of(site), plan, source]
            self.shares, self.uploads = known, uploads
        after, answer, learned = self._answers[key]
        store.save(after)
        if answer is None:
            return False
        if kind == "mask":
            self.uploads.append(answer)
        elif kind == "agree":
            self.signatures[plan.digest, self._list_digest(plan, in_sum)][site] = answer
        self.shares |= learned
        return True

    def _state_of(self, site: str) -> SiteSecAggState:
        if (state := self.sites[site].store.load()) is None:
            raise StateError(f"{site}: its state has no prekey")
        return state

    def _list_digest(self, plan: AttemptPlan, in_sum: SiteList) -> str:
        key = (plan.digest, in_sum)
        if key not in self._digests:
            self._digests[key] = list_digest(plan.digest, in_sum)
        return self._digests[key]

    def begin(self, plan: AttemptPlan, maskers: Collection[str] | None = None) -> None:
        """Show a plan to honest sites in its cohort."""
        self.plans.append(plan)
        for site in self.honest if maskers is None else maskers:
            if site in plan.by_name:
                self.ask("mask", site, plan)

    def restart(self, site: str) -> None:
        """Restart a site's machine."""
        self.boots[site] += "0"

    def request(self, plan: AttemptPlan, requests: SiteRequests) -> None:
        """Ask each site to sign its list, and then ask each to open it."""
        for kind in ("agree", "open"):
            for site, in_sum in requests.items():
                if in_sum is not None:
                    self.ask(kind, site, plan, in_sum)

    def ask_everything(self, lists: Mapping[str, Collection[SiteList]]) -> None:
        """Ask every site to mask for every plan, and to sign and open every list, until nothing new is learned.

        Args:
            lists: the lists for each plan, by the plan's digest.
        """
        before = None
        while before != (before := self._learned()):
            for plan in self.plans:
                for kind in ("agree", "open"):
                    for site, in_sum in itertools.product(self.honest, lists[plan.digest]):
                        if site in plan.by_name:
                            self.ask(kind, site, plan, in_sum)
            for plan in self.plans:
                for site in self.honest:
                    if site in plan.by_name and (site not in self.set_back or self._times(site, plan) < 2):
                        self.ask("mask", site, plan)

    def _times(self, site: str, plan: AttemptPlan) -> int:
        return sum(upload.site == site and upload.plan is plan for upload in self.uploads)

    def _learned(self) -> tuple[int, int, int]:
        return len(self.shares), len(self.uploads), sum(map(len, self.signatures.values()))

    def fewest(self, plan: AttemptPlan | None = None) -> int:
        """Return the minimum number of honest vectors in any sum the server learned, for one plan or all; 0 if none."""
        numbers = tuple(u.number for u in self.uploads if plan is None or u.plan is plan)
        key = (numbers, frozenset(self.shares), frozenset(self.set_back))
        if key not in self._attacks:
            chosen = frozenset(numbers)
            self._attacks[key] = self.sums(lambda upload: upload.number in chosen).attack(self.set_back)
        return self._attacks[key]


def lists_of(plan: AttemptPlan, honest: Collection[str], least: int) -> list[SiteList]:
    """Return all lists with at least `least` sites; colluders are interchangeable, so only their number varies."""
    colluders = [site for site in plan.cohort if site not in honest]
    sites = [site for site in plan.cohort if site in honest]
    return [
        tuple(sorted([*chosen, *colluders[:count]]))
        for size in range(1, len(sites) + 1)
        for chosen in itertools.combinations(sites, size)
        for count in range(len(colluders) + 1)
        if size + count >= least
    ]


def requests_modulo_symmetry(
    lists: Sequence[Collection[SiteList]], honest: Collection[str]
) -> Iterator[list[SiteRequests]]:
    """Yield every way to ask each honest site for one list or none, for each plan; once up to renaming the sites."""
    honest = sorted(honest)
    options = {site: [[None, *(x for x in of_plan if site in x)] for of_plan in lists] for site in honest}
    renamings = [dict(zip(honest, order, strict=True)) for order in itertools.permutations(honest)]
    codes: dict[SiteList | None, int] = {None: 0}
    for of_plan in lists:
        for in_sum in of_plan:
            codes.setdefault(in_sum, len(codes))
    renamed = [
        {
            code: codes.get(tuple(sorted(names_of.get(x, x) for x in in_sum)), -1) if in_sum else 0
            for in_sum, code in codes.items()
        }
        for names_of in renamings
    ]
    indices = [[honest.index(names_of[site]) for site in honest] for names_of in renamings]
    by_code = {code: in_sum for in_sum, code in codes.items()}
    coded = [[tuple(codes[x] for x in choice) for choice in itertools.product(*options[site])] for site in honest]
    for choice in itertools.product(*coded):
        if _is_smallest(choice, renamed, indices):
            yield [{site: by_code[choice[i][k]] for i, site in enumerate(honest)} for k in range(len(lists))]


def _is_smallest(
    choice: Sequence[tuple[int, ...]], renamed: Sequence[Mapping[int, int]], indices: Sequence[Sequence[int]]
) -> bool:
    for mapping, index in zip(renamed, indices, strict=True):
        other: list[tuple[int, ...]] = [()] * len(choice)
        for i, codes in enumerate(choice):
            other[index[i]] = tuple(mapping[code] for code in codes)
        if tuple(other) < tuple(choice) and all(code >= 0 for codes in other for code in codes):
            return False
    return True
