"""The commands for Flower's long-lived programs, with every flag that FedVeil passes to them.

They are the same for all Flower releases. --fleet-api-address, where sites connect, is Flower's own option in 1.39;
from 1.41 on, the guard's `flower-superlink` implements it (fedveil/guard/flower/fleet_http.py)."""

from __future__ import annotations

from pathlib import Path

ONLINE = "SuperNode ID:"  # a SuperNode logs this once the SuperLink has accepted its key


def superlink_command(
    folder: Path, registry: Path, state: Path, control_port: int, fleet: str, database: bool, secret: Path
) -> list[str]:
    """Return the SuperLink's command, with TLS, required SuperNode keys, and the control port on loopback.

    Args:
        folder: folder with its certificate and key.
        registry: registry of sites and operators, for the guard's program (fedveil/guard/superlink.py).
        state: folder for the control port's log and the database.
        fleet: HOST:PORT for the sites.
        database: store its state in superlink.db instead of in memory.
        secret: file with the secret that its SuperExec must present.
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
    """Return a site's SuperNode command: it connects to `superlink` (HOST:PORT) with TLS and its own key.

    Its API is on loopback. `secret`: file with the secret that its SuperExec must present.
    """
    return [
        "flower-supernode", "--root-certificates", str(ca), "--superlink", superlink,
        "--auth-supernode-private-key", str(key), "--host", "127.0.0.1", "--port", str(port),
        "--node-config", str(node_config), "--isolation", "process", "--superexec-auth-secret-file", str(secret),
    ]  # fmt: skip


def relay_supernode_command(port: int, node_config: Path, secret: Path) -> list[str]:
    """Return the command for a site's SuperNode that uses relay folders and never contacts its SuperLink address."""
    return [
        "flower-supernode", "--grpc-rere", "--insecure", "--superlink", "127.0.0.1:1", "--host", "127.0.0.1",
        "--port", str(port), "--node-config", str(node_config), "--isolation", "process",
        "--superexec-auth-secret-file", str(secret),
    ]  # fmt: skip


def superexec_command(port: int, secret: Path, parent: int, ca: Path | None) -> list[str]:
    """Return the SuperExec command for a SuperLink or SuperNode on this machine. It exits when process `parent` ends.

    `ca`: the CA for the port's certificate; None means no TLS.
    """
    return [
        "flower-superexec", "--runtime-api-address", f"127.0.0.1:{port}", "--superexec-auth-secret-file", str(secret),
        "--parent-pid", str(parent), *(["--insecure"] if ca is None else ["--root-certificates", str(ca)]),
    ]  # fmt: skip
