"""What the tests of a SuperLink's state share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fedveil.guard.flower.states import Superlink, copy_superlink


@pytest.fixture(params=["dictionaries", "SQL and a dictionary", "SQL"])
def superlink(request: pytest.FixtureRequest, tmp_path: Path, clean_database: Path) -> Superlink:
    if request.param == "dictionaries":
        return Superlink()
    return copy_superlink(clean_database, tmp_path / "state.db", with_objects=request.param == "SQL")
