"""The check of `fedveil doctor` on the server's instruction keys, which a site pins."""

from __future__ import annotations

from pathlib import Path

from fedveil.client_app.node_config import SiteConfig
from fedveil.client_app.policy.site_policy import load_policy
from fedveil.console.doctor.checks import CheckResult
from fedveil.console.flower.instruction_key_files import keys_fingerprint
from fedveil.errors import PolicyError
from fedveil.federation.message_signatures.key_files import INSTRUCTION_KEYS, InstructionKeys


def check_instruction_keys(site: SiteConfig, kit: Path) -> CheckResult:
    """Check that the site pins readable instruction keys, and that its policy requires signatures by them."""
    name, required = "instruction keys", _required(site)
    if not site.instruction_keys:
        if required:
            return CheckResult(
                name, "fail",
                "the policy requires signed instructions, and the node config names no instruction keys: every run is "
                f"refused; take {INSTRUCTION_KEYS} and node-config.toml from a new kit (fedveil members kit)",
            )  # fmt: skip
        return CheckResult(
            name, "warn",
            "the node config names none: instructions are not verified, so others could forge them; ask the operator "
            "for a new kit (fedveil members kit)",
        )  # fmt: skip
    named, own = Path(site.instruction_keys).expanduser(), kit / INSTRUCTION_KEYS
    file = own if own.is_file() and not named.exists() else named  # containers have other paths
    keys = InstructionKeys.from_file(file)
    about = f"{file}: {keys_fingerprint(keys.federation, keys.keys)}, of federation {keys.federation}"
    if required is False:
        return CheckResult(
            name, "warn",
            f"{about}; the policy permits unsigned instructions all the same: set require-signed-instructions = true",
        )  # fmt: skip
    return CheckResult(name, "ok", about)


def _required(site: SiteConfig) -> bool | None:
    """Return whether the policy requires signed instructions; None if it cannot be read, which another check says."""
    try:
        return load_policy(site).requires_signed_instructions(site)
    except PolicyError:
        return None
