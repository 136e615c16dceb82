"""The server's part before a round: the sites' prekeys, and the plan of an attempt.

| case | what happens |
|---|---|
| a site without an unused prekey | it is asked for one; without an answer it is left out of the cohort |
| a site that has agreed to a sum in this round, or masked in a later round | it is left out of the cohort |
| a site that claims to have masked for a thousand attempts at this round | it is left out: the numbers could run out |
| a site whose shares do not reconstruct its secret | the run continues without it (`expel`) |
| a restart | every site is asked again; no key or attempt number is used twice. The owners of keys and the expelled
  sites are restored (`known_sites`) |
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from fedveil.errors import QuorumError, WireError
from fedveil.federation.secagg.messages import KeysRequest, KeysResponse
from fedveil.federation.secagg.plan import AttemptPlan, Prekey, pairs_cut, quorum_of, too_few_neighbors
from fedveil.federation.secagg.roster import roster_digest
from fedveil.federation.secagg.schema import ALL_PAIRS, MOST_NEIGHBORS
from fedveil.federation.secagg.unmasking import UnmaskingAttempt

_MOST_ATTEMPTS = 1000
_ABSENT = 0.2  # fraction of the cohort that may be absent when the server derives the number of neighbors
_FAILURES = 1e-6  # probability that a round is repeated because some site has too few holders


@dataclass(frozen=True)
class SecAggConfig:
    """The secure aggregation settings of a run.

    Attributes:
        least: minimum number of sites in a sum.
        threshold: q; 0 means more than two thirds of a cohort.
        neighbours: k; 0 means all pairs up to 100 sites, and beyond that a number derived from the cohort's size.
        bits, most_weight, bound: parameters of the ring.
        colluding: c, the number of sites that may collude with a lying server.
        noise: where the noise reaches its full scale, at each "site" or only in the "sum".
        is_whole: True if only sums over whole cohorts can be revealed.
    """

    least: int = 3
    threshold: int = 0
    neighbours: int = 0
    bits: Literal[32, 64] = 32
    most_weight: int = 1
    bound: float = 64.0
    colluding: int = 1
    noise: Literal["site", "sum"] = "site"
    is_whole: bool = False

    def quorum(self, sites: int) -> int:
        """Return q for a cohort of this many sites; 0 if only sums over whole cohorts can be revealed."""
        if self.is_whole:
            return 0
        return quorum_of(self.threshold, sites, self.colluding)

    def graph(self, sites: int) -> tuple[int, int]:
        """Return k and t for a cohort of this many sites.

        Raises:
            QuorumError: no number of neighbors withstands as many colluding sites.
        """
        if self.is_whole:
            return 0, 0
        if self.neighbours and self.neighbours < sites:
            return self.neighbours, _threshold(sites, self.neighbours, self.colluding)
        if sites <= ALL_PAIRS:
            return 0, self.quorum(sites)
        return derive_graph(sites, max(self.colluding, -(-sites // 20)))

    def check_cohort(self, sites: int) -> None:
        """Raise QuorumError if the sites would refuse every plan for a cohort of this size."""
        quorum, colluding = self.quorum(sites), self.colluding
        least = max(sites if self.is_whole else quorum, self.least)
        if self.is_whole and sites > ALL_PAIRS:
            raise QuorumError(
                f"secure.whole-cohort: it allows at most {ALL_PAIRS} sites, but there are {sites}; set it to false, or "
                "lower cohort.fraction"
            )
        if sites < least:
            raise QuorumError(
                f"secure.min-sites, secure.threshold: expected at least {least} sites with keys, found {sites}; start "
                "the missing sites, or check why they refuse"
            )
        if not self.is_whole and 2 * quorum <= sites + colluding:
            raise QuorumError(
                f"secure.threshold: expected more than {(sites + colluding) // 2} of {sites} sites, found {quorum}; "
                "raise it, or leave it out"
            )
        if self.noise == "sum" and self.least <= colluding:
            raise QuorumError(
                f"secure.min-sites: only the noise of honest sites counts, so it must exceed the {colluding} that may "
                f"collude (secure.max-colluders), but it is {self.least}; raise it"
            )
        if least - colluding < 2:
            raise QuorumError(
                f"secure.min-sites: a sum needs at least 2 sites more than the {colluding} that may collude "
                f"(secure.max-colluders), but may have only {least}; raise it, or lower secure.max-colluders"
            )


@lru_cache
def derive_graph(sites: int, colluding: int) -> tuple[int, int]:
    """Return the smallest number of neighbors k, and t, for a cohort and this many colluding sites.

    With a fifth of the cohort absent at random, some site has too few neighbors in at most one round in a million.

    Raises:
        QuorumError: more than 254 neighbors would be needed.
    """
    for degree in range(2, min(MOST_NEIGHBORS, sites - 1) + 1, 2):
        if degree <= colluding or too_few_neighbors(sites, degree, int(_ABSENT * sites), colluding + 1) > _FAILURES:
            continue
        if pairs_cut(sites, degree, int(_ABSENT * sites), colluding) <= _FAILURES:
            return degree, _threshold(sites, degree, colluding)
    raise QuorumError(
        f"secure.graph-degree: {sites} sites of which {colluding} may collude need more than {MOST_NEIGHBORS} "
        "neighbors; lower secure.max-colluders or the cohort"
    )


@lru_cache
def _threshold(sites: int, degree: int, colluding: int) -> int:
    """Return the largest t for which at most one round in a million is repeated, but at least c + 1."""
    shares = colluding + 1
    while shares < degree and too_few_neighbors(sites, degree, int(_ABSENT * sites), shares + 1) <= _FAILURES:
        shares += 1
    return shares


@dataclass
class SecAggCoordinator:
    """A run's prekeys, as known to the server. All of them are public.

    Attributes:
        run: the run's name with its ID.
        app: SHA-256 of the bundle; "" if no site determines it.
        config: digest of the run config, the method and its fields.
        roster: signing keys by name, from the federation's registry; {} if none are known.
        ready: unused prekeys, by site, with the sites' last attempts.
        expelled: sites that no longer take part, with the reason.
    """

    run: str
    settings: SecAggConfig
    config: str
    roster: Mapping[str, str] = field(default_factory=dict)
    app: str = ""
    ready: dict[str, KeysResponse] = field(default_factory=dict)
    expelled: dict[str, str] = field(default_factory=dict)
    _attempts: dict[int, int] = field(default_factory=dict)  # the most recent attempt of each round
    _signers: dict[str, str] = field(default_factory=dict)  # sites by signing key
    _owners: dict[str, str] = field(default_factory=dict)  # sites by prekey
    _latest: dict[str, str] = field(default_factory=dict)  # the last prekey of each site

    def request(self) -> KeysRequest:
        """Return the request for a site's prekey."""
        return KeysRequest(run=self.run)

    def admit(self, site: str, answer: KeysResponse) -> None:
        """Accept a prekey. Raises WireError if it has a different name or site, or is not signed by its owner."""
        self._require_own(site, answer.prekey)
        self.ready[site] = answer

    def keep(self, site: str, plan: AttemptPlan, prekey: Prekey) -> None:
        """Accept the prekey that came with an upload for a plan. Raises WireError like `admit`."""
        self._require_own(site, prekey)
        if prekey.signing_key != plan.by_name[site].signing_key or prekey.number <= plan.by_name[site].number:
            raise WireError(
                f"secure: the next prekey of {site} is not later than its last one, or has a different signing key"
            )
        before = self.ready.get(site)
        signed = before.signed if before else None
        self.ready[site] = KeysResponse(prekey=prekey, after=(plan.round, plan.attempt), signed=signed)

    def _require_own(self, site: str, prekey: Prekey) -> None:
        known = self.roster.get(site)
        if prekey.site != site or not prekey.is_genuine(self.run) or known not in (None, prekey.signing_key):
            raise WireError(f"secure: this is not a prekey of {site}, signed with its registered key")
        # A plan shows a site's prekey to the others, so the first site to show a key owns it for the rest of the run.
        shown = (prekey.key, "prekey", self._owners), (prekey.signing_key, "signing key", self._signers)
        for key, what, owners in shown:
            if (owner := owners.setdefault(key, site)) != site:
                raise WireError(f"secure: {site} sent the {what} of {owner} as its own")
        self._latest[site] = prekey.key

    def known_sites(self) -> dict[str, dict[str, str]]:
        """Return the data that a restart must keep: expelled sites, sites by signing key, and each site's last prekey.

        Earlier prekeys no longer need an owner, because their sites never use them again.
        """
        return {"expelled": dict(self.expelled), "signers": dict(self._signers), "prekeys": dict(self._latest)}

    def restore_sites(
        self, expelled: Mapping[str, str], signers: Mapping[str, str], prekeys: Mapping[str, str]
    ) -> None:
        """Restore the data that `known_sites` returned before a restart."""
        self.expelled |= expelled
        self._signers |= signers
        self._latest |= prekeys
        self._owners |= {key: site for site, key in prekeys.items()}

    def forget(self, site: str) -> None:
        """Forget a site's prekey after a failed client round, because it may be used or lost."""
        self.ready.pop(site, None)

    def expel(self, site: str, reason: str) -> None:
        """Exclude a faulty site from the rest of the run, because sums with it would be discarded."""
        self.forget(site)
        self.expelled[site] = f"secure: {reason}, so the run continues without it"

    def refusals(self, round_: int) -> dict[str, str]:
        """Return the sites with prekeys that would refuse every plan in this round, with the reason."""
        refused = {}
        for site, answer in self.ready.items():
            if answer.signed is not None and answer.signed >= round_:
                refused[site] = f"secure: it has agreed to a sum of round {answer.signed + 1} already"
            elif answer.after is not None and answer.after[0] > round_:
                refused[site] = f"secure: it has masked an upload for round {answer.after[0] + 1} already"
            elif answer.after is not None and answer.after[0] == round_ and self._uses_up(answer.after[1], round_):
                refused[site] = f"secure: it names {answer.after[1]} attempts at this round"
        return refused

    def _uses_up(self, attempt: int, round_: int) -> bool:
        """Return whether a site names an attempt that this run never made, so high that the numbers could run out."""
        return attempt >= _MOST_ATTEMPTS and attempt > self._attempts.get(round_, -1)

    def next_attempt(self, round_: int, cohort: Collection[str]) -> int:
        """Return the number of the next attempt at a round, above all numbers that the server and cohort remember."""
        after = [self.ready[site].after for site in cohort]
        numbers = [position[1] for position in after if position is not None and position[0] == round_]
        return 1 + max([*numbers, self._attempts.get(round_, -1)])

    def attempt(
        self, round_: int, attempt: int, cohort: Collection[str], broadcast: str, table: str = "", entries: str = ""
    ) -> UnmaskingAttempt:
        """Begin an attempt with these sites, which uses up their prekeys.

        Args:
            broadcast: digest of the message to every site; "" if messages differ by site.
            table, entries: text and digest of the table of entries; "" if every site sends every entry.

        Raises:
            QuorumError: sites would refuse a plan for this cohort.
        """
        settings, count = self.settings, len(cohort)
        settings.check_cohort(count)
        degree, threshold = settings.graph(count)
        plan = AttemptPlan(
            run=self.run, round=round_, attempt=attempt, roster=roster_digest(self.roster) if self.roster else "",
            app=self.app, config=self.config, broadcast=broadcast, entries=entries, bits=settings.bits,
            most_weight=settings.most_weight, bound=settings.bound, noise=settings.noise, least=settings.least,
            colluding=settings.colluding, quorum=settings.quorum(count), threshold=threshold, neighbours=degree,
            members=tuple(self.ready.pop(site).prekey for site in sorted(cohort)),
        )  # fmt: skip
        self._attempts = {round_: attempt}
        return UnmaskingAttempt(plan, table)
