"""`fedveil provision`: makes certificates and a start-up kit for each site.

From a federation.toml it makes one folder, which holds a certificate authority, the server's folder and the kits.
The smallest federation.toml:

    name = "pilot"
    server = ["fl.example.org"]     # how sites reach the server
    sites = ["north", "south"]

docs/deploy/provision.md lists the other keys, such as ports, days, image and signatures.
"""

from __future__ import annotations

import argparse
import secrets
import shutil
from datetime import timedelta
from pathlib import Path

from cryptography.hazmat.primitives import serialization

from fedveil.console.flower import certificates, instruction_key_files
from fedveil.console.flower.flwr_cli import write_connection
from fedveil.console.flower.operator_tokens import write_login
from fedveil.console.provisioning import compose_files, instruction_keys, startup_kit
from fedveil.console.provisioning.federation_folder import (
    FederationFile,
    SiteRegistry,
    parse_federation,
    registry_folder,
)
from fedveil.console.provisioning.operator_registry import OperatorRegistry
from fedveil.console.terminal import say
from fedveil.errors import ConfigError

_CA_LASTS = 3  # times as long as the server certificate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("file", type=Path, help="federation.toml")
    parser.add_argument("--out", type=Path, help="folder to create; default: the federation's name, next to the file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Create the complete folder, or nothing."""
    federation = parse_federation(args.file)
    out = (args.out or args.file.parent / federation.name).absolute()
    if out.exists():
        raise ConfigError(
            f"--out: expected a folder that does not exist yet, found {out}; to add a site to an existing federation, "
            f"run fedveil members add {out} SITE"
        )
    partial = out.with_name(f".{out.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        provision_federation(partial, federation, out)
        partial.replace(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    say(f"{out}: certificates, the server's folder, and {len(federation.sites)} kits in kits/")
    members = SiteRegistry(out)
    fingerprint = instruction_key_files.keys_fingerprint(members.federation_id, members.instruction_keys)
    say(f"instruction keys, to be confirmed with each site by phone: {fingerprint}")
    say(f"next: 1. move {out / 'ca' / 'ca.key'} and instruction-standby.key in that folder to a safe place", hang=9)
    say(f"      2. start the server (with containers: docs/deploy/provision.md): fedveil server start {out}", hang=9)
    say(
        "      3. send each site its kit, and register its request with the fingerprint that the site reads to you: "
        f"fedveil members register {out} request.json --fingerprint SHA256:...",
        hang=9,
    )
    return 0


def provision_federation(folder: Path, federation: FederationFile, final: Path) -> None:
    """Write all of a new federation's files to `folder`, which is later moved to `final`."""
    for name in ("ca", "server", "server/flower", "server/instruct", "server/roster", "kits", "registry"):
        (folder / name).mkdir(mode=0o700, parents=True)
    folder.chmod(0o700)
    days = timedelta(days=federation.days)
    ca, ca_key = certificates.new_ca(f"{federation.name} CA", _CA_LASTS * days)
    certificates.write_private(folder / "ca" / "ca.key", ca_key, serialization.PrivateFormat.PKCS8)
    for place in ("ca", "server"):
        certificates.write_certificate(folder / place / "ca.crt", ca)
    certificates.write_server(folder / "server", ca, ca_key, federation.server_names, days)
    secret = folder / "server" / "superexec-secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32))
    home = folder / "server" / "flower"
    write_connection(home, federation.control, final / "server" / "ca.crt")
    write_login(home, federation.control, OperatorRegistry.create(registry_folder(folder), federation.days))
    (folder / "server" / "compose.yaml").write_text(compose_files.server_compose(federation, str(final)))
    (folder / "server" / "compose.gpu.yaml").write_text(compose_files.gpu_override("serverapp"))
    (folder / "server" / "compose.operators.yaml").write_text(compose_files.operators_override(federation))
    members = SiteRegistry.create(folder, federation, instruction_key_files.draw_keys(folder))
    pinned, ca_bytes = instruction_keys.pinned_keys(members), (folder / "ca" / "ca.crt").read_bytes()
    for site in federation.sites:
        startup_kit.write_kit(folder / "kits" / f"{site}.tar.gz", federation, site, ca_bytes, pinned)
