"""What `fedveil doctor` says of a site's policy, and `fedveil site start` of names in it that may be slips."""

from __future__ import annotations

from fedveil import strategies, tasks
from fedveil.client_app.site.node_config import Site
from fedveil.client_app.site.policy import Policy, of_site
from fedveil.console.provisioning.checks import Check
from fedveil.foreign import meant, shown

_NAMES = ("methods", "tasks", "models", "app_digests", "signers")  # a list of these without an entry permits nothing


def policy(file: str) -> Check:
    """A policy that can be read and names the app."""
    if not file:
        return Check("policy", "warn", "none: this site permits everything; name a site-policy.toml")
    found = of_site(Site(policy=file))
    if found.app_digests is None and found.signers is None:
        return Check(
            "policy",
            "warn",
            f"{file} names neither app-digests nor signers: any code may come, and could undo the rest",
        )
    if what := empty(found):
        return Check("policy", "warn", f"{file} permits nothing as it stands: {what} empty; fill in what is agreed on")
    if "permits" not in found.model_fields_set:
        return Check(
            "policy",
            "warn",
            f"{file} has no [permits]: every key of a run that nothing else in it names must have its default; "
            "fedveil explain --permits --set ... prints what a run needs",
        )
    if strange := unfamiliar(found):
        return Check("policy", "warn", f"{file}: {strange}")
    return Check("policy", "ok", f"{file} can be read")


def empty(policy: Policy) -> str:
    """Which lists of a policy permit nothing, for they have no entry; "" where none is so."""
    return ", ".join(name for name in _NAMES if getattr(policy, name) == []).replace("_", "-")


def unfamiliar(policy: Policy) -> str:
    """What a policy permits and this installation does not have, which may be a slip; "" where it has all of it."""
    said = []
    for key, named, known in (("methods", policy.methods, strategies.names()), ("tasks", policy.tasks, tasks.names())):
        for name in sorted(set(named or ()) - set(known)):
            near = meant(name, known).strip()
            said.append(f"{key} permits {shown(name, 80)}, which is not installed here" + f"; {near}" * bool(near))
    return "; ".join(said)
