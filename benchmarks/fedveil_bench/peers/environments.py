"""The peers' Python environments, because FedVeil's own does not contain their programs.

An environment variable names each peer's Python interpreter; if the variable is not set, the table omits that peer's
row and says so.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedveil.errors import ConfigError
from fedveil_bench import folders

_READY = 180.0  # seconds allowed for an import
_HOWTO = "see benchmarks/README.md for how to create one"
_PROBE = """
import importlib, json, sys
from importlib.metadata import version
for name in sys.argv[1].split(","):
    importlib.import_module(name)
print(json.dumps({name: version(name) for name in sys.argv[2:]}))
"""


@dataclass(frozen=True)
class PeerPackage:
    """A program with a separate environment.

    Attributes:
        name: the name of its row.
        variable: the environment variable that names its Python interpreter.
        folder: the folder with its requirements.txt.
        imports: modules that must be importable there; the first one is the program.
    """

    name: str
    variable: str
    folder: str
    imports: Sequence[str]


@dataclass(frozen=True)
class PeerEnvironment:
    """A peer's Python environment.

    Attributes:
        python: its Python interpreter, or None if there is none, so the row is omitted.
        said: a sentence about problems with the environment; "" if there are none.
    """

    python: Path | None
    said: str


def find_environment(peer: PeerPackage, variables: Mapping[str, str]) -> PeerEnvironment:
    """Return the environment named by the peer's variable, after a trial import. No sentence contains a path."""
    expected, program = parse_pins((folders.find_folder(peer.folder) / "requirements.txt").read_text()), peer.imports[0]
    out = (
        f"{peer.name} is left out: {peer.variable}: expected the Python of an environment with {program.split('.')[0]}"
    )
    if not variables.get(peer.variable):
        return PeerEnvironment(None, f"{out}, found no such variable; {_HOWTO}")
    python = Path(variables[peer.variable]).absolute().with_name("python3")  # NVFlare's own scripts use this one
    try:
        done = subprocess.run(
            [python, "-c", _PROBE, ",".join(peer.imports), *expected],
            capture_output=True, text=True, timeout=_READY, env=select_variables(variables),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return PeerEnvironment(
            None, f"{out}, found none that runs next to that path ({type(error).__name__}); {_HOWTO}"
        )
    if done.returncode:
        why = re.sub(r"\S*/\S*", "...", (done.stderr.strip().splitlines() or ["no output"])[-1])
        return PeerEnvironment(None, f"{out}, found one where the import fails ({why}); {_HOWTO}")
    others = list_differences(expected, json.loads(done.stdout.splitlines()[-1]))
    return PeerEnvironment(
        python, f"{peer.name} ran with versions other than those in requirements.txt: {others}" * bool(others)
    )


def parse_pins(text: str) -> dict[str, str]:
    """Return the versions pinned in a requirements.txt. Raises ConfigError for a line that does not pin a version."""
    lines = [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]
    for line in lines:
        if line.count("==") != 1:
            raise ConfigError(f"requirements.txt: expected NAME==VERSION in each line, found {line!r}; pin it")
    return dict(line.split("==") for line in lines)


def list_differences(expected: Mapping[str, str], versions: Mapping[str, str]) -> str:
    """Return the packages whose installed version differs from the expected one; build tags ("+cpu") are ignored."""
    return ", ".join(
        f"{name} {versions[name]} in place of {version}"
        for name, version in expected.items()
        if versions[name].partition("+")[0] != version
    )


def select_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return this environment's variables for a peer, minus any pointing Python to FedVeil's packages."""
    return {key: value for key, value in variables.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV", "FLWR_"))}
