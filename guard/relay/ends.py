"""What both ends of a relay are started with, and how each takes Flower's SuperNode for its own.

The server's end is a SuperNode that is connected and starts no client process; the site's is one whose connection is
two folders. Both are Flower's program, so heartbeats, tasks and parts of messages are Flower's own at either.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fedveil.errors import StateError, WireError
from fedveil.foreign import shown
from fedveil.guard.relay.folders import Incoming
from fedveil.guard.relay.keys import Secret, read_public
from fedveil.guard.relay.letter import Head, opened
from fedveil.guard.relay.said import NAME, Said


@dataclass(frozen=True)
class Settings:
    """Of one end.

    Attributes:
        key, peer: files: this end's relay.key, the other end's relay.pub.
        orders, replies: the folders.
        state: of the site, or of the server's end.
        most_bytes: of a letter.
    """

    key: Path
    peer: Path
    orders: Path
    replies: Path
    state: Path
    most_bytes: int

    def to_text(self) -> str:
        """JSON, for the argument of a program."""
        paths = {name: str(getattr(self, name)) for name in ("key", "peer", "orders", "replies", "state")}
        return json.dumps({**paths, "most_bytes": self.most_bytes})

    @classmethod
    def of_text(cls, text: str) -> Self:
        """What `to_text` wrote."""
        found = json.loads(text)
        most = found.pop("most_bytes")
        return cls(**{name: Path(path) for name, path in found.items()}, most_bytes=most)

    @property
    def said(self) -> Said:
        """What this end tells the people before it."""
        return Said(self.state / NAME)


class Letters:
    """The other end's letters, opened as they come. Raises ConfigError for keys that cannot be used."""

    def __init__(self, settings: Settings, kind: str, folder: Path) -> None:
        self.own, self.peer = Secret.of(settings.key), read_public(settings.peer)
        self._kind, self._most, self.incoming = kind, settings.most_bytes, Incoming(folder)

    def next(self, tell: Callable[[str, str], None]) -> str | None:
        """The next name to be judged. That the folder is gone is told, for a stick may be on its way."""
        try:
            return self.incoming.next()
        except StateError as error:
            tell("waiting", str(error))
            return None

    def opened(self, name: str) -> tuple[Head, bytes]:
        """Its head and content. Raises WireError."""
        try:
            with self.incoming.opened(name) as file:
                return opened(file, name, self._kind, self.own, self.peer, self._most)
        except OSError as error:  # of a stick that was pulled out, for example
            words = shown(error.strerror, 80)
            raise WireError(f"{name}: expected a file that can be read, found {words}; copy it again") from None
