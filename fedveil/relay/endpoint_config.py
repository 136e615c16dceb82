"""Configuration of a relay's two ends. Each end uses Flower's SuperNode.

The server's end is a connected SuperNode that does not start client processes. The site's end is a SuperNode
whose connection consists of two folders. Both run Flower's program, so heartbeats, tasks and message parts are
Flower's own at both ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fedveil.errors import StateError, WireError
from fedveil.relay.keys import EndpointSecret, read_public
from fedveil.relay.mailbox import IncomingFolder
from fedveil.relay.sealed_message import MessageHeader, decrypt_message
from fedveil.relay.status_events import NAME, StatusEvents
from fedveil.sanitize import sanitize


@dataclass(frozen=True)
class EndpointConfig:
    """Configuration of one end.

    Attributes:
        key, peer: paths of this end's relay.key and the other end's relay.pub.
        orders, replies: the folders for orders and replies.
        state: the state folder of the site or of the server's end.
        most_bytes: maximum size of a relay message.
    """

    key: Path
    peer: Path
    orders: Path
    replies: Path
    state: Path
    most_bytes: int

    def to_text(self) -> str:
        """Return the configuration as JSON, for a program argument."""
        paths = {name: str(getattr(self, name)) for name in ("key", "peer", "orders", "replies", "state")}
        return json.dumps({**paths, "most_bytes": self.most_bytes})

    @classmethod
    def of_text(cls, text: str) -> Self:
        """Parse the output of `to_text`."""
        values = json.loads(text)
        most = values.pop("most_bytes")
        return cls(**{name: Path(path) for name, path in values.items()}, most_bytes=most)

    @property
    def said(self) -> StatusEvents:
        """Return the status events that this end reports to its users."""
        return StatusEvents(self.state / NAME)


class PeerMessages:
    """Messages from the other end, decrypted as they arrive. Raises ConfigError for unusable keys."""

    def __init__(self, settings: EndpointConfig, kind: str, folder: Path) -> None:
        self.own, self.peer = EndpointSecret.from_file(settings.key), read_public(settings.peer)
        self._kind, self._most, self.incoming = kind, settings.most_bytes, IncomingFolder(folder)

    def next(self, tell: Callable[[str, str], None]) -> str | None:
        """Return the next file name to process. A missing folder is only reported, because it may be on a USB stick."""
        try:
            return self.incoming.next()
        except StateError as error:
            tell("waiting", str(error))
            return None

    def opened(self, name: str) -> tuple[MessageHeader, bytes]:
        """Return a message's header and content. Raises WireError."""
        try:
            with self.incoming.opened(name) as file:
                return decrypt_message(file, name, self._kind, self.own, self.peer, self._most)
        except OSError as error:  # for example, because the USB stick was removed
            words = sanitize(error.strerror, 80)
            raise WireError(f"{name}: the file cannot be read ({words}); copy it again") from None
