"""Files that a crash, a power cut, a full disk or a flipped bit finds as they were, or finds out."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedveil.client_app.state.client_state import ClientStateStore
from fedveil.client_app.state.replay_guard import ReplayGuard
from fedveil.contract.method import FederatedState
from fedveil.contract.privacy import Adjacency, PrivacyBudget, Step
from fedveil.errors import StateError
from fedveil.privacy.ledger import PrivacyLedger
from fedveil.privacy.ledger_account import RunTerms
from fedveil.records import atomic_files
from fedveil.records.tensor_state import load_state, save_state

STATE = FederatedState(
    {"h.0.a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}, {"n": 3, "x": 0.1}
)


def flips(path: Path):
    """The file with each of its bits turned in its turn; then as it was."""
    good = path.read_bytes()
    for position in range(len(good)):
        for bit in range(8):
            bad = bytearray(good)
            bad[position] ^= 1 << bit
            path.write_bytes(bytes(bad))
            yield position, bit
    path.write_bytes(good)


def read_wrong(path: Path, read) -> list[tuple[int, int]]:
    """The flips that are no StateError."""
    wrong = []
    for flip in flips(path):
        try:
            read()
        except StateError:
            continue
        wrong.append(flip)
    read()
    return wrong


def pretend_owner(patch: pytest.MonkeyPatch, user: int, owner: int) -> None:
    """Run as `user`, whose new files are its own, in folders that belong to `owner`."""
    real = os.fstat

    def about(descriptor):
        found = list(real(descriptor))
        found[stat.ST_UID] = owner if stat.S_ISDIR(found[stat.ST_MODE]) else user
        return os.stat_result(found)

    patch.setattr(os, "geteuid", lambda: user)
    patch.setattr(os, "fstat", about)


@pytest.mark.parametrize("user,owner,given", [(0, 4711, [4711]), (0, 0, []), (5, 4711, [])])
def test_a_file_that_root_writes_belongs_to_the_folder_s_owner(user, owner, given, tmp_path, monkeypatch):
    """So that a command run as root does not lock the server's user out of members.json."""
    changed = []
    with monkeypatch.context() as patch:
        pretend_owner(patch, user, owner)
        patch.setattr(os, "fchown", lambda descriptor, *ids: changed.append((os.fstat(descriptor).st_ino, *ids)))
        atomic_files.write_atomic(tmp_path / "x", b"new")
    file = (tmp_path / "x").stat()
    assert changed == [(file.st_ino, one, -1) for one in given]
    assert (tmp_path / "x").read_bytes() == b"new"
    assert stat.S_IMODE(file.st_mode) == 0o600


def test_where_root_may_not_give_a_file_away_the_old_one_stays(tmp_path, monkeypatch):
    atomic_files.write_atomic(tmp_path / "x", b"old")

    def refuse(*_):
        raise PermissionError(errno.EPERM, "no")

    with monkeypatch.context() as patch:
        pretend_owner(patch, 0, 4711)
        patch.setattr(os, "fchown", refuse)
        with pytest.raises(PermissionError):
            atomic_files.write_atomic(tmp_path / "x", b"new")
    assert [file.name for file in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_bytes() == b"old"


def test_every_flipped_bit_of_a_state_is_found(tmp_path):
    save_state(STATE, tmp_path / "s.safetensors")
    assert read_wrong(tmp_path / "s.safetensors", lambda: load_state(tmp_path / "s.safetensors")) == []
    assert torch.equal(load_file(tmp_path / "s.safetensors")["h.0.a"], STATE.tensors["h.0.a"])


@pytest.mark.long
def test_every_flipped_bit_of_a_private_state_is_found_and_a_newcomer_goes_on_without_it(tmp_path):
    store = ClientStateStore.open(tmp_path, "r", "a")
    store.save("1" * 16, "", STATE)
    file = store.folder / f"turn-{'1' * 16}.safetensors"
    assert read_wrong(file, lambda: store.load("1" * 16)) == []
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    assert store.load("1" * 16, is_new=True) is None
    store.save("2" * 16, "1" * 16, STATE)
    assert store.load("2" * 16) is not None


def test_every_flipped_bit_of_the_files_of_a_site_s_run_is_found(tmp_path):
    store, served = ClientStateStore.open(tmp_path, "r", "a"), ReplayGuard.open(tmp_path, "r", "a")
    store.secret(0, "a", False)
    assert read_wrong(store.folder / "secret", lambda: store.secret(0, "a", False)) == []
    served.count(1, 5, 3)
    served.require_same(1, "5f" * 8)
    assert read_wrong(store.folder / "served.json", lambda: served.check(1, 5, 3)) == []


@pytest.mark.long
def test_every_flipped_bit_of_the_ledger_is_found(tmp_path):
    ledger, own = PrivacyLedger(tmp_path), PrivacyBudget(100.0, 1e-5, Adjacency.REPLACE_ONE)
    for _ in range(2):
        ledger.charge(RunTerms("r", own, 3, 9), {Step("gaussian", 0, 0, 20.0): 1}, own)
    before = ledger.read(own)
    assert read_wrong(tmp_path / "ledger.json", lambda: ledger.read(own)) == []
    assert ledger.read(own) == before


def test_file_and_name_and_the_names_of_new_folders_are_on_the_disk_in_that_order(tmp_path, monkeypatch):
    done: list[str] = []
    sync, replace = os.fsync, Path.replace

    def noted(descriptor):
        done.append("sync " + Path(f"/proc/self/fd/{descriptor}").resolve().name)
        sync(descriptor)

    def renamed(path, target):
        done.append("rename")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "replace", renamed)
    top = tmp_path / "top"
    top.mkdir()
    atomic_files.write_atomic(top / "new" / "newer" / "state", b"x")
    assert re.fullmatch(rf"sync .state.{os.getpid()}.[0-9a-f]{{16}}.part", done[0])
    assert done[1] == "rename"
    assert sorted(done[2:]) == ["sync new", "sync newer", "sync top"]
    done.clear()
    atomic_files.write_atomic(top / "new" / "newer" / "state", b"y")
    assert done[1:] == ["rename", "sync newer"]


