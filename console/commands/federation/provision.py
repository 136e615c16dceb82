"""`fedveil provision federation.toml`: a CA, the server's certificate, and a start-up kit for each site."""

from __future__ import annotations

import argparse
from datetime import timedelta
from pathlib import Path
from typing import Any

from fedveil.errors import ConfigError

_CA_LASTS = 3  # times the server's certificate


def add_parser(sub: Any) -> None:
    """Adds the sub-command."""
    parser = sub.add_parser(
        "provision", help="make a federation: certificates, the server's folder, a kit for each site"
    )
    parser.add_argument("file", type=Path, help="federation.toml; docs/deploy.md shows one")
    parser.add_argument("--out", type=Path, help="folder to make; default: the federation's name, beside the file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Makes the folder, whole or not at all."""
    import shutil

    from fedveil.console.provisioning import federation as federations

    federation = federations.parse(args.file)
    out = (args.out or args.file.parent / federation.name).absolute()
    if out.exists():
        raise ConfigError(f"--out: expected a folder that does not exist yet, found {out}; fedveil members changes one")
    partial = out.with_name(f".{out.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        make(partial, federation, out)
        partial.replace(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"{out}: certificates, the server's folder and {len(federation.sites)} kits under kits/")
    print(
        f"next: move {out / 'ca' / 'ca.key'} to a safe place, start the server (docs/deploy.md), send each site its kit,"
    )
    print(f"      and register what comes back: fedveil members register {out} request.json")
    return 0


def make(folder: Path, federation: Any, final: Path) -> None:
    """Everything of a new federation in `folder`, which will lie at `final`."""
    import secrets

    from cryptography.hazmat.primitives import serialization

    from fedveil.console.flower.local_federation import CONNECTION
    from fedveil.console.flower.machine import toml
    from fedveil.console.provisioning import compose, keys, kit
    from fedveil.console.provisioning import federation as federations

    for name in ("ca", "server", "server/flower", "kits"):
        (folder / name).mkdir(mode=0o700, parents=True)
    folder.chmod(0o700)
    days = timedelta(days=federation.days)
    ca, ca_key = keys.new_ca(f"{federation.name} CA", _CA_LASTS * days)
    keys.write_private(folder / "ca" / "ca.key", ca_key, serialization.PrivateFormat.PKCS8)
    for place in ("ca", "server"):
        keys.write_certificate(folder / place / "ca.crt", ca)
    keys.write_server(folder / "server", ca, ca_key, [*federation.server, "superlink", "localhost", "127.0.0.1"], days)
    secret = folder / "server" / "superexec-secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32))
    connection = {"address": "127.0.0.1:8000", "root-certificates": str(final / "server" / "ca.crt")}
    (folder / "server" / "flower" / "config.toml").write_text(
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n' + toml(connection)
    )
    text = compose.server(federation.name, federation.image, federation.fleet_port, str(final))
    (folder / "server" / "compose.yaml").write_text(text)
    (folder / "server" / "compose.gpu.yaml").write_text(compose.gpu("serverapp"))
    for site in federation.sites:
        kit.write(folder / "kits" / f"{site}.tar.gz", federation, site, (folder / "ca" / "ca.crt").read_bytes())
    federations.Members.create(folder, federation)
