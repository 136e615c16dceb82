from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fedveil.console.main import main
from fedveil.console.provisioning import offline_bundle

NO_INDEX = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
WHEEL = "an_a-1.0+cpu-py3-none-any.whl"


@pytest.fixture
def folder(tmp_path, capsys):
    bundle = tmp_path / "bundle"
    (bundle / "wheels").mkdir(parents=True)
    (bundle / "wheels" / WHEEL).write_bytes(b"wheel")
    (bundle / "image.tar").write_bytes(b"image" * 1000)
    assert main(["bundle", "checksums", str(bundle)]) == 0
    capsys.readouterr()
    return bundle


def test_the_checksums_name_every_file(folder, capsys):
    def sha256(data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()

    required = f"an_a==1.0+cpu --hash=sha256:{sha256(b'wheel')}\n"
    assert (folder / "requirements.txt").read_text() == required
    assert (folder / "SHA256SUMS").read_text() == (
        f"{sha256(b'image' * 1000)}  image.tar\n{sha256(required.encode())}  requirements.txt\n"
        f"{sha256(b'wheel')}  wheels/{WHEEL}\n"
    )
    assert main(["bundle", "verify", str(folder)]) == 0
    assert sha256((folder / "SHA256SUMS").read_bytes()) in capsys.readouterr().out
    assert system_check(folder) == 0


def system_check(folder: Path) -> int:
    """The check that a site makes before it runs any program of the bundle."""
    return subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=folder, capture_output=True).returncode


@pytest.mark.parametrize("what", ["missing", "changed", "not in SHA256SUMS", "link", "list", "no list"])
def test_what_did_not_arrive_as_it_left_is_found(folder, what, capsys):
    wheel = folder / "wheels" / WHEEL
    if what == "missing":
        wheel.unlink()
    elif what == "changed":
        wheel.write_bytes(b"wheeL")
    elif what == "link":
        wheel.rename(folder.parent / "a.whl")
        wheel.symlink_to(folder.parent / "a.whl")
    elif what == "list":
        (folder / "SHA256SUMS").write_text("[]")
    elif what == "no list":
        (folder / "SHA256SUMS").unlink()
    else:
        (folder / "wheels" / "b.whl").touch()
    assert main(["bundle", "verify", str(folder)]) == 2
    assert {"no list": "found none", "list": "found other text"}.get(what, what) in capsys.readouterr().err
    if what not in ("link", "not in SHA256SUMS"):
        assert system_check(folder) != 0


@pytest.mark.parametrize("name", ["two\nlines", "back\\slash", "carriage\rreturn"])
def test_a_name_that_sha256sum_would_escape_is_refused(folder, name, capsys):
    (folder / name).touch()
    assert main(["bundle", "checksums", str(folder)]) == 2
    assert "expected a name without line breaks" in capsys.readouterr().err


def test_a_file_among_the_wheels_that_is_none_is_refused(folder, capsys):
    (folder / "wheels" / "copy of a.whl").touch()
    assert main(["bundle", "checksums", str(folder)]) == 2
    assert "expected a wheel name" in capsys.readouterr().err


def test_an_empty_folder_is_no_bundle(tmp_path, capsys):
    assert main(["bundle", "checksums", str(tmp_path)]) == 2
    assert main(["bundle", "checksums", str(tmp_path / "none")]) == 2


@pytest.mark.long
def test_make_leaves_nothing_half_done_and_no_folder_that_was_there(tmp_path, capsys, monkeypatch):
    from fedveil.console.flower.processes import LaunchError

    calls = []

    def call(self, name, command, env, timeout):
        calls.append((name, command))
        if name == "image":
            raise LaunchError("docker save failed")
        (self.logs / "wheels").mkdir(exist_ok=True)
        (self.logs / "wheels" / WHEEL).write_bytes(b"wheel")
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
        "requirements.txt",
        "SHA256SUMS",
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
        (self.logs / "wheels" / WHEEL).touch()

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


@pytest.mark.long
def test_a_forged_wheel_is_stopped_before_anything_is_installed(tmp_path, capsys):
    """The commands of INSTALL.md, on a small package with its own `verify`, before and after a wheel is exchanged."""
    bundle = tmp_path / "bundle"
    (bundle / "wheels").mkdir(parents=True)
    (bundle / "INSTALL.md").write_text(offline_bundle._INSTALL.format(version="1", python="3", machine="m"))
    write_wheel(bundle / "wheels", "found a change")
    assert main(["bundle", "checksums", str(bundle)]) == 0
    steps = re.findall(r"^    (.*?)(?:  +#.*)?$", (bundle / "INSTALL.md").read_text(), re.MULTILINE)
    _, check, image, venv, install, verify = steps
    assert image.startswith("docker")
    assert verify.endswith("fedveil bundle verify .")

    def run(step: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["sh", "-c", step], cwd=bundle, capture_output=True, text=True, env=NO_INDEX)

    assert run(f"{sys.executable} -m venv --without-pip ../fedveil-venv").returncode == 0
    assert venv.endswith("../fedveil-venv")
    install = install.replace("../fedveil-venv/bin/pip", f"{sys.executable} -m pip --python ../fedveil-venv/bin/python")
    assert run(check).returncode == 0
    write_wheel(bundle / "wheels", "all unchanged")
    assert run(check).returncode == 1  # the check that the telephone call secures
    forged = run(install)
    assert forged.returncode == 1
    assert "DO NOT MATCH THE HASHES" in forged.stderr
    assert not list((tmp_path / "fedveil-venv").rglob("tiny.py"))
    write_wheel(bundle / "wheels", "found a change")
    (bundle / "wheels" / "tiny-2.0-py3-none-any.whl").write_bytes(b"a newer one that nobody listed")
    assert run(install).returncode == 0
    assert [file.read_text() for file in (tmp_path / "fedveil-venv").rglob("tiny.py")] == ["print('found a change')\n"]
    assert main(["bundle", "verify", str(bundle)]) == 2
    assert "tiny-2.0" in capsys.readouterr().err


def write_wheel(folder: Path, text: str) -> None:
    """Write a wheel of one module, the same bytes for the same text."""
    files = {
        "tiny.py": f"print({text!r})\n",
        "tiny-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
        "tiny-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "tiny-1.0.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(folder / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        for name, content in files.items():
            wheel.writestr(zipfile.ZipInfo(name), content)


def test_each_step_of_a_new_bundle_is_said_on_standard_error(tmp_path, monkeypatch, capsys):
    def call(self, name, command, env, seconds):
        if name == "wheels":
            folder = Path(command[command.index("--wheel-dir") + 1])
            folder.mkdir(exist_ok=True)
            (folder / WHEEL).write_bytes(b"wheel")

    monkeypatch.setattr(offline_bundle.ProcessGroup, "call", call)
    monkeypatch.setattr(offline_bundle.paths, "copy_checkout", lambda to, source: to)
    assert main(["bundle", "make", str(tmp_path / "new"), "--image", "fedveil:1"]) == 0
    output = capsys.readouterr()
    assert [line.partition(" ")[0] for line in output.err.splitlines()] == ["1", "2", "3", "4", "computing"]
    assert "1 of 4: collecting torch; this may take minutes" in output.err
    assert "4 of 4: saving the image fedveil:1; this may take minutes" in output.err
    assert "SHA-256" in output.out
