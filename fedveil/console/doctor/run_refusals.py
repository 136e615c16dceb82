"""Check a run against a site policy in a file before the run starts, with the site's own decisions."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from fedveil.client_app.instruction import ClientAssignment, TrainInstruction
from fedveil.client_app.node_config import NamedDataset, SiteConfig
from fedveil.client_app.policy import decisions
from fedveil.client_app.policy.site_policy import SitePolicy, policy_of_site
from fedveil.config import RunConfig
from fedveil.console.flower.app_bundle import build_bundle
from fedveil.contract.method import hyperparameters_of
from fedveil.errors import PolicyError
from fedveil.federation.exchange import MessageExchange
from fedveil.guard import run_signature
from fedveil.guard.installed_bundle import module_digests

__all__ = ["list_run_refusals", "read_policy", "verify_bundle"]


def read_policy(file: Path) -> SitePolicy:
    """Read a policy; a PolicyError names its file, unlike in a site's own errors, which the server can read."""
    try:
        return policy_of_site(_site(file))
    except PolicyError as error:
        raise PolicyError(f"--policy {file}: {str(error).removeprefix('policy: ')}") from None


def verify_bundle(app: Path | None, config: RunConfig) -> decisions.VerifiedBundle:
    """Build an app's bundle and return its facts as a site's guard would. Raises ConfigError, PolicyError."""
    content = build_bundle(app)
    digest, modules = hashlib.sha256(content).hexdigest(), module_digests(content)
    decisions.check_modules(config.task.module, modules)
    signer = run_signature.verify_signer(config.run.signature, config.run.name, digest)
    return decisions.VerifiedBundle(digest, signer, modules)


def list_run_refusals(
    file: Path, bundle: decisions.VerifiedBundle, exchange: MessageExchange, config: RunConfig, up: int
) -> list[PolicyError]:
    """Return the site's refusals before the run's first round, counting field sizes as message sizes.

    Args:
        file: the site's policy.
        up: bytes of the largest upload.
    """
    site = _site(file)
    if name := config.task.data_set:  # whether a site has it is not known here
        site = site.model_copy(update={"data_sets": {name: NamedDataset(data="/nonexistent")}})
    order = TrainInstruction(0, True, "site", "explain", exchange.name, json.dumps(hyperparameters_of(exchange.method)))
    down = exchange.largest("down")
    asked = ClientAssignment(order, config, site)
    refusals = list(decisions.list_refusals(asked, bundle, down))
    least = None if config.secure.enabled else policy_of_site(site).min_examples
    try:
        decisions.check_upload(asked, down, up, least)
    except PolicyError as error:
        refusals.append(error)
    return refusals


def _site(policy: Path) -> SiteConfig:
    return SiteConfig(policy=str(policy.absolute()), state_dir=Path("/nonexistent"))
