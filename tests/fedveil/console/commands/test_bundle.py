from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from fedveil.console.main import main


@pytest.fixture
def folder(tmp_path, capsys):
    bundle = tmp_path / "bundle"
    (bundle / "wheels").mkdir(parents=True)
    (bundle / "wheels" / "a.whl").write_bytes(b"wheel")
    (bundle / "image.tar").write_bytes(b"image" * 1000)
    assert main(["bundle", "manifest", str(bundle)]) == 0
    capsys.readouterr()
    return bundle


def test_the_manifest_names_every_file_with_its_hash(folder, capsys):
    files = json.loads((folder / "MANIFEST.json").read_text())["files"]
    assert files == {
        "image.tar": {"bytes": 5000, "sha256": hashlib.sha256(b"image" * 1000).hexdigest()},
        "wheels/a.whl": {"bytes": 5, "sha256": hashlib.sha256(b"wheel").hexdigest()},
    }
    assert main(["bundle", "verify", str(folder)]) == 0
    assert hashlib.sha256((folder / "MANIFEST.json").read_bytes()).hexdigest() in capsys.readouterr().out


@pytest.mark.parametrize("what", ["missing", "changed", "not in the manifest", "link", "manifest"])
def test_what_did_not_arrive_as_it_left_is_found(folder, what, capsys):
    wheel = folder / "wheels" / "a.whl"
    if what == "missing":
        wheel.unlink()
    elif what == "changed":
        wheel.write_bytes(b"wheeL")
    elif what == "link":
        wheel.rename(folder.parent / "a.whl")
        wheel.symlink_to(folder.parent / "a.whl")
    elif what == "manifest":
        (folder / "MANIFEST.json").write_text("[]")
    else:
        (folder / "wheels" / "b.whl").touch()
    assert main(["bundle", "verify", str(folder)]) == 2
    assert what in capsys.readouterr().err


def test_an_empty_folder_is_no_bundle(tmp_path, capsys):
    assert main(["bundle", "manifest", str(tmp_path)]) == 2
    assert main(["bundle", "manifest", str(tmp_path / "none")]) == 2


@pytest.mark.long
def test_make_leaves_nothing_half_done_and_no_folder_that_was_there(tmp_path, capsys, monkeypatch):
    from fedveil.console.flower.processes import LaunchError

    calls = []

    def call(self, name, command, env, timeout):
        calls.append((name, command))
        if name == "image":
            raise LaunchError("docker save failed")
        (self.logs / "wheels").mkdir(exist_ok=True)
        (self.logs / "wheels" / "a.whl").write_bytes(b"wheel")
        return ""

    monkeypatch.setattr("fedveil.console.flower.processes.ProcessGroup.call", call)
    assert main(["bundle", "make", str(tmp_path / "b"), "--image", "x/y:1"]) == 2
    assert list(tmp_path.iterdir()) == []
    name, command = calls[-1]
    assert (name, command[:3], Path(command[3]).name, command[4]) == (
        "image",
        ["docker", "save", "-o"],
        "x_y-1.tar",
        "x/y:1",
    )
    assert main(["bundle", "make", str(tmp_path / "b"), "--no-images"]) == 0
    assert {p.name for p in (tmp_path / "b").iterdir()} == {
        "wheels",
        "images",
        "constraints.txt",
        "INSTALL.md",
        "MANIFEST.json",
    }
    *fetched, built = [command for _, command in calls[-3:]]
    assert [Path(command[-1]).name for command in fetched] in (["cpu.txt", "run.txt"], ["cuda.txt", "run.txt"])
    assert all({"--require-hashes", "--no-deps", "--no-build-isolation"} <= set(command) for command in fetched)
    assert {"--no-index", "--no-deps", "--no-build-isolation"} <= set(built)
    assert main(["bundle", "verify", str(tmp_path / "b")]) == 0
    assert main(["bundle", "make", str(tmp_path / "b")]) == 2
    assert "does not exist yet" in capsys.readouterr().err
    assert main(["bundle", "make", str(tmp_path / "c"), "--source", str(tmp_path)]) == 2


def test_the_wheel_is_made_of_the_source_alone(tmp_path, monkeypatch):
    """A module that was deleted is still in a checkout's build/."""
    source, seen = tmp_path / "source", []
    for name in (
        "pyproject.toml",
        "constraints.txt",
        "lock/run.txt",
        "fedveil/a.py",
        "build/lib/fedveil/deleted.py",
        ".venv/x",
        "runs/y",
    ):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).touch()

    def call(self, name, command, env, timeout):
        seen[:] = sorted(p.relative_to(command[-1]).as_posix() for p in Path(command[-1]).rglob("*") if p.is_file())
        (self.logs / "wheels").mkdir(exist_ok=True)
        (self.logs / "wheels" / "a.whl").touch()

    monkeypatch.setattr("fedveil.console.flower.processes.ProcessGroup.call", call)
    assert main(["bundle", "make", str(tmp_path / "b"), "--no-images", "--source", str(source)]) == 0
    assert seen == ["constraints.txt", "fedveil/a.py", "lock/run.txt", "pyproject.toml"]
    assert sorted(p.name for p in source.iterdir()) == [
        ".venv",
        "build",
        "constraints.txt",
        "fedveil",
        "lock",
        "pyproject.toml",
        "runs",
    ]
