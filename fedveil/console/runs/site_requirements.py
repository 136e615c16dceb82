"""A site policy's conditions for taking part in secure sums."""

from __future__ import annotations

from dataclasses import replace

from fedveil.client_app.policy.site_policy import SitePolicy
from fedveil.client_app.secure_round import requirements_of
from fedveil.federation.secagg.plan_checks import SiteRequirements


def site_requirements(policy: SitePolicy | None) -> SiteRequirements:
    """Return a policy's requirements for plans. `policy` is None for a site without a policy.

    A roster counts only if the policy also requires secure aggregation and admits only known code; otherwise a lying
    server could request an unmasked run, or send code of its own.
    """
    if policy is None:
        return SiteRequirements()
    enforced = requirements_of(policy)
    is_counted = policy.require_secure and (policy.app_digests or policy.signers)
    return enforced if is_counted else replace(enforced, roster="")
