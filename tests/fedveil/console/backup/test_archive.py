"""A backup file is checked whole: what a hostile or damaged one contains is refused before anything is written."""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from fedveil.console.backup import archive as module
from fedveil.console.backup.archive import MANIFEST, BackupArchive, write_archive
from fedveil.console.backup.site_files import is_site_file
from fedveil.errors import ConfigError, StateError

NAMES = ("audit-log.jsonl", "pilot-1/north/secret", f"{'r' * 64}/{'s' * 64}/turn-{'a' * 16}.safetensors")


def sources(folder: Path) -> dict[str, Path]:
    files = {}
    for number, name in enumerate(NAMES):
        files[name] = folder / f"source-{number}"
        files[name].write_bytes(os.urandom(700 * number + 3))
    return files


def member(name: str, data: bytes = b"abc", type_: bytes = tarfile.REGTYPE, **more: object) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = len(data), type_
    for key, value in more.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)


def manifest(files: dict[str, bytes], **more: object) -> bytes:
    listed = {name: [len(data), hashlib.sha256(data).hexdigest()] for name, data in files.items()}
    about = {
        "fedveil-backup": 1,
        "kind": "site",
        "made": "2026-11-30T08:00:00+00:00",
        "files": listed,
        "left-out": [],
        **more,
    }
    return member(MANIFEST, json.dumps(about).encode())


END = bytes(1024)
ONE = {"audit-log.jsonl": b"abc"}


def whole(*members: bytes, files: dict[str, bytes] | None = None) -> bytes:
    return b"".join(members) + manifest(ONE if files is None else files) + END


def read(path: Path) -> dict[str, bytes]:
    with BackupArchive.open(path, "site", is_site_file) as archive:
        return {name: archive.read(name) for name in archive.files}


def test_what_is_written_is_read_and_other_tools_read_it_too(tmp_path):
    files, target = sources(tmp_path), tmp_path / "new" / "backup.tar"
    size, sha256 = write_archive(target, "site", files)
    assert read(target) == {name: path.read_bytes() for name, path in files.items()}
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert (size, sha256) == (target.stat().st_size, hashlib.sha256(target.read_bytes()).hexdigest())
    with BackupArchive.open(target, "site", is_site_file) as archive:
        assert archive.sha256 == sha256
    with tarfile.open(target) as tar:
        assert {name: tar.extractfile(name).read() for name in NAMES} == read(target)  # type: ignore[union-attr]
    assert read(_file(tmp_path, whole(member("audit-log.jsonl")))) == ONE


def test_an_existing_file_is_not_replaced_and_half_a_backup_does_not_stay(tmp_path, monkeypatch):
    files, target = sources(tmp_path), tmp_path / "backup.tar"
    target.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="--to: expected a new file"):
        write_archive(target, "site", files)
    target.unlink()
    growing = module.open_regular

    def grow(path: Path):
        file = growing(path)
        if path == files[NAMES[2]]:
            monkeypatch.setattr(os, "fstat", lambda descriptor, real=os.fstat: _smaller(real(descriptor)))
        return file

    monkeypatch.setattr(module, "open_regular", grow)
    with pytest.raises(StateError, match="a file that does not change"):
        write_archive(target, "site", files)
    monkeypatch.undo()
    assert not target.exists()
    assert not list(tmp_path.glob(".*.part"))
    files[NAMES[0]].unlink()
    files[NAMES[0]].symlink_to(tmp_path / "source-1")
    with pytest.raises(StateError, match="expected a file that this user can read"):
        write_archive(target, "site", files)
    monkeypatch.setattr(module, "MAX_FILES", 3)
    with pytest.raises(ConfigError, match="fewer than 3 files"):
        write_archive(target, "site", files)


def _smaller(about: os.stat_result) -> os.stat_result:
    return os.stat_result([*about[:6], about.st_size - 1, *about[7:]])


def _file(folder: Path, data: bytes) -> Path:
    path = folder / "hostile.tar"
    path.write_bytes(data)
    return path


def _pax() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"path": "x"}) as tar:
        tar.addfile(tarfile.TarInfo("audit-log.jsonl"))
    return buffer.getvalue()


