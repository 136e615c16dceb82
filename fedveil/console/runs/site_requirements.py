"""A site policy as the conditions under which the site takes part in secure sums."""

from __future__ import annotations

from dataclasses import replace

from fedveil.client_app.policy.site_policy import SitePolicy
from fedveil.client_app.secure_round import requirements_of
from fedveil.federation.secagg.plan_checks import SiteRequirements


def site_requirements(policy: SitePolicy | None) -> SiteRequirements:
    """Return what a policy requires of plans. None: a site without a policy.

    A roster counts only if the policy also requires secure aggregation and admits only known code: else a server that
    lies asks for a run in the clear, or sends code of its own.
    """
    if policy is None:
        return SiteRequirements()
    enforced = requirements_of(policy)
    is_counted = policy.require_secure and (policy.app_digests or policy.signers)
    return enforced if is_counted else replace(enforced, roster="")
