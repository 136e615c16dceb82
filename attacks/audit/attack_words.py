"""What each attack of this package does, in a line for people who read an audit's findings."""

from __future__ import annotations

import re

from fedveil.attacks.audit.findings import control_name, is_control_name

__all__ = ["describe_attack"]

_WORDS = {
    "loss": "calls an example a member if the model's loss on it is low",
    "calibrated": "calls an example a member if training lowered the model's loss on it",
    "alignment": "compares the direction of a site's update with the example's own gradient",
    "fedmia": "asks whether the example's gradient fits this site's update better than the other sites' updates",
    "projection of A": "asks how much of the example's gradient lies in the span of the sent factor A",
    "projection of B": "asks how much of the example's gradient lies in the span of the sent factor B",
}
_RENYI = re.compile(r".{1,80} (0|10|100)%")


def describe_attack(name: str) -> str:
    """Return what the attack with this score name does; "" for an attack of another package."""
    if is_control_name(name):
        return describe_attack(name.removesuffix(control_name("")))
    if _RENYI.fullmatch(name):
        return "calls an example a member if the model is certain of its next tokens (MaxRenyi)"
    return _WORDS.get(name, "")
