"""Bundles that become larger than they came; each is built by hand, for zipfile writes no false sizes."""

from __future__ import annotations

import struct
import tracemalloc
import zipfile
import zlib
from io import BytesIO
from typing import Any

import pytest
from flwr.common.config import get_fab_config
from flwr.common.constant import FAB_MAX_SIZE
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import WireError
from fedveil.guard import received_bundle
from fedveil.guard.received_bundle import MAX_BUNDLE_BYTES, MAX_FILES, MAX_PYPROJECT_BYTES, require_bundle
from tests.conftest import ROOT

ZEROS = 64 << 20


def bundle(*files: tuple[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, content in files:
            archive.writestr(name, content)
    return out.getvalue()


def by_hand(name: str, content: bytes, stated: int, crc: int) -> bytes:
    """A zip file of one deflated file with the size and the checksum that it states."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = packer.compress(content) + packer.flush()
    about = struct.pack("<HHHHHIIIHH", 20, 0, 8, 0, 0x21, crc, len(packed), stated, len(name), 0)
    local = b"PK\3\4" + about + name.encode()
    entry = b"PK\1\2" + struct.pack("<H", 20) + about + struct.pack("<HHHII", 0, 0, 0, 0, 0) + name.encode()
    end = b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(entry), len(local) + len(packed), 0)
    return local + packed + entry + end


def peak_of(call: Any, *args: Any) -> int:
    tracemalloc.start()
    try:
        call(*args)
    except Exception:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


def test_a_bundle_of_fedveil_is_accepted() -> None:
    text = (ROOT / "pyproject.toml").read_bytes()
    assert len(text) < MAX_PYPROJECT_BYTES / 4
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        require_bundle(bundle(("pyproject.toml", text), ("fedveil/", b""), ("fedveil/a.py", b"x" * 100), method=method))
    assert MAX_BUNDLE_BYTES == FAB_MAX_SIZE


@pytest.mark.parametrize("stated", [0, 100, ZEROS])
def test_a_file_that_inflates_takes_no_memory(stated: int) -> None:
    """Flower inflates all of it, also where the size stated is 0: zipfile cuts it only afterwards."""
    content = bytes(ZEROS)
    bomb = by_hand("pyproject.toml", content, stated, zlib.crc32(content[:stated]))
    assert len(bomb) < 100_000
    assert peak_of(get_fab_config, bomb) > ZEROS
    assert peak_of(require_bundle, bomb) < 2 << 20
    with pytest.raises(WireError, match=r"pyproject\.toml has more than"):
        require_bundle(bomb)


@pytest.mark.parametrize("stated", [0, 99, 101])
def test_a_size_that_is_not_the_real_one_is_refused(stated: int) -> None:
    content = b"x" * 100
    with pytest.raises(WireError, match=f"a file has 100 bytes, but states {stated}|CRC"):
        require_bundle(by_hand("a.py", content, stated, zlib.crc32(content)))


def test_all_files_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(received_bundle, "MAX_INFLATED_BYTES", 1000)
    require_bundle(bundle(("a", b"x" * 500), ("b", b"x" * 500)))
    with pytest.raises(WireError, match="all files together"):
        require_bundle(bundle(("a", b"x" * 500), ("b", b"x" * 501)))


@pytest.mark.parametrize(
    "content,words",
    [
        (bytes(MAX_BUNDLE_BYTES + 1), f"at most {MAX_BUNDLE_BYTES} are allowed"),
        (b"PK\1\2" * (MAX_FILES + 1), f"at most {MAX_FILES} are allowed"),
        (bundle(("a", b"x" * 100), method=zipfile.ZIP_BZIP2), "not with deflate"),
        (bundle(("a", b"x" * 100), method=zipfile.ZIP_LZMA), "not with deflate"),
        (b"", "it is not a readable zip file"),
        (bundle(("a", b"x" * 100))[:-10], "it is not a readable zip file"),
    ],
    ids=["too large", "too many files", "bzip2", "lzma", "empty", "cut off"],  # the bytes contain the time
)
def test_another_bundle_is_refused(content: bytes, words: str) -> None:
    with pytest.raises(WireError, match=words):
        require_bundle(content)


@settings(max_examples=200)
@given(st.data())
def test_a_changed_bundle_is_refused_or_read_as_it_states(data: st.DataObject) -> None:
    """No error of another kind; and zipfile gives each file of an accepted one in the size stated."""
    content = bytearray(bundle(("pyproject.toml", b"[a]\n" * 50), ("b", b"x" * 3000)))
    for place, value in data.draw(
        st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)), min_size=1, max_size=3)
    ):
        content[place] = value
    try:
        require_bundle(bytes(content))
    except WireError:
        return
    with zipfile.ZipFile(BytesIO(bytes(content))) as archive:
        for entry in archive.infolist():
            stated = entry.file_size
            assert len(archive.read(entry)) == stated
