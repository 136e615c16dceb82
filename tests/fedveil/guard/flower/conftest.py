"""What the tests of a SuperLink's state share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fedveil.guard.flower.states import Superlink


@pytest.fixture(params=["dictionaries", "SQL and a dictionary", "SQL"])
def superlink(request: pytest.FixtureRequest, tmp_path: Path) -> Superlink:
    file = str(tmp_path / "state.db")
    return {"dictionaries": Superlink, "SQL": lambda: Superlink(file, file)}.get(
        request.param, lambda: Superlink(file)
    )()
