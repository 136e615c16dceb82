"""What somebody else puts into a folder: judged once, by plain files alone."""

from __future__ import annotations

import os

import pytest

from fedveil.errors import StateError, WireError
from fedveil.relay import mailbox
from fedveil.relay.mailbox import IncomingFolder


def test_letters_come_in_the_order_of_their_names_each_once(tmp_path):
    for name in ("b.relay", "a.relay"):
        (tmp_path / name).write_bytes(b"1")
    incoming = IncomingFolder(tmp_path)
    assert incoming.next() is None  # it may still grow
    assert incoming.waits
    assert [incoming.next(), incoming.next(), incoming.next()] == ["a.relay", "b.relay", None]
    assert not incoming.waits


def test_a_file_that_grows_is_looked_at_once_it_does_not(tmp_path):
    incoming, file = IncomingFolder(tmp_path), tmp_path / "a.relay"
    for size in (1, 2, 3):
        file.write_bytes(bytes(size))
        assert incoming.next() is None
        assert incoming.waits
    assert incoming.next() == "a.relay"
    file.write_bytes(bytes(4))
    assert [incoming.next(), incoming.next(), incoming.next()] == [None, "a.relay", None]


@pytest.mark.parametrize(
    "name",
    [".a.relay.tmp", ".a.relay", "a.relay.part", "a.txt", "a b.relay", "-rf.relay", "ä.relay", "x" * 120 + ".relay"],
)
def test_another_name_is_not_looked_at(name, tmp_path):
    (tmp_path / name).write_bytes(b"1")
    incoming = IncomingFolder(tmp_path)
    assert [incoming.next(), incoming.next()] == [None, None]
    assert not incoming.waits


def test_a_link_a_folder_and_a_pipe_are_refused_and_none_is_waited_for(tmp_path):
    (tmp_path / "secret").write_bytes(b"not for you")
    (tmp_path / "link.relay").symlink_to(tmp_path / "secret")
    (tmp_path / "folder.relay").mkdir()
    os.mkfifo(tmp_path / "pipe.relay")
    incoming = IncomingFolder(tmp_path)
    incoming.next()
    names = {incoming.next(), incoming.next(), incoming.next()}
    assert names == {"link.relay", "folder.relay", "pipe.relay"}
    for name in names:
        with pytest.raises(WireError, match="it is not a .*regular file"), incoming.opened(str(name)):
            pass


def test_a_folder_that_is_gone_or_too_full_is_said(tmp_path, monkeypatch):
    with pytest.raises(StateError, match="the folder for exchanged files cannot be read"):
        IncomingFolder(tmp_path / "none").next()
    monkeypatch.setattr(mailbox, "_MOST_NAMES", 3)
    for number in range(4):
        (tmp_path / f"{number}.relay").touch()
    with pytest.raises(StateError, match="more than 3 files"):
        IncomingFolder(tmp_path).next()


def test_nothing_is_kept_of_files_that_are_gone(tmp_path):
    incoming, file = IncomingFolder(tmp_path), tmp_path / "a.relay"
    file.touch()
    assert [incoming.next(), incoming.next()] == [None, "a.relay"]
    file.unlink()
    assert incoming.next() is None
    assert incoming._judged == {}