def _damaged(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


LOG = member("audit-log.jsonl")
HOSTILE: dict[str, tuple[bytes, str]] = {
    "absolute": (whole(member("/etc/cron.d/x")), "the files that a backup of this kind has"),
    "up": (whole(member("../north/secret")), "the files that a backup of this kind has"),
    "up inside": (whole(member("pilot/../secret")), "the files that a backup of this kind has"),
    "a key": (whole(member("pilot/north/secure.json")), "the files that a backup of this kind has"),
    "a program": (whole(member("guard/north/secret")), "the files that a backup of this kind has"),
    "a new line": (whole(member("north.toml\n")), "the files that a backup of this kind has"),
    "a symbolic link": (whole(member("north.toml", b"", tarfile.SYMTYPE, linkname="/etc/passwd")), "regular files"),
    "a hard link": (
        whole(LOG, member("north.toml", b"", tarfile.LNKTYPE, linkname="audit-log.jsonl")),
        "regular files",
    ),
    "a device": (whole(member("north.toml", b"", tarfile.CHRTYPE)), "regular files"),
    "a folder": (whole(member("pilot", b"", tarfile.DIRTYPE)), "regular files"),
    "sparse": (whole(member("north.toml", b"", tarfile.GNUTYPE_SPARSE)), "regular files|damaged or different"),
    "pax": (_pax(), "regular files"),
    "twice": (whole(LOG, LOG), "each name once"),
    "a file as a folder": (
        whole(member("p.toml"), member("p.toml/north/secret"), files={"p.toml": b"abc", "p.toml/north/secret": b"abc"}),
        "also a folder",
    ),
    "a long name": (whole(member("x" * 600)), "names of at most 512 bytes"),
    "another digest": (whole(LOG, files={"audit-log.jsonl": b"abd"}), "the files in its list"),
    "another size": (whole(LOG, files={"audit-log.jsonl": b"abcd"}), "the files in its list"),
    "one more": (whole(LOG, member("north.toml")), "the files in its list, found another north.toml"),
    "one less": (whole(LOG, files={**ONE, "north.toml": b""}), "the files in its list, found another north.toml"),
    "no list": (LOG + END, "a list of its files at its end, found none"),
    "a list first": (manifest(ONE) + LOG + END, "its list of files at its end"),
    "no JSON": (LOG + member(MANIFEST, b"{") + END, "none that can be read"),
    "deep JSON": (LOG + member(MANIFEST, b"[" * 60_000) + END, "none that can be read"),
    "no table": (LOG + member(MANIFEST, b"[1]") + END, "none that can be read"),
    "another kind": (LOG + manifest(ONE, kind="server") + END, "a backup of a site, version 1, found server"),
    "another version": (LOG + manifest(ONE, **{"fedveil-backup": 2}) + END, "version 1, found site, 2"),
    "a time": (LOG + manifest(ONE, made="\x1b[2J") + END, "the time when it was made"),
    "cut off": (whole(LOG)[:-1024], "cut off"),
    "cut off inside": (whole(LOG)[:600], "cut off"),
    "empty": (b"", "cut off"),
    "more": (whole(LOG) + b"x", "nothing after its end"),
    "far more": (whole(LOG) + bytes(20_000), "nothing after its end"),
    "a header's byte": (_damaged(whole(LOG), 3), "damaged or different"),
    "a content's byte": (_damaged(whole(LOG), 513), "the files in its list"),
    "padding": (_damaged(whole(LOG), 900), "zeros after each file"),
    "a negative size": (whole(member("north.toml", b"", size=-1)), "regular files|damaged or different"),
    "a size of 2^70": (member("north.toml", b"", size=2**70) + END, "cut off"),
}


@pytest.mark.parametrize("case", list(HOSTILE))
def test_a_hostile_or_damaged_backup_is_refused(tmp_path, case):
    data, expected = HOSTILE[case]
    with pytest.raises(ConfigError, match=expected):
        read(_file(tmp_path, data))


def test_a_backup_with_too_many_files_and_a_missing_one_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_FILES", 2)
    many = {f"n{i}.toml": b"abc" for i in range(4)}
    with pytest.raises(ConfigError, match="at most 2 files"):
        read(_file(tmp_path, whole(*(member(name) for name in many), files=many)))
    with pytest.raises(ConfigError, match="a list of at most 65,972 bytes, found one of"):
        read(_file(tmp_path, LOG + manifest(ONE, **{"left-out": [[]] * 20_000}) + END))  # much memory for few bytes
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "none.tar")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="something that is not a file"):
        read(tmp_path / "pipe")


def test_the_list_of_the_longest_names_is_read(tmp_path):
    names = [f"{i:03}{'r' * 61}/{'s' * 64}" for i in range(600)]
    source = tmp_path / "source"
    source.write_bytes(b"abc")
    left_out = [f"{name}/secure.json" for name in names]
    write_archive(tmp_path / "backup.tar", "site", {f"{name}/served.json": source for name in names}, left_out)
    with BackupArchive.open(tmp_path / "backup.tar", "site", is_site_file) as archive:
        assert archive.left_out == tuple(left_out)


def test_a_backup_that_changes_after_the_check_is_not_used(tmp_path):
    path = _file(tmp_path, whole(LOG))
    with BackupArchive.open(path, "site", is_site_file) as archive:
        change: Callable[[bytes], int] = path.write_bytes
        change(_damaged(whole(LOG), 513))
        with pytest.raises(StateError, match="expected the file that was checked"):
            archive.extract("audit-log.jsonl", tmp_path / "out")
    assert not (tmp_path / "out").exists()
