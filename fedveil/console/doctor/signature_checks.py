"""The `fedveil doctor` check of the server's instruction keys, which a site pins."""

from __future__ import annotations

from pathlib import Path

from fedveil.client_app.node_config import SiteConfig
from fedveil.client_app.policy.site_policy import load_policy
from fedveil.console.doctor.checks import CheckResult
from fedveil.console.flower.instruction_key_files import keys_fingerprint
from fedveil.errors import PolicyError
from fedveil.federation.message_signatures.key_files import INSTRUCTION_KEYS, InstructionKeys


def check_instruction_keys(site: SiteConfig, kit: Path) -> CheckResult:
    """Check that the site pins readable instruction keys, and that its policy requires signatures made with them."""
    name, required = "instruction keys", _required(site)
    if not site.instruction_keys:
        if required:
            return CheckResult(
                name, "fail",
                "the policy requires signed instructions, but the node config has no instruction keys, so every run is "
                f"refused; take {INSTRUCTION_KEYS} and node-config.toml from a new kit (fedveil members kit)",
            )  # fmt: skip
        return CheckResult(
            name, "warn",
            "the node config names none, so instructions are not verified and could be forged; ask the operator "
            "for a new kit (fedveil members kit)",
        )  # fmt: skip
    named, own = Path(site.instruction_keys).expanduser(), kit / INSTRUCTION_KEYS
    file = own if own.is_file() and not named.exists() else named  # containers have other paths
    keys = InstructionKeys.from_file(file)
    about = f"{file}: {keys_fingerprint(keys.federation, keys.keys)}, for federation {keys.federation}"
    if required is False:
        return CheckResult(
            name, "warn",
            f"{about}; but the policy permits unsigned instructions: set require-signed-instructions = true",
        )  # fmt: skip
    return CheckResult(name, "ok", about)


def _required(site: SiteConfig) -> bool | None:
    """Return whether the policy requires signed instructions; None if it is unreadable, which another check reports."""
    try:
        return load_policy(site).requires_signed_instructions(site)
    except PolicyError:
        return None
