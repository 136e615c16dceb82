from __future__ import annotations

import pytest

from fedveil.errors import StateError
from fedveil.wire.tap import Tap


def test_messages_come_back_byte_for_byte_in_order(tmp_path):
    tap = Tap(tmp_path / "tap")
    tap.write(b"down", 3, 0, "site-1", "down")
    tap.write(b"up", 3, 0, "site-1", "up", accepted=True)
    tap.write(b"bad", 3, 1, "site-2", "up", accepted=False)
    seen = list(Tap(tmp_path / "tap").messages())
    assert [(s.round, s.attempt, s.site, s.direction, s.accepted) for s in seen] == [
        (3, 0, "site-1", "down", None),
        (3, 0, "site-1", "up", True),
        (3, 1, "site-2", "up", False),
    ]
    assert [tap.read(s) for s in seen] == [b"down", b"up", b"bad"]


def test_a_folder_without_a_tap_says_so(tmp_path):
    with pytest.raises(StateError, match=r"expected a tap \(index.jsonl\), found none"):
        list(Tap(tmp_path).messages())
