"""A data folder of noise pictures, for all tests in this folder."""

from __future__ import annotations

import pytest

from benchmarks.tests.random_binary.noise import write


@pytest.fixture(autouse=True)
def _pictures(tmp_path, monkeypatch):
    """$FEDVEIL_DATA with pictures of noise."""
    write(tmp_path)
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path))
