"""What the tests' own handling of a container engine does."""

from __future__ import annotations

import secrets

import pytest

from tests.deployment.engine import docker, remove_leftovers, require_engine

pytestmark = [pytest.mark.containers, pytest.mark.timeout(300)]


def test_projects_of_a_killed_test_run_are_taken_down_and_no_others():
    require_engine()
    left, other = f"t{secrets.token_hex(3)}-north", f"mine-{secrets.token_hex(3)}"
    for project in (left, other):
        labels = [f"--label=com.docker.compose.{key}" for key in (f"project={project}", "network=outside")]
        docker("network", "create", *labels, f"{project}_outside")
    try:
        assert left in remove_leftovers()
        names = docker("network", "ls", "--format", "{{.Name}}").stdout.split()
        assert f"{left}_outside" not in names
        assert f"{other}_outside" in names
    finally:
        docker("network", "rm", f"{other}_outside")
