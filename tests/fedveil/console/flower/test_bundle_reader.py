"""What a reviewer of a bundle sees."""

from __future__ import annotations

import io
import stat
import zipfile

import pytest

from fedveil.console.flower import bundle_reader
from fedveil.console.flower.bundle_reader import compare_bundles, read_bundle
from fedveil.console.main import main
from fedveil.errors import ConfigError


def packed(files: dict[str, bytes]) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return target.getvalue()


def test_the_files_are_read_without_flowers_list():
    content = packed({"b.py": b"2", "a/x.py": b"1", ".info/CONTENT": b"digests"})
    assert read_bundle(content) == {"a/x.py": b"1", "b.py": b"2"}


@pytest.mark.parametrize(
    "content,reason",
    [
        (b"", "not a readable bundle"),
        (b"PK\x03\x04 nothing", "not a readable bundle"),
        (packed({"../x.py": b""}), "outside its own folder"),
        (packed({"/x.py": b""}), "outside its own folder"),
        (packed({"a\\x.py": b""}), "outside its own folder"),
        (packed({"big.bin": bytes(5000)}), "more than 0 MiB"),
        (packed({f"{i}.py": b"" for i in range(11)}), "at most 10 files, this one 11"),
    ],
)
def test_a_hostile_bundle_is_refused(content, reason, monkeypatch):
    monkeypatch.setattr(bundle_reader, "_MOST_BYTES", 4096)
    monkeypatch.setattr(bundle_reader, "_MOST_FILES", 10)
    with pytest.raises(ConfigError, match=reason):
        read_bundle(content)


def test_two_files_of_one_name_and_links_are_refused():
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("a.py", b"reviewed")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("a.py", b"installed")
    with pytest.raises(ConfigError, match=r"two files named a\.py"):
        read_bundle(target.getvalue())
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        link = zipfile.ZipInfo("a.py")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, b"/etc/passwd")
    with pytest.raises(ConfigError, match=r"has a link, a\.py"):
        read_bundle(target.getvalue())


def test_every_difference_is_shown():
    old = {"same.py": b"1\n", "gone.py": b"x\n", "changed.py": b"a\nb\n", "ends.py": b"a\n", "pixels": b"\xff\x00"}
    new = {"same.py": b"1\n", "new.py": b"y\n", "changed.py": b"a\nc\n", "ends.py": b"a\r\n", "pixels": b"\xff\x01"}
    lines = compare_bundles(old, new | {"empty.py": b""})
    for part in ("-b", "+c", "-x", "+y", "+a\r", "Binary file pixels differs", "Empty file empty.py was added"):
        assert part in lines
    assert not any("same" in line for line in lines)
    assert compare_bundles(old, old) == []


def test_the_command_shows_hostile_text_whole_and_escaped(tmp_path, capsys):
    file, older = tmp_path / "app.fab", tmp_path / "old.fab"
    trick = "x = 1  # " + "y" * 5000 + "‮ end"
    file.write_bytes(packed({"a.py": f"{trick}\n\x1b[2Jz = 2\n".encode(), "bin": b"\xff"}))
    older.write_bytes(packed({"a.py": f"{trick}\n".encode(), "bin": b"\xff"}))
    assert main(["app", "show", str(file)]) == 0
    assert "2 files" in capsys.readouterr().out
    assert main(["app", "show", str(file), "--file", "a.py"]) == 0
    stdout = capsys.readouterr().out
    assert "y" * 5000 + "\\u202e end" in stdout
    assert "\\x1b[2Jz = 2" in stdout
    assert "\x1b" not in stdout
    assert main(["app", "show", str(file), "--since", str(older)]) == 1
    assert "+\\x1b[2Jz = 2" in capsys.readouterr().out
    assert main(["app", "show", str(file), "--since", str(file)]) == 0
    assert "No file differs." in capsys.readouterr().out
    assert main(["app", "show", str(file), "--file", "b.py"]) == 2
    assert "this bundle has no b.py; did you mean a.py?" in capsys.readouterr().err
    assert main(["app", "show", str(file), "--file", "bin"]) == 2
