"""Noise that is complete only in the sum of uploads: each site adds an integer share before masking.

The mechanism follows Kairouz, Liu, Steinke: The Distributed Discrete Gaussian Mechanism for Federated
Learning with Secure Aggregation, 2021. `secure.noise = "sum"` turns it on, for `dp.*` and for methods
that add noise themselves.

| symbol | code | unit |
|---|---|---|
| z | `multiplier` | noise on the sum over D1 |
| P | `part` | how far one example moves an upload from the upload without it |
| h | `honest` | sites in a sum with noise unknown to the adversary: secure.min-sites - secure.max-colluders |
| S, C, d | `scale`, `bound`, `entries` | integers per unit; bound on an entry; entries in an upload |
| sigma_i | `deviation` | standard deviation at a site; integers |
| V | `variations` | distance of one sum from a continuous mechanism |

    integer_j = round(S clip(x_j, -C, C)) + noise_j
    sigma_i^2 = x^2 + 1/12,    x = D1 / (sqrt h (1 / z - tau sqrt d)),    D1 = P S + sqrt d (1 + 2^-21 S C)
    V = sqrt d 9e-4 / sigma^4 + d tau + the sampler's distance,    sigma^2 = h sigma_i^2

D1 is the sensitivity of the integers to adding or removing one record. The two uploads differ by P, and clipping an
entry never moves two values farther apart. Rounding to integers moves an entry by at most 1/2 in each upload. So the
difference in one entry changes by at most 1, and the difference over d entries by at most sqrt d. An entry is fp32, the
sum of weights within +-C and a change within +-C. That makes two roundings of at most 2^-23 C in each upload, which the
last term counts along with all fp64 rounding. So noise of z D1 integers corresponds to the run config's z in any ring.
Two records are at most 2 D1 apart.

round(N(0, s^2)) added to integers is the continuous mechanism with a rounded result. The discrete Gaussian
of sigma is within sqrt d 9e-4 / sigma^4 of round(N(0, sigma^2 - 1/12)) in total variation (8.51e-4 from
sigma = 4 on), and a sum of h draws is within a log-ratio of tau per entry of one draw. So sums count as
continuous if V fits into the guarantee's delta. S is fine enough for that up to the sampler's largest
sigma; beyond it, sums are counted by Renyi divergences (accounting.py, "summed").

Formal guarantees, for each example of a site, if the server follows the protocol and at most `colluding`
sites in a sum tell it their noise:
1. An unmasked sum has at least `secure.min-sites` uploads (site.py refuses others), so its noise has a deviation of at
   least sigma that the adversary does not know.
2. Against the server and all other sites together, only the site's own share remains: z / sqrt h ("own
   share").
3. All summed entries have noise, even the zeros of a tensor that a method omits.
4. An upload with clipped entries is not refused: whether an entry is clipped depends on the examples, so a refusal
   would reveal something about them to the server.

| case | result |
|---|---|
| secure.enabled = false, max-weight above 1, no honest site, no noise | ConfigError before any site is asked |
| more than one use of the examples between two sums | ConfigError: the second use would start from weights without
  noise |
| the site's share is below 4 integers, or rounding more than doubles it | ConfigError: sums of it are not discrete
  Gaussian, or secure.clip-bound is far above the values |
| a deterministic run | not private, because its noise is seeded |
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import final

from typing_extensions import override

from fedveil.config import RunConfig
from fedveil.contract.privacy import (
    DistributableGuarantee,
    PrivacyBudget,
    PrivacyGuarantee,
    SamplingPlan,
    Spent,
    SummableNoise,
    joint_budget,
)
from fedveil.errors import ConfigError
from fedveil.privacy import accounting, discrete_gaussian
from fedveil.privacy.ledger_account import MAX_RUNS

MOST_ENTRIES = 1 << 30  # maximum number of entries for which the table's distance is accounted
_ROUNDED = 2.0**-21  # float rounding of an entry, as a fraction of the bound, in both uploads together
_FINE = 64  # sigma_i relative to the effect of rounding; finer integers make no visible difference
_LEAST_TARGET = 1024.0
_LARGEST_EPSILON = 100.0  # largest epsilon of a guarantee; above it, noise in a sum gives none
_DISCRETE = 9e-4  # sigma^4 times the distance of one entry's discrete Gaussian from a rounded continuous one
_ROUNDED_VARIANCE = 1 / 12  # variance from rounding a continuous value to an integer
_RUNS = 8  # multiple of the planned length for which a sum is fine enough; failed attempts are also charged
_UNLIMITED = 8.0  # epsilon used to judge the sums of a guarantee without a limit
_SPARE = 2.0**-40  # margin by which sums of floats may exceed the largest draw


@final
@dataclass(frozen=True)
class DistributedDiscreteGaussian(PrivacyGuarantee):
    """A privacy guarantee whose noise is spread over the uploads in a sum.

    Attributes:
        claim: the same guarantee with its noise at the site.
        noise: the noise that an upload needs.
        honest: h, as in the table above.
        rounds: planned number of sums with a site's uploads.
        variations: V of a sum and of the site's own share, as charged; 1 if too large or not yet known.
    """

    claim: PrivacyGuarantee
    noise: SummableNoise
    honest: int
    rounds: int
    variations: tuple[float, float] = (1.0, 1.0)

    @classmethod
    def from_guarantee(cls, claim: PrivacyGuarantee | None, config: RunConfig) -> DistributedDiscreteGaussian:
        """Create the guarantee for secure.noise = "sum". Raises ConfigError in the cases that the table above lists."""
        secure = config.secure
        if not secure.enabled:
            raise ConfigError(
                'secure.noise: "sum" requires secure.enabled = true, because a single upload has too little '
                "noise; turn on secure aggregation"
            )
        if secure.max_weight != 1:
            raise ConfigError(
                f'secure.max-weight: secure.noise = "sum" requires 1, found {secure.max_weight}: a site with a '
                "larger weight moves the sum by more; leave it out"
            )
        if secure.honest < 1:
            raise ConfigError(
                f"secure.max-colluders: expected less than {secure.min_sites} (secure.min-sites), found "
                f"{secure.max_colluders}: the colluders would know all of the noise; raise secure.min-sites"
            )
        if not isinstance(claim, DistributableGuarantee):
            fault = "no noise" if claim is None else "one that must add all noise at the site"
            raise ConfigError(
                f'secure.noise: expected "site", or a run whose sites can share the noise, found {fault}; set dp.*, '
                "or choose dp_fpl"
            )
        noise = claim.summable(config.train.batch_size, config.train.max_steps)
        if noise.multiplier == 0 or 0 in noise.kept:
            raise ConfigError('secure.noise: "sum" has no effect in a run without noise; set the noise above 0')
        return cls(claim, noise, secure.honest, config.run.rounds)

    @property
    @override
    def budget(self) -> PrivacyBudget:
        return self.claim.budget

    @override
    def privacy_spent(self, plan: SamplingPlan) -> Spent:
        """Return both charges: against the server with the colluding sites, and against all others together."""
        if plan.steps != 1:
            raise ConfigError(f'steps: expected 1 between two sums with secure.noise = "sum", found {plan.steps}')
        how = (self.noise.sampling, plan, self.noise.across_rounds)
        charges, own = (accounting.max_charged(z, *how) for z in self._multipliers)
        return accounting.epsilon_in_sum(charges, own, self.variations)

    @property
    def _multipliers(self) -> tuple[float, float]:
        """Return the multipliers for a full use: with all honest sites' noise, and with the site's own share."""
        noise = self.noise
        return tuple(joint_budget(noise.multiplier / root, *noise.kept) for root in (1.0, math.sqrt(self.honest)))  # type: ignore[return-value]

    @property
    def words(self) -> str:
        """Return a sentence that says where the noise is added and which parties the guarantee relies on."""
        return (
            f"noise is in the sum: the claim relies on {self.honest} honest sites in every sum, each of which keeps "
            "its share of the noise secret, and on a server that follows the protocol"
        )

    def at_scale(self, scale: float, entries: int, bound: float) -> DistributedDiscreteGaussian:
        """Return the guarantee for uploads at this scale, whose distance from a continuous mechanism is known."""
        own = self.deviation(scale, entries, bound)
        return replace(self, variations=(self._charged(own, entries, self.honest), self._charged(own, entries, 1)))

    def as_planned(self) -> DistributedDiscreteGaussian:
        """Return the guarantee for sums at the full resolution of `scale`, which the ring must be large enough for."""
        return replace(self, variations=(self._fine, self._fine if self.honest == 1 else 1.0))

    @property
    def _fine(self) -> float:
        """Return the largest V at which sums count as continuous, given the run's and a reservation's delta."""
        budget = self.claim.budget
        epsilon = budget.epsilon if budget.epsilon <= _LARGEST_EPSILON else _UNLIMITED
        share = accounting.VARIATION_SHARE * budget.delta / MAX_RUNS
        return share / (1 + math.exp(epsilon + 1)) / (_RUNS * self.rounds)  # + 1: epsilon is larger at delta / MAX_RUNS

    def _charged(self, own: float, entries: int, sites: int) -> float:
        """Return the charged V, one of only two values, so that a different ring does not change a run's steps."""
        return self._fine if self._variation(own, entries, sites) <= self._fine else 1.0

    def _variation(self, own: float, entries: int, sites: int) -> float:
        """Return V for the noise of this many sites, each with a deviation of `own`."""
        discrete = math.sqrt(entries) * _DISCRETE / (sites * own**2) ** 2
        summands = entries * discrete_gaussian.sum_divergence(sites, own)
        sampler = discrete_gaussian.total_variation_bound(entries * sites, own)
        return min((discrete + summands + sampler) * (1 + _SPARE), 1.0)

    def deviation(self, scale: float, entries: int, bound: float) -> float:
        """Return sigma_i, the standard deviation of a site's noise."""
        fixed, each = self._line(entries, bound)
        return math.sqrt((fixed + each * scale) ** 2 + _ROUNDED_VARIANCE)

    def _line(self, entries: int, bound: float) -> tuple[float, float]:
        """Return (a, b) with x = a + S b."""
        root = math.sqrt(entries)
        of_sensitivity = 1 / (
            1 / self.noise.multiplier
            - discrete_gaussian.sum_divergence(self.honest, discrete_gaussian.LEAST_SIGMA) * root
        )
        share = of_sensitivity / math.sqrt(self.honest)
        return share * root, share * (self.noise.part + root * _ROUNDED * bound)

    def _continuous_from(self, entries: int) -> float:
        """Return the sigma_i above which sums are fine enough to count as continuous, if the guarantee has a limit."""
        if self.claim.budget.epsilon > _LARGEST_EPSILON:
            return 0.0
        spared = self._fine / 2  # the rest is for the other terms of V
        return math.sqrt(math.sqrt(math.sqrt(entries) * _DISCRETE / spared) / self.honest)

    def scale(self, entries: int, bound: float, room: float) -> float:
        """Return S, as fine as is useful under the noise and fits into the ring.

        Args:
            room: the largest integer for one site's noisy entry, so that no sum wraps around.

        Raises:
            ConfigError: no scale fits.
        """
        fixed, each = self._line(entries, bound)
        finest = max(_FINE * fixed, _LEAST_TARGET, self._continuous_from(entries))
        target = math.sqrt(min(finest, discrete_gaussian.MOST_SIGMA * (1 - _SPARE)) ** 2 - _ROUNDED_VARIANCE)
        fits = (room - 5 - discrete_gaussian.TAIL * fixed) / (bound + discrete_gaussian.TAIL * each)
        scale = min((target - fixed) / each, fits)
        fine = scale > 0 and self.deviation(scale, entries, bound) >= discrete_gaussian.LEAST_SIGMA
        if not (entries <= MOST_ENTRIES and fine and self.excess(scale, entries, bound) <= 1):
            raise ConfigError(
                f"secure.clip-bound: +-{bound:g} is too large for {entries} entries, because the noise in the sum "
                f"must be at most twice the exact noise, with at least {discrete_gaussian.LEAST_SIGMA:g} integers "
                "per site; lower it to what the values need, or set secure.ring-bits = 64"
            )
        return scale

    def excess(self, scale: float, entries: int, bound: float) -> float:
        """Return how much rounding increases the noise, as a fraction of the exact noise."""
        exact = self.noise.multiplier * self.noise.part * scale / math.sqrt(self.honest)
        return self.deviation(scale, entries, bound) / exact - 1
