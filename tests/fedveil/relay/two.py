"""Both ends of a relay, with keys of their own and folders between them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedveil.relay import keys
from fedveil.relay.endpoint_config import EndpointConfig

SERVER, SITE, STRANGER = (keys.EndpointSecret(bytes([number]) * 32) for number in (1, 2, 3))


@dataclass(frozen=True)
class Two:
    """Settings of both ends; what one writes has to be carried to the other."""

    server: EndpointConfig
    site: EndpointConfig

    def carry(self) -> None:
        """Every letter, both ways."""
        for source, target in ((self.server.orders, self.site.orders), (self.site.replies, self.server.replies)):
            for file in source.iterdir():
                (target / file.name).write_bytes(file.read_bytes())


def two(at: Path, most_bytes: int = 10_000_000) -> Two:
    """In the folder `at`."""
    made = {}
    for name, own, peer in (("server", SERVER, SITE), ("site", SITE, SERVER)):
        folder = at / name
        for part in ("orders", "replies"):
            (folder / part).mkdir(parents=True)
        (folder / "relay.key").touch(mode=0o600)
        (folder / "relay.key").write_bytes(own.key)
        (folder / "peer.pub").write_text(f"{peer.public}\n")
        made[name] = EndpointConfig(
            folder / "relay.key", folder / "peer.pub", folder / "orders", folder / "replies", folder, most_bytes
        )
    return Two(made["server"], made["site"])
