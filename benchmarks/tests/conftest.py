"""One thread for all tests, and a data folder of texts."""

from __future__ import annotations

import pytest
import torch

from benchmarks.tests import text_folder
from tests.conftest import *  # noqa: F403  # fixtures, and the hook that checks shapes, as in the tests of FedVeil
from tests.conftest import ROOT
from tests.own_entry_points import provide_entry_points

provide_entry_points(ROOT / "benchmarks" / "pyproject.toml")


@pytest.fixture(autouse=True)
def _one_thread():
    """As a seed's process has: threads that wait for each other over small matrices cost more than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """$FEDVEIL_DATA with a few texts."""
    text_folder.write(tmp_path)
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path))
    return tmp_path
