"""The bundles that a server's `flwr-serverapp` may run. By default, it runs every bundle that the SuperLink sends.

    FEDVEIL_BUNDLES=server/instruct/bundles.toml

    digests = ["64 hex digits"]     # SHA-256 of each permitted bundle: fedveil app digest

The bundle's ServerApp runs in the process that can read the instruction key. A person on the server's machine writes
this file. In containers, the SuperLink sees neither the key nor this file: a compromised SuperLink cannot start other
code that has the key. With `fedveil server start`, both run as one user, so the file stops only other operators.

| case | result |
|---|---|
| the variable is not set, or there is no such file | every bundle runs, as the log states |
| the file cannot be read, is malformed, or can be changed by other users | no bundle runs |
| the bundle's digest is not in the file | the run fails before anything is installed; its log has the digest |
| the SuperLink names a digest other than the bundle's own, so that a different folder would be loaded | the run fails
  before anything is installed |
| the files in an installed bundle's folder differ from the bundle's | the run fails before its code is loaded |
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from fedveil import paths
from fedveil.errors import ConfigError, PolicyError
from fedveil.federation.message_signatures.environment import APP_DIGEST_VARIABLE, BUNDLES_VARIABLE
from fedveil.guard.installed_bundle import require_same
from fedveil.sanitize import sanitize

_MOST_BYTES = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")


def read_digests(file: Path) -> list[str] | None:
    """Return the permitted digests; None if the file does not exist. Raises ConfigError if it cannot be read."""
    try:
        with file.open("rb") as stream:
            if other := paths.find_other_writer(file, os.fstat(stream.fileno())):
                raise ConfigError(f"{file}: only this user may be able to change the digests, but {other}")
            data = stream.read(_MOST_BYTES + 1)
        content = tomllib.loads(data.decode("utf-8-sig")) if len(data) <= _MOST_BYTES else {}
        digests = content.get("digests")
        if set(content) != {"digests"} or type(digests) is not list:
            raise ValueError(f"it may contain only the key digests, in at most {_MOST_BYTES} bytes")
        if not all(type(digest) is str and _DIGEST.fullmatch(digest) for digest in digests):
            raise ValueError("each digest must be 64 hex digits")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file}: cannot read the digests of the bundles that may run here "
            f"({type(error).__name__}: {sanitize(error, 200)}); correct it, or remove it to let every bundle run"
        ) from None
    return list(digests)


class BundleCheck:
    """Checks a run's bundle. `runtime` is the Flower module that installs it.

    Flower is unchanged until `install`, which replaces two functions of `runtime`.
    """

    def __init__(self, runtime: ModuleType, file: Path | None) -> None:
        self._runtime, self._file = runtime, file
        self._parse: Callable[[Any], Any] = runtime.fab_from_proto
        self._install: Callable[..., Path] = runtime.install_from_fab
        self._named = ""

    def install(self) -> None:
        """Replace both functions for the lifetime of the process."""
        for name, own in (("fab_from_proto", self.parse), ("install_from_fab", self.install_bundle)):
            setattr(self._runtime, name, own)

    def parse(self, proto: Any) -> Any:
        """Call Flower's fab_from_proto, and store the digest that Flower uses to find the folder to load."""
        fab = self._parse(proto)
        self._named = fab.hash_str
        return fab

    def install_bundle(self, content: bytes, *args: Any, **kwargs: Any) -> Path:
        """Call Flower's install_from_fab if the bundle is permitted. Raises ConfigError or PolicyError."""
        permitted = None if self._file is None else read_digests(self._file)
        digest = hashlib.sha256(content).hexdigest()
        os.environ[APP_DIGEST_VARIABLE] = digest  # the server signs for this bundle (server_app/message_signing.py)
        if digest != self._named:
            raise PolicyError(
                f"app digest: the SuperLink names {sanitize(self._named, 80)}, but the bundle's digest is {digest}; "
                "nothing was installed"
            )
        if permitted is None:
            logging.getLogger("flwr").info(
                "fedveil: every bundle may run here: %s", self._file or f"no {BUNDLES_VARIABLE}"
            )
            return self._install(content, *args, **kwargs)
        if digest not in permitted:
            raise PolicyError(
                f"app digest: {digest} is not one of the {len(permitted)} in {self._file}; nothing was "
                "installed. If you know this bundle, add its digest there"
            )
        folder = self._install(content, *args, **kwargs)
        require_same(content, folder)  # Flower uses an existing folder of this name unchanged
        return folder


def patch_install(module: str) -> None:
    """Make the ServerApp's process measure its bundle, and check it if FEDVEIL_BUNDLES names a file."""
    file = os.environ.get(BUNDLES_VARIABLE, "")
    BundleCheck(importlib.import_module(module), Path(file) if file else None).install()
