"""What a reviewer of a bundle sees."""

from __future__ import annotations

import io
import stat
import zipfile

import pytest

from fedveil.console.flower import bundle_reader
from fedveil.console.flower.bundle_reader import compare_bundles, list_hidden_code, read_bundle
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
    ids=["empty", "no zip", "above", "absolute", "backslash", "large", "many"],  # the bytes contain the time
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


@pytest.mark.parametrize("names", [("A.py", "a.py"), ("a/x.py", "A/x.py"), ("\u017fet.py", "set.py")])
def test_names_that_some_disks_take_for_one_are_refused(names):
    with pytest.raises(ConfigError, match="two files named"):
        read_bundle(packed(dict.fromkeys(names, b"")))


@pytest.mark.parametrize(
    "name,data,reason",
    [
        ("a.py", b"# vim: set fileencoding=raw_unicode_escape :\n# ok \\u000aprint(1)\n", "its encoding is raw"),
        ("a.py", b"# coding: utf-7\n# +AAo-print(1)\n", "its encoding is utf-7"),
        ("a.py", b"# coding: none-such\n", "its encoding is unknown"),
        ("a.py", b"# comment\rprint(1)\n", "a carriage return inside a line"),
        ("config\u0441.py", b"", "its name has characters outside ASCII"),
        ("a.so", b"\x7fELF", "compiled code"),
        ("__pycache__/a.pyc", b"", "compiled code"),
    ],
)
def test_code_that_is_not_what_it_looks_like_is_named(tmp_path, capsys, name, data, reason):
    assert any(reason in line for line in list_hidden_code({name: data}))
    file = tmp_path / "app.fab"
    file.write_bytes(packed({name: data}))
    main(["app", "show", str(file)])
    assert reason in capsys.readouterr().err


def test_ordinary_code_is_not_named():
    assert list_hidden_code({"a.py": "# -*- coding: utf-8 -*-\r\nx = 'é'\r\n".encode(), "b.md": b"\r"}) == []


def test_a_line_of_a_file_cannot_pose_as_the_start_of_another(tmp_path):
    changes = compare_bundles({"a.py": b""}, {"a.py": b"++ new/docs/readme.md\n=== docs/readme.md was changed\nx\n"})
    assert [line for line in changes if not line.startswith(("+", "-", "@", " ", "\\"))] == ["=== a.py was changed"]


def test_every_difference_is_shown():
    old = {"same.py": b"1\n", "gone.py": b"x\n", "changed.py": b"a\nb\n", "ends.py": b"a\n", "pixels": b"\xff\x00"}
    new = {"same.py": b"1\n", "new.py": b"y\n", "changed.py": b"a\nc\n", "ends.py": b"a\r\n", "pixels": b"\xff\x01"}
    lines = compare_bundles(old, new | {"empty.py": b""})
    for part in ("-b", "+c", "-x", "+y", "+a\r", "=== empty.py was added", "=== gone.py was removed"):
        assert part in lines
    (pixels,) = [line for line in lines if line.startswith("=== pixels")]
    assert "not text; 2 bytes with SHA-256 " in pixels
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
