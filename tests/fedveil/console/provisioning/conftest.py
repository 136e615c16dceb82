"""Commands about members without a server, which they would ask in a process of Flower that takes seconds."""

import pytest

from fedveil.console.commands.federation import members
from fedveil.console.flower.flwr_cli import ServerUnreachableError


@pytest.fixture(autouse=True)
def silent_server(monkeypatch):
    """No server answers `fedveil members list`."""

    def absent_members(folder):
        raise ServerUnreachableError("nobody there")

    monkeypatch.setattr(members, "absent_members", absent_members)