def test_what_a_killed_writer_has_left_is_removed_and_a_living_one_s_is_not(tmp_path):
    import fcntl

    (tmp_path / ".state.4711.part").write_bytes(b"x" * 1000)
    (tmp_path / ".other.4711.part").write_bytes(b"x")
    with (tmp_path / ".state.4712.part").open("wb") as living:
        fcntl.flock(living, fcntl.LOCK_EX)
        atomic_files.write_atomic(tmp_path / "state", b"new")
        assert sorted(path.name for path in tmp_path.iterdir()) == [".other.4711.part", ".state.4712.part", "state"]


def test_a_line_is_appended_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "lines.jsonl"
    atomic_files.append_line(path, {"a": 1})
    real = Path.open

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            return self.file.write(data[:3])

    monkeypatch.setattr(Path, "open", lambda path, *more, **named: Full(real(path, *more, **named)))
    with pytest.raises(OSError, match="No space left"):
        atomic_files.append_line(path, {"a": 2})
    monkeypatch.undo()
    assert path.read_text() == '{"a": 1}\n'
    with path.open("a") as file:
        file.write('{"a"')
    assert atomic_files.cut_torn_line(path) == '{"a"'
    assert path.read_text() == '{"a": 1}\n'


@pytest.mark.timeout(30)
@pytest.mark.parametrize("planted", ["link", "pipe", "folder", "link to nothing"])
def test_what_the_owner_of_the_folder_planted_is_neither_followed_nor_waited_for(tmp_path, planted):
    """A relay's folder belongs to who carries the files: it may guess a name and hold it for the site's writer."""
    own, folder = tmp_path / "own.key", tmp_path / "carried"
    own.write_bytes(b"the site's own")
    folder.mkdir()
    for process in (os.getpid(), 1):
        name = folder / f".reply.relay.{process}.part"
        {
            "link": lambda: name.symlink_to(own),  # noqa: B023
            "pipe": lambda: os.mkfifo(name),  # noqa: B023
            "folder": name.mkdir,
            "link to nothing": lambda: name.symlink_to(tmp_path / "new"),  # noqa: B023
        }[planted]()
    (folder / "reply.relay").symlink_to(own)
    atomic_files.write_atomic(folder / "reply.relay", b"sealed")
    assert own.read_bytes() == b"the site's own"
    assert not (tmp_path / "new").exists()
    assert (folder / "reply.relay").read_bytes() == b"sealed"
    assert not (folder / "reply.relay").is_symlink()


def test_a_name_that_was_planted_after_all_is_an_error(tmp_path, monkeypatch):
    own = tmp_path / "own.key"
    own.write_bytes(b"the site's own")
    monkeypatch.setattr(atomic_files.secrets, "token_hex", lambda n: "0" * 2 * n)
    (tmp_path / f".reply.relay.{os.getpid()}.{'0' * 16}.part").symlink_to(own)
    with pytest.raises(FileExistsError):
        atomic_files.write_atomic(tmp_path / "reply.relay", b"sealed")
    assert own.read_bytes() == b"the site's own"


def test_what_a_killed_writer_left_goes_and_what_another_writes_stays(tmp_path):
    left, writing = (tmp_path / f".s.{number}.part" for number in (1, 2))
    left.write_bytes(b"half")
    with writing.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        atomic_files.write_atomic(tmp_path / "s", b"whole")
        assert (left.exists(), writing.exists()) == (False, True)
    atomic_files.write_atomic(tmp_path / "s", b"whole")
    assert [file.name for file in tmp_path.iterdir()] == ["s"]
