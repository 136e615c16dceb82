"""The policy checks of `fedveil doctor`, and the warnings of `fedveil site start` about possible typos in names."""

from __future__ import annotations

from fedveil import strategies, tasks
from fedveil.client_app.node_config import SiteConfig
from fedveil.client_app.policy.site_policy import SitePolicy, policy_of_site
from fedveil.console.doctor.checks import CheckResult
from fedveil.privacy.privacy_warnings import MAX_RECOMMENDED_EPSILON, delta_warnings, noise_warnings
from fedveil.sanitize import sanitize, suggest_name

_NAMES = (
    "methods",
    "tasks",
    "models",
    "app_digests",
    "signers",
)  # if one of these lists is empty, nothing is permitted


def check_policy_file(file: str) -> CheckResult:
    """Check that the policy can be read and restricts which apps may run."""
    if not file:
        return CheckResult("policy", "warn", "no policy: this site permits everything; name a site-policy.toml")
    policy = policy_of_site(SiteConfig(policy=file))
    if policy.app_digests is None and policy.signers is None:
        return CheckResult(
            "policy",
            "warn",
            f"{file} names neither app-digests nor signers, so any code may run and could bypass the other rules",
        )
    if what := check_empty_policy(policy):
        return CheckResult("policy", "warn", f"{file} permits nothing yet (empty: {what}); fill in the agreed values")
    if "permits" not in policy.model_fields_set:
        return CheckResult(
            "policy",
            "warn",
            f"{file} has no [permits], so every run config key that the policy does not name must have its default; "
            "fedveil explain --permits --set ... prints what a run needs",
        )
    if strange := unknown_names(policy):
        return CheckResult("policy", "warn", f"{file}: {strange}")
    if weak := privacy_limits_warnings(policy):
        return CheckResult("policy", "warn", f"{file}: {'; '.join(weak)}")
    return CheckResult("policy", "ok", f"{file} is readable")


def privacy_limits_warnings(policy: SitePolicy) -> list[str]:
    """Return a sentence for each policy limit too weak to mean much; [] if the policy has no privacy limits."""
    budget, warnings = policy.budget, []
    if "delta" in policy.model_fields_set or policy.max_epsilon is not None:
        warnings += delta_warnings(budget.delta, [policy.min_examples] if policy.min_examples else ())
    if policy.max_epsilon is not None and policy.max_epsilon > MAX_RECOMMENDED_EPSILON:
        warnings.append(
            f"max-epsilon {policy.max_epsilon:g} can make a conclusion e^{policy.max_epsilon:g} times as likely; "
            f"use 3, or at most {MAX_RECOMMENDED_EPSILON:g}"
        )
    if policy.min_noise_multiplier is not None:
        warnings += noise_warnings([policy.min_noise_multiplier], budget)
    return [f"in this site's policy: {sentence}" for sentence in warnings]


def check_empty_policy(policy: SitePolicy) -> str:
    """List the policy keys that permit nothing because they are empty; "" if there are none."""
    return ", ".join(name for name in _NAMES if getattr(policy, name) == []).replace("_", "-")


def unknown_names(policy: SitePolicy) -> str:
    """Report names that a policy permits but this installation lacks, which may be typos; "" if all are known."""
    problems = []
    for key, named, known in (
        ("methods", policy.methods, strategies.list_methods()),
        ("tasks", policy.tasks, tasks.list_tasks()),
    ):
        for name in sorted(set(named or ()) - set(known)):
            near = suggest_name(name, known).strip()
            problems.append(
                f"{key} permits {sanitize(name, 80)}, which is not installed here" + f"; {near}" * bool(near)
            )
    return "; ".join(problems)
