"""The charge for a site that cannot verify the other sites in a sum.

Noise in the sum includes the other sites' shares (distributed_dgauss.py). Without a roster in its policy, a site knows
of these sites only from the server, which could impersonate all of them. The site can then rely only on its own share
of the noise: z / sqrt h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from typing_extensions import override

from fedveil.contract.privacy import OWN_SHARE, PrivacyBudget, PrivacyGuarantee, SamplingPlan, Spent
from fedveil.privacy import accounting
from fedveil.privacy.distributed_dgauss import DistributedDiscreteGaussian

WITHOUT_ROSTER = (
    "this site's policy names no roster, so the server could be all other sites, and the ledger counts only the site's "
    "own share of the noise in the sum"
)


@final
@dataclass(frozen=True)
class OwnShareGuarantee(PrivacyGuarantee):
    """A guarantee with noise in the sum, charged at a site as if the server knew the other sites' noise."""

    claim: DistributedDiscreteGaussian

    @property
    @override
    def budget(self) -> PrivacyBudget:
        return self.claim.budget

    @override
    def privacy_spent(self, plan: SamplingPlan) -> Spent:
        """Return the site's own share both as the charge for the sum and as the charge against all others together."""
        charges = self.claim.privacy_spent(plan)
        own = {step: count for step, count in charges.items() if step.kind == OWN_SHARE}
        return {**accounting.epsilon_against_all(charges), **own}


def charged_guarantee(claim: PrivacyGuarantee, roster: str | None) -> PrivacyGuarantee:
    """Return the guarantee used to charge a site with this roster, or no roster, in its policy."""
    return OwnShareGuarantee(claim) if isinstance(claim, DistributedDiscreteGaussian) and not roster else claim
