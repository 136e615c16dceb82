"""What all tests of a SuperLink share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fedveil.guard.flower.states import create_database


@pytest.fixture(scope="session")
def clean_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with Flower's tables: to make them anew takes a second."""
    file = tmp_path_factory.mktemp("database") / "clean.db"
    create_database(file)
    return file
