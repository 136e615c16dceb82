from __future__ import annotations

import pytest

from fedveil.encrypted_files import FileSeal
from fedveil.errors import StateError
from fedveil.wire.capture import MessageCapture


def test_messages_come_back_byte_for_byte_in_order(tmp_path):
    tap = MessageCapture(tmp_path / "tap")
    tap.write(b"down", 3, 0, "site-1", "down")
    tap.write(b"up", 3, 0, "site-1", "up", accepted=True)
    tap.write(b"bad", 3, 1, "site-2", "up", accepted=False)
    seen = list(MessageCapture(tmp_path / "tap").messages())
    assert [(s.round, s.attempt, s.site, s.direction, s.accepted) for s in seen] == [
        (3, 0, "site-1", "down", None),
        (3, 0, "site-1", "up", True),
        (3, 1, "site-2", "up", False),
    ]
    assert [tap.read(s) for s in seen] == [b"down", b"up", b"bad"]


def test_a_folder_without_a_tap_says_so(tmp_path):
    with pytest.raises(StateError, match=r"there are no captured messages \(index.jsonl\)"):
        list(MessageCapture(tmp_path).messages())


def test_a_sealed_tap_shows_no_message_and_no_message_passes_for_another(tmp_path):
    seal = FileSeal(bytes(range(32)))
    tap = MessageCapture(tmp_path / "first" / "tap", seal)
    tap.write(b"of the first round", 0, 0, "north", "up")
    tap.write(b"of the second round", 1, 0, "north", "up")
    first, second = MessageCapture(tmp_path / "first" / "tap", seal).messages()
    assert tap.read(second) == b"of the second round"
    assert not [file for file in tap.folder.iterdir() if b"round" in file.read_bytes() and file.suffix == ".up"]
    with pytest.raises(StateError, match="encrypted, but no key file is set; .* FEDVEIL_KEY_FILE on the server"):
        MessageCapture(tap.folder).read(first)
    (tap.folder / first.file).replace(tap.folder / second.file)
    with pytest.raises(
        StateError, match="this is the encrypted file of 'tap/first/00000.0.north.up', not of .*, so files were swapped"
    ):
        tap.read(second)
