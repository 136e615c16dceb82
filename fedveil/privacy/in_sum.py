"""Noise that is whole in the sum of uploads alone: each site adds a share of it, in integers, before it masks them.

After Kairouz, Liu, Steinke: The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure Aggregation,
2021. `secure.noise = "sum"` turns it on, for `dp.*` and for methods that add noise themselves.

| symbol | code | unit |
|---|---|---|
| z | `multiplier` | noise on the sum over what one row moves it by |
| P | `part` | of an upload, by which adding or removing one row moves it; replacing one moves it by 2 P |
| m | `moved` | 1 where a row is added or removed, 2 where one is replaced |
| h | `honest` | sites of a sum whose noise nobody knows: secure.min-sites less secure.colluding |
| S, C, d | `scale`, `bound`, `entries` | integers a unit; bound on an entry; entries of an upload |
| sigma, sigma_i | `deviation` times sqrt h, `deviation` | standard deviation in the sum, and at a site; integers |

    integer_j = round(S clip(x_j, -C, C)) + noise_j
    sigma = D / (m / z - tau sqrt d),    sigma_i = sigma / sqrt h,    D = m P S + sqrt d (1 + 2^-21 S C)

D is the sensitivity of the integers. Two neighbours' uploads differ by m P, and clipping an entry moves no two values
apart. Rounding to integers moves an entry by at most 1/2 on either side, so their difference by 1, and d of them by
sqrt d. An entry is fp32, of weights within +-C and a change within +-C: two roundings of at most 2^-23 C on either
side, which the last term counts with all that fp64 rounds. So noise of z D / m integers is worth the z of the run
config, whatever the ring.

Formal guarantees, for each row of a site, if at most `colluding` sites of a sum tell the server their noise:
1. A sum that is opened has at least `secure.min-sites` uploads (site.py refuses others), so noise of at least sigma
   that nobody knows. Its divergence is a Gaussian's of multiplier z (accounting.py, "summed").
2. Against the server and all other sites together the site's own share is left: z / sqrt h ("own share").
3. All entries that are summed have noise, also the zeros of a tensor that a method leaves out.
4. A clipped entry is not refused: whether one is clipped depends on the rows, and a refusal would tell the server.

| case | result |
|---|---|
| secure.enabled = false, max-examples above 1, no honest site, no noise | ConfigError before any site is asked |
| more than one look at the rows between two sums | ConfigError: the second would be at a point without noise |
| the site's share is below 4 integers, or rounding more than doubles it | ConfigError: sums of it are no discrete
  Gaussian, or secure.bound is far above the values |
| a deterministic run | its noise is seeded: not private |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from typing_extensions import override

from fedveil.config import RunConfig
from fedveil.contract.budget import (
    SUMMED,
    Budget,
    Claim,
    Distributable,
    Neighbours,
    Plan,
    Spent,
    Summable,
    joint,
)
from fedveil.errors import ConfigError
from fedveil.privacy import accounting, discrete

MOST_ENTRIES = 1 << 30  # for which the table's distance is counted
_ROUNDED = 2.0**-21  # of the bound: what floats round an entry by, on both sides together
_FINE = 64  # sigma_i over what rounding adds to it; finer integers change nothing that is seen
_LEAST_TARGET = 1024.0
_SPARE = 2.0**-40  # what sums of floats may be above the most that can be drawn


@final
@dataclass(frozen=True)
class InSum(Claim):
    """A claim whose noise on what is summed is in the sum.

    Attributes:
        claim: the same with its noise at the site.
        noise: what an upload needs.
        honest: h.
    """

    claim: Claim
    noise: Summable
    honest: int

    @classmethod
    def of(cls, claim: Claim | None, config: RunConfig) -> InSum:
        """What secure.noise = "sum" asks for. Raises ConfigError as the table above has it."""
        secure = config.secure
        if not secure.enabled:
            raise ConfigError(
                'secure.noise: expected "site" with secure.enabled = false, found "sum": a server that sees single '
                "uploads sees too little noise; turn on secure aggregation"
            )
        if secure.max_examples != 1:
            raise ConfigError(
                f'secure.max-examples: expected 1 with secure.noise = "sum", found {secure.max_examples}: a site that '
                "counts for more moves the sum by more; leave it out"
            )
        if secure.honest < 1:
            raise ConfigError(
                f"secure.colluding: expected less than secure.min-sites, {secure.min_sites}, found {secure.colluding}: "
                "nobody's noise would be unknown; raise secure.min-sites"
            )
        if not isinstance(claim, Distributable):
            found = "no noise" if claim is None else "one that must add all of it at the site"
            raise ConfigError(
                f'secure.noise: expected "site", or a run with noise that can be shared out, found {found}; set dp.*, '
                "or choose dp_fpl"
            )
        noise = claim.summable(config.train.batch_size, config.train.max_steps)
        if noise.multiplier == 0 or 0 in noise.kept:
            raise ConfigError('secure.noise: expected "site" without noise, found "sum"; set noise above 0')
        return cls(claim, noise, secure.honest)

    @property
    @override
    def budget(self) -> Budget:
        return self.claim.budget

    @override
    def privacy_spent(self, plan: Plan) -> Spent:
        """Both figures: against the server with the sites that collude, and against all others together."""
        if plan.steps != 1:
            raise ConfigError(f'steps: expected 1 between two sums with secure.noise = "sum", found {plan.steps}')
        how = (self.noise.sampling, plan, self.noise.across_rounds)
        return accounting.in_sum(*(accounting.spent(z, *how) for z in self._multipliers))

    @property
    def _multipliers(self) -> tuple[float, float]:
        """Of a whole look: with the noise of all honest sites, and with the site's own share."""
        noise = self.noise
        return tuple(joint(noise.multiplier / root, *noise.kept) for root in (1.0, math.sqrt(self.honest)))  # type: ignore[return-value]

    def against_all(self, counted: float) -> float:
        """What rows that are charged an epsilon of `counted` lose against the server and all other sites together.

        Exact for looks at all rows; of subsampled ones, about.
        """
        budget, (z, own) = self.budget, self._multipliers
        once = accounting.multiplier_for(lambda z: {(SUMMED, 0, 0, z): 1}, counted, budget.delta, budget.neighbours)
        return accounting.epsilon({(SUMMED, 0, 0, once * own / z): 1}, budget.delta, budget.neighbours)

    @property
    def words(self) -> str:
        """Where the noise is, and on whom the claim counts."""
        return (
            f"noise is in the sum: the claim counts on {self.honest} honest sites in every sum, each of which "
            "adds a share that it tells nobody"
        )

    @property
    def moved(self) -> int:
        """m."""
        return 2 if self.claim.budget.neighbours is Neighbours.REPLACE_ONE else 1

    def deviation(self, scale: float, entries: int, bound: float) -> float:
        """sigma_i."""
        fixed, each = self._line(entries, bound)
        return fixed + each * scale

    def _line(self, entries: int, bound: float) -> tuple[float, float]:
        """sigma_i = the first + S times the second."""
        root = math.sqrt(entries)
        of_sensitivity = 1 / (
            self.moved / self.noise.multiplier - discrete.tau(self.honest, discrete.LEAST_SIGMA) * root
        )
        share = of_sensitivity / math.sqrt(self.honest)
        return share * root, share * (self.moved * self.noise.part + root * _ROUNDED * bound)

    def scale(self, entries: int, bound: float, room: float) -> float:
        """S: as fine as the noise makes sensible, and as the ring has room for.

        Args:
            room: integers that one site's entry may have with its noise, so that no sum wraps.

        Raises:
            ConfigError: no scale fits.
        """
        fixed, each = self._line(entries, bound)
        target = min(max(_FINE * fixed, _LEAST_TARGET), discrete.MOST_SIGMA * (1 - _SPARE))
        fits = (room - 4 - discrete.TAIL * fixed) / (bound + discrete.TAIL * each)
        scale = min((target - fixed) / each, fits)
        fine = scale > 0 and fixed + each * scale >= discrete.LEAST_SIGMA
        if not (entries <= MOST_ENTRIES and fine and self.excess(scale, entries, bound) <= 1):
            raise ConfigError(
                "secure.bound: expected one for which the noise in the sum is at most twice the exact one's and has at "
                f"least {discrete.LEAST_SIGMA:g} integers a site, found another for {entries} entries within "
                f"+-{bound:g}; lower it to what the values need, or take secure.ring-bits = 64"
            )
        return scale

    def excess(self, scale: float, entries: int, bound: float) -> float:
        """By how much rounding makes the noise larger than the exact one, as a fraction of it."""
        exact = self.noise.multiplier * self.noise.part * scale / math.sqrt(self.honest)
        return self.deviation(scale, entries, bound) / exact - 1
