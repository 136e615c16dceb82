"""Forbid HTTP redirects, so that a SuperNode of Flower 1.41 or 1.42 contacts only its own server.

Flower's HTTP client follows redirects with the request and its signed headers, to any address the site can
reach, even over plain HTTP. A server could thus make each site send requests to machines in the site's own
network. With this patch, a redirect is an ordinary error.
"""

from __future__ import annotations

import importlib
from typing import Any


def forbid_redirects() -> None:
    """Make all of Flower's clients in this process stop following redirects."""
    client = importlib.import_module("flwr.supercore.protobuf.client").ProtobufClient
    original = client.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._client.follow_redirects = False

    client.__init__ = made
