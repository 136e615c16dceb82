"""`flower-supernode` of an image: Flower's own, which asks more often (pace.py). On a host: loopback.py."""

from __future__ import annotations

from fedveil.guard import pace


def main() -> None:
    """The process. Its arguments are those of Flower's own program."""
    pace.of_supernode()
    from flwr.supernode.cli import flower_supernode

    flower_supernode()
