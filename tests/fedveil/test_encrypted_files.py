"""Encrypted files: what they show, and every way in which one is changed, exchanged or read under another key."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedveil import encrypted_files
from fedveil.encrypted_files import FileSeal, is_sealed, make_key, read_seal_header
from fedveil.errors import ConfigError, StateError
from fedveil.records.atomic_files import write_atomic

KEY, OTHER = FileSeal(bytes(range(32))), FileSeal(bytes(32))
SECRET = b"what nobody may read " * 20
ROLE = "state/pilot/north"
_HEAD = 16 + 8 + 32 + 2 + len(ROLE)


def put(path: Path, content: bytes = SECRET, seal: FileSeal = KEY, role: str = ROLE) -> Path:
    write_atomic(path, seal.closed([content], role))
    return path


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(encrypted_files, "_CHUNK_BYTES", 16)


@given(parts=st.lists(st.binary(max_size=50), max_size=6))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_was_sealed_is_read_however_it_was_cut(small_chunks, tmp_path, parts):
    write_atomic(tmp_path / "f", KEY.closed(parts, ROLE))
    assert KEY.read(tmp_path / "f", ROLE) == b"".join(parts)
    chunks = max(1, -(-sum(map(len, parts)) // 16))
    assert (tmp_path / "f").stat().st_size == _HEAD + sum(map(len, parts)) + 16 * chunks


def test_a_sealed_file_shows_its_role_and_key_and_nothing_else_and_no_two_are_equal(tmp_path):
    first, second = put(tmp_path / "a"), put(tmp_path / "b")
    assert not any(SECRET[i : i + 8] in first.read_bytes() for i in range(len(SECRET) - 8))
    assert KEY.key not in first.read_bytes()
    assert repr(KEY) == "FileSeal()"
    assert (read_seal_header(first).role, read_seal_header(first).key) == (ROLE, KEY.id)
    a, b = first.read_bytes(), second.read_bytes()
    assert a[:24] == b[:24]
    assert a[24:56] != b[24:56]
    assert a[_HEAD:] != b[_HEAD:]


def test_every_changed_bit_is_found(tmp_path):
    """In head, chunk and tag."""
    path = put(tmp_path / "f", b"0123456789")
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(StateError, match=str(path)):
            KEY.read(path, ROLE)


def test_chunks_that_were_cut_off_dropped_swapped_or_repeated_are_found(small_chunks, tmp_path):
    path = put(tmp_path / "f", bytes(48))
    whole = path.read_bytes()
    head, (a, b, c) = whole[:_HEAD], [whole[_HEAD + 32 * i :][:32] for i in range(3)]
    for pieces in ([a, b], [a], [], [b, a, c], [a, c], [a, b, b, c], [a, b, c, c], [a, b, c[:-1]], [a, b, c, b"\0"]):
        path.write_bytes(b"".join([head, *pieces]))
        with pytest.raises(
            StateError, match="chunk . of the encrypted file was changed, or its end is missing; restore it"
        ):
            KEY.read(path, ROLE)
    path.write_bytes(whole)
    assert KEY.read(path, ROLE) == bytes(48)


def test_a_head_that_was_cut_off_or_is_of_another_version_is_named(tmp_path):
    path = put(tmp_path / "f")
    whole = path.read_bytes()
    for content in (whole[:15], whole[:40], whole[: _HEAD - 1], whole[:15] + b"\x02" + whole[16:]):
        path.write_bytes(content)
        with pytest.raises(StateError, match="not an encrypted file of version 1, or its header is truncated"):
            KEY.read(path, ROLE)


def test_one_sealed_file_does_not_pass_for_another(tmp_path):
    put(tmp_path / "mine"), put(tmp_path / "theirs", role="state/pilot/south")
    (tmp_path / "theirs").replace(tmp_path / "mine")
    with pytest.raises(StateError, match="of 'state/pilot/south', not of 'state/pilot/north', so files were swapped"):
        KEY.read(tmp_path / "mine", ROLE)
    forged = (tmp_path / "mine").read_bytes().replace(b"pilot/south", b"pilot/north")
    (tmp_path / "mine").write_bytes(forged)
    with pytest.raises(StateError, match="chunk 0 of the encrypted file was changed"):
        KEY.read(tmp_path / "mine", ROLE)


def test_another_key_no_key_and_a_file_in_the_clear_are_told_apart(tmp_path):
    path = put(tmp_path / "f")
    with pytest.raises(StateError, match=f"encrypted under key {KEY.id}, not {OTHER.id}; name that key's"):
        OTHER.read(path, ROLE)
    with pytest.raises(StateError, match="this file is encrypted, but no key file is set; set key-file"):
        FileSeal().read(path, ROLE)
    put(path, seal=FileSeal())
    assert path.read_bytes() == FileSeal().read(path, ROLE) == SECRET
    assert not is_sealed(path)
    with pytest.raises(StateError, match=f"not encrypted under key {KEY.id}; .*fedveil site seal"):
        KEY.read(path, ROLE)


def test_a_key_file_is_new_its_owners_alone_and_of_its_length(tmp_path):
    made = make_key(tmp_path / "key")
    assert stat.S_IMODE(os.stat(tmp_path / "key").st_mode) == 0o600
    assert FileSeal.from_key_file(tmp_path / "key") == made != FileSeal()
    assert FileSeal.from_key_file("") == FileSeal()
    with pytest.raises(ConfigError, match="cannot create .*key .FileExists"):
        make_key(tmp_path / "key")
    for mode in (0o640, 0o604, 0o620):
        (tmp_path / "key").chmod(mode)
        with pytest.raises(ConfigError, match=f"readable only by its owner, but has mode {mode:o}; chmod 600"):
            FileSeal.from_key_file(tmp_path / "key")
    (tmp_path / "key").chmod(0o600)
    for content, size_text in ((b"short", "5"), (bytes(33), "more")):
        (tmp_path / "key").write_bytes(content)
        with pytest.raises(
            ConfigError, match=f"expected 32 bytes in .*, found {size_text}; make one with fedveil site key"
        ):
            FileSeal.from_key_file(tmp_path / "key")
    with pytest.raises(ConfigError, match="key-file: cannot read the key file .*none .FileNotFoundError.; restore it"):
        FileSeal.from_key_file(tmp_path / "none")


def test_the_server_and_its_auditor_name_a_key_file_in_their_environment(tmp_path, monkeypatch):
    monkeypatch.delenv(encrypted_files.VARIABLE, raising=False)
    assert FileSeal.of_environment() == FileSeal()
    made = make_key(tmp_path / "key")
    monkeypatch.setenv(encrypted_files.VARIABLE, str(tmp_path / "key"))
    assert FileSeal.of_environment() == made
