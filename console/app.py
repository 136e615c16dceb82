"""`fedveil app`: the digest of the app's bundle, and a signature of it, for what sites permit."""

from __future__ import annotations

import argparse
import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedveil.errors import ConfigError

_HERE = Path(__file__).resolve().parents[1]


def add_parser(sub: Any) -> None:
    """Adds the sub-command."""
    parser = sub.add_parser("app", help="digest or sign the app's bundle, as a site's policy names it")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    shown = actions.add_parser("digest", help="print the SHA-256 of the bundle that `flwr run` would send")
    shown.set_defaults(run=_digest)
    sign = actions.add_parser("sign", help="print the run.signature that goes with it")
    sign.add_argument("--key", type=Path, required=True, help='Ed25519 private key: ssh-keygen -t ed25519 -N "" -f key')
    sign.set_defaults(run=_sign)
    for action in (shown, sign):
        action.add_argument("app", type=Path, nargs="?", default=_HERE, help="folder of the app, or a .fab file")


def _digest(args: argparse.Namespace) -> int:
    print(digest(args.app))
    return 0


def _sign(args: argparse.Namespace) -> int:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from guard import signature

    try:
        key = serialization.load_ssh_private_key(args.key.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"--key: expected an OpenSSH private key without a passphrase, found none ({error})"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(
            f"--key: expected an Ed25519 key, found {type(key).__name__}; ssh-keygen -t ed25519 makes one"
        )
    print(f'run.signature="{signature.sign(key, digest(args.app))}"')
    return 0


def _left_out(names: list[str], top: bool) -> set[str]:
    """What no bundle holds, and may be large."""
    hidden = {name for name in names if name.startswith(".") and name != ".gitignore"}
    return {"__pycache__"} | ({"venv", "runs", "build", "dist"} | hidden if top else set())


def digest(app: Path) -> str:
    """SHA-256 of the bundle, 64 hex digits. Raises ConfigError where there is no app."""
    return hashlib.sha256(built(app)).hexdigest()


@contextmanager
def copied(app: Path) -> Iterator[Path]:
    """A copy of the app in a folder, without what no bundle holds; a .fab file, or what is no app, as it is.

    Flower walks the whole folder, several times, .venv among it: twenty seconds before a run is submitted. It refuses a
    folder whose name is not that of an app, and writes a bundle where it is called.
    """
    if not (app / "pyproject.toml").is_file():
        yield app
        return
    with tempfile.TemporaryDirectory(prefix="fedveil-app-") as folder:
        copy = Path(folder) / "app"
        shutil.copytree(app, copy, symlinks=True, ignore=lambda at, names: _left_out(names, Path(at) == app))
        yield copy


def built(app: Path) -> bytes:
    """The bundle of the app in a folder, as Flower's own `flwr build` makes it, or of a .fab file as it is."""
    from console.launch import environment
    from console.processes import Processes

    if app.is_file():
        return app.read_bytes()
    if not (app / "pyproject.toml").is_file():
        raise ConfigError(
            f"app: expected a folder with pyproject.toml or a .fab file, found none at {app}; name another"
        )
    with copied(app) as copy:
        folder = copy.parent
        processes, env = Processes(folder), environment(folder / "flower")
        processes.call("build", ["flwr", "build", "--app", str(copy)], env, cwd=folder)
        (bundle,) = folder.glob("*.fab")
        return bundle.read_bytes()
