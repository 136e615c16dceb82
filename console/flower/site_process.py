"""What runs at a site beside Flower's SuperNode: the site's own entry point, which decides, and a warm worker."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from fedveil import places
from fedveil.client_app.site.node_config import Site
from fedveil.client_app.worker.cards import Card, Folder
from fedveil.client_app.worker.owner import Owner
from fedveil.console.flower.processes import LaunchError

CLIENT_APP = "flwr-clientapp"
_SCRIPT = """#!{python} -I
import os
import sys

sys.path.append({root!r})
sys.pycache_prefix = {cache!r}
for name in [name for name in os.environ if name.startswith("PYTHON")]:
    del os.environ[name]
if sys.pycache_prefix:
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix  # for the worker

from fedveil.guard.clientapp import main

main(require_policy={require_policy})
"""


def write_guard(folder: Path, require_policy: bool = True) -> Path:
    """Writes the site's `flwr-clientapp`, which goes before Flower's own on the PATH (guard/clientapp.py).

    It runs this installation, and takes no PYTHON* variable from its environment: another user's PYTHONPATH, or a
    forgotten one, would put other code in the place of the guard.
    """
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / CLIENT_APP
    script.write_text(_SCRIPT.format(
        python=sys.executable, root=str(places.root()), cache=sys.pycache_prefix, require_policy=require_policy
    ))  # fmt: skip
    script.chmod(0o755)
    return script


def guarded(env: Mapping[str, str], folder: Path, require_policy: bool = True) -> dict[str, str]:
    """`env` for a SuperNode or SuperExec whose client processes pass the site's entry point, written to `folder`."""
    script = write_guard(folder, require_policy)
    return {**env, "PATH": os.pathsep.join([str(script.parent), env["PATH"]])}


def start_spare(site: Site, owner: int, env: Mapping[str, str]) -> Card:
    """A worker without a run, of this installation's own app, that ends with the process `owner`.

    The first run of the same app version takes it. Raises LaunchError where there is no such process.
    """
    folder = Folder(site.state_dir, site.site)
    try:
        whose = Owner.of(owner)
    except psutil.NoSuchProcess:
        raise LaunchError(f"owner: expected a running process, found none with number {owner}") from None
    with folder.locked():
        return folder.start(site, whose, "", env=env)
