"""Compose projects for the tests marked `containers`. Every one is taken down with its volumes, whatever happens."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.conftest import ROOT

IMAGE = "fedveil:0.2.0"
TEST_PROJECT = re.compile(r"(fedveil-test-|t)[0-9a-f]{6}(-[a-z-]+)?")  # what the tests call their projects
FLOWER = os.environ.get("FEDVEIL_FLOWER", "")  # what compose.yaml builds the image with; "" = the default line


def require_engine() -> None:
    """Skips where no container engine answers."""
    if shutil.which("docker") is None or subprocess.run(["docker", "version"], capture_output=True).returncode:
        pytest.skip("no container engine answers here")


def docker(*arguments: str, check: bool = True, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=timeout)
    assert not check or done.returncode == 0, (
        f"docker {' '.join(arguments)}: {done.stdout[-1500:]}{done.stderr[-3000:]}"
    )
    return done


class Compose:
    """One project: a compose file with its environment."""

    def __init__(self, project: str, file: Path, env: Mapping[str, str] | None = None) -> None:
        self.project, self._file, self._env = project, file, {**os.environ, **(env or {})}

    def __call__(self, *arguments: str, check: bool = True, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["docker", "compose", "-p", self.project, "-f", str(self._file), *arguments],
            capture_output=True, text=True, timeout=timeout, env=self._env, cwd=self._file.parent,
        )  # fmt: skip
        assert not check or done.returncode == 0, (
            f"compose {' '.join(arguments)}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
        return done

    def container(self, service: str) -> str:
        return self("ps", "-aq", service).stdout.strip()

    def logs(self, service: str) -> str:
        return self("logs", "--no-color", "--no-log-prefix", service).stdout

    def python(self, service: str, code: str, *arguments: str, timeout: float = 120.0) -> str:
        """What `code` prints inside a running container."""
        return self("exec", "-T", service, "python", "-c", code, *arguments, timeout=timeout).stdout

    def down(self) -> None:
        self("down", "-v", "-t", "2", "--remove-orphans", check=False)


def remove_leftovers() -> list[str]:
    """Takes down the projects that a killed test run left behind, and returns their names.

    Their networks hold the engine's address pools: one killed run leaves 17, and Docker's default pools give about 30.
    Only names that these tests give are touched. Two test runs on one engine are not supported, with or without this.
    """
    listed = docker("network", "ls", "--format", '{{.Label "com.docker.compose.project"}}').stdout.split()
    listed += [project["Name"] for project in json.loads(docker("compose", "ls", "-a", "--format", "json").stdout)]
    left = sorted({name for name in listed if TEST_PROJECT.fullmatch(name)})
    for name in left:
        docker("compose", "-p", name, "down", "-v", "-t", "2", "--remove-orphans", timeout=300)
    return left


def require_image() -> None:
    """Skips where no engine answers; builds the image where there is none, or one of the other Flower may lie there."""
    require_engine()
    if FLOWER or docker("image", "inspect", IMAGE, check=False).returncode:
        Compose("fedveil-build", ROOT / "compose.yaml")("build", "setup", timeout=1200)


def until(ready: Callable[[], bool], seconds: float, what: str, pause: float = 1.0) -> None:
    """Waits for a condition, `pause` seconds between two looks; fails at the deadline."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(pause)
