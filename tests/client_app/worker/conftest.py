"""Fixtures of the worker's tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fedveil.console.flower.app_bundle import own_app
from tests.client_app.worker.bench import Bench, kill
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def app(tmp_path_factory) -> Path:
    """A copy of the app with the task of tests/server_app/toy_task.py in it: a task is found by its file name."""
    root = tmp_path_factory.mktemp("app")
    own_app(root)
    shutil.copy(ROOT / "tests" / "server_app" / "toy_task.py", root / "fedveil" / "tasks" / "toy.py")
    return root


@pytest.fixture
def bench(tmp_path, app):
    bench = Bench(tmp_path, app)
    yield bench
    kill(bench)
