"""A SuperNode of Flower 1.41 or 1.42 asks its server, and nobody else in the server's name.

Its HTTP client follows where an answer sends it, with the request and its signed headers, to any address that the site
reaches, by plain HTTP too. So a server could have each site ask machines inside the site's own network. Here an answer
that sends elsewhere is an error like any other.
"""

from __future__ import annotations

import importlib
from typing import Any


def forbid() -> None:
    """From now on no client of Flower's in this process follows a redirect."""
    client = importlib.import_module("flwr.supercore.protobuf.client").ProtobufClient
    original = client.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._client.follow_redirects = False

    client.__init__ = made
