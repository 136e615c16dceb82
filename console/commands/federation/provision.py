"""`fedveil provision`: makes certificates and a start-up kit for each site.

From a federation.toml it makes one folder: a certificate authority, the server's own folder, and the kits.
The smallest:

    name = "pilot"
    server = ["fl.example.org"]     # how sites reach the server
    sites = ["north", "south"]

docs/deploy.md has the other keys: ports, days, image.
"""

from __future__ import annotations

import argparse
import secrets
import shutil
from datetime import timedelta
from pathlib import Path

from cryptography.hazmat.primitives import serialization

from fedveil.console.flower import keys
from fedveil.console.flower.command_line import write_connection
from fedveil.console.flower.operators import write_login
from fedveil.console.provisioning import compose, kit
from fedveil.console.provisioning.federation import FederationFile, Members, parse, registry
from fedveil.console.provisioning.operators import Operators
from fedveil.errors import ConfigError

_CA_LASTS = 3  # times the server's certificate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("file", type=Path, help="federation.toml")
    parser.add_argument("--out", type=Path, help="folder to make; default: the federation's name, beside the file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Makes the folder, whole or not at all."""
    federation = parse(args.file)
    out = (args.out or args.file.parent / federation.name).absolute()
    if out.exists():
        raise ConfigError(
            f"--out: expected a folder that does not exist yet, found {out}; one that is there gets another "
            f"site by fedveil members add {out} SITE"
        )
    partial = out.with_name(f".{out.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        make(partial, federation, out)
        partial.replace(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"{out}: certificates, the server's folder and {len(federation.sites)} kits under kits/")
    print(
        f"next: move {out / 'ca' / 'ca.key'} to a safe place, start the server (fedveil server start {out}, or "
        "docs/deploy.md),"
    )
    print(f"      send each site its kit, and register what comes back: fedveil members register {out} request.json")
    return 0


def make(folder: Path, federation: FederationFile, final: Path) -> None:
    """Everything of a new federation in `folder`, which will lie at `final`."""
    for name in ("ca", "server", "server/flower", "server/roster", "kits", "registry"):
        (folder / name).mkdir(mode=0o700, parents=True)
    folder.chmod(0o700)
    days = timedelta(days=federation.days)
    ca, ca_key = keys.new_ca(f"{federation.name} CA", _CA_LASTS * days)
    keys.write_private(folder / "ca" / "ca.key", ca_key, serialization.PrivateFormat.PKCS8)
    for place in ("ca", "server"):
        keys.write_certificate(folder / place / "ca.crt", ca)
    keys.write_server(folder / "server", ca, ca_key, federation.server_names, days)
    secret = folder / "server" / "superexec-secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32))
    home = folder / "server" / "flower"
    write_connection(home, federation.control, final / "server" / "ca.crt")
    write_login(home, federation.control, Operators.create(registry(folder), federation.days))
    (folder / "server" / "compose.yaml").write_text(compose.server(federation, str(final)))
    (folder / "server" / "compose.gpu.yaml").write_text(compose.gpu("serverapp"))
    (folder / "server" / "compose.operators.yaml").write_text(compose.operators(federation))
    for site in federation.sites:
        kit.write(folder / "kits" / f"{site}.tar.gz", federation, site, (folder / "ca" / "ca.crt").read_bytes())
    Members.create(folder, federation)
