"""The commands of Flower's two long-lived programs, with every flag that FedVeil gives them.

They are the same for all lines of Flower. Where sites are served, --fleet-api-address, is Flower's own option in 1.39;
from 1.41 on the guard's `flower-superlink` takes it (fedveil/guard/flower/fleet_http.py)."""

from __future__ import annotations

from pathlib import Path

ONLINE = "SuperNode ID:"  # a SuperNode logs this once the SuperLink has accepted its key


def superlink_command(
    folder: Path, registry: Path, state: Path, control_port: int, fleet: str, database: bool, secret: Path
) -> list[str]:
    """The SuperLink, its control port on loopback: TLS, keys of SuperNodes required.

    Args:
        folder: of its certificate and key.
        registry: who the sites and operators are: it is the guard's program (fedveil/guard/superlink.py).
        state: folder of the control port's log, and of its database.
        fleet: HOST:PORT for the sites.
        database: keep its state in superlink.db instead of in memory.
        secret: what its SuperExec must know.
    """
    return [
        "flower-superlink", "--fedveil-registry", str(registry),
        "--fedveil-log", str(state / "control-log.jsonl"), "--host", "127.0.0.1", "--port", str(control_port),
        "--fleet-api-address", fleet,
        "--ssl-ca-certfile", str(folder / "ca.crt"), "--ssl-certfile", str(folder / "server.pem"),
        "--ssl-keyfile", str(folder / "server.key"),
        "--enable-supernode-auth", "--disable-runtime-dependency-installation",
        "--isolation", "process", "--superexec-auth-secret-file", str(secret),
        *(["--database", str(state / "superlink.db")] if database else []),
    ]  # fmt: skip


def supernode_command(superlink: str, ca: Path, key: Path, port: int, node_config: Path, secret: Path) -> list[str]:
    """A site's SuperNode: TLS and its own key to `superlink_command` (HOST:PORT), its own API on loopback.

    `secret`: what its SuperExec must know.
    """
    return [
        "flower-supernode", "--root-certificates", str(ca), "--superlink", superlink,
        "--auth-supernode-private-key", str(key), "--host", "127.0.0.1", "--port", str(port),
        "--node-config", str(node_config), "--isolation", "process", "--superexec-auth-secret-file", str(secret),
    ]  # fmt: skip


def relay_supernode_command(port: int, node_config: Path, secret: Path) -> list[str]:
    """A site's SuperNode whose connection is a relay's folders: the address is one that it never asks."""
    return [
        "flower-supernode", "--grpc-rere", "--insecure", "--superlink", "127.0.0.1:1", "--host", "127.0.0.1",
        "--port", str(port), "--node-config", str(node_config), "--isolation", "process",
        "--superexec-auth-secret-file", str(secret),
    ]  # fmt: skip


def superexec_command(port: int, secret: Path, parent: int, ca: Path | None) -> list[str]:
    """The SuperExec of a SuperLink or SuperNode on this machine; it ends with the process `parent`.

    `ca`: who signed the certificate of that port; None = it is without TLS.
    """
    return [
        "flower-superexec", "--runtime-api-address", f"127.0.0.1:{port}", "--superexec-auth-secret-file", str(secret),
        "--parent-pid", str(parent), *(["--insecure"] if ca is None else ["--root-certificates", str(ca)]),
    ]  # fmt: skip
