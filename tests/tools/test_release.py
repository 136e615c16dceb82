"""tools/release.py: conditions that prevent a release, byte-identical archives, and a release that installs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tools import release

CHANGELOG = "# Changelog\n\n## [1.2.3] - 2030-01-02\n\n### Added\n- This.\n\n## [1.2.2] - 2029-01-02\n\n- That.\n"


@pytest.fixture
def tree(tmp_path) -> Path:
    """The few files that a release is judged by, all of version 1.2.3."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (tmp_path / "benchmarks" / "pyproject.toml").write_text(
        '[project]\nversion = "1.2.3"\ndependencies = ["fedveil==1.2.3"]\n'
    )
    (tmp_path / "CITATION.cff").write_text("title: FedVeil\nversion: 1.2.3\n")
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    return tmp_path


def test_a_tree_whose_versions_and_date_fit_its_tag_has_no_fault(tree):
    assert release.find_faults("v1.2.3", tree) == []


@pytest.mark.parametrize(
    ("file", "before", "after", "fault"),
    [
        ("pyproject.toml", "1.2.3", "1.2.4", "version in pyproject.toml: expected 1.2.3, found 1.2.4"),
        ("benchmarks/pyproject.toml", 'version = "1.2.3"', 'version = "1"', "version in benchmarks/pyproject.toml: "),
        ("benchmarks/pyproject.toml", "fedveil==1.2.3", "fedveil>=1", "requires: expected 1.2.3, found none"),
        ("CITATION.cff", "version: 1.2.3", "", "version in CITATION.cff: expected 1.2.3, found nothing"),
        ("CHANGELOG.md", "2030-01-02", "Unreleased", "found ## [1.2.3] - Unreleased"),
        ("CHANGELOG.md", "[1.2.3]", "[9.9.9]", "found nothing"),
    ],
)
def test_each_version_that_differs_is_a_fault(tree, file, before, after, fault):
    text = (tree / file).read_text()
    assert before in text
    (tree / file).write_text(text.replace(before, after))
    (found,) = release.find_faults("v1.2.3", tree)
    assert fault in found


@pytest.mark.parametrize("tag", ["1.2.3", "v1.2", "v1.2.3/../x", "v1.2.3-", "release"])
def test_a_tag_of_another_form_is_refused_before_anything_is_read(tag, tmp_path):
    (fault,) = release.find_faults(tag, tmp_path)
    assert "such as v0.2.0" in fault


def test_the_notes_are_the_section_of_one_version():
    assert release.extract_notes(CHANGELOG, "1.2.3") == "### Added\n- This.\n"
    assert release.extract_notes(CHANGELOG, "1.2.2") == "- That.\n"
    with pytest.raises(KeyError):
        release.extract_notes(CHANGELOG, "1.2")


def test_an_archive_does_not_depend_on_times_owners_or_order(tmp_path):
    digests = set()
    for name, order in (("first", ("a", "b")), ("second", ("b", "a"))):
        folder = tmp_path / name
        folder.mkdir()
        for file in order:
            (folder / file).write_text(file)
        (folder / "link").symlink_to("a")
        os.utime(folder / "a", (len(name), len(name)))
        (folder / "b").chmod(0o700)
        release.pack_files({f"top/{file}": folder / file for file in (*order, "link")}, tmp_path / "x.tar.gz", 7)
        digests.add(hashlib.sha256((tmp_path / "x.tar.gz").read_bytes()).hexdigest())
    assert len(digests) == 1
    with tarfile.open(tmp_path / "x.tar.gz") as tar:
        members = {member.name: member for member in tar.getmembers()}
    assert sorted(members) == ["top/a", "top/b", "top/link"]
    assert members["top/link"].linkname == "a"
    assert {(member.mtime, member.uid, member.uname) for member in members.values()} == {(7, 0, "")}
    assert (members["top/a"].mode, members["top/b"].mode) == (0o644, 0o755)


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def test_the_modes_of_the_files_in_a_wheel_do_not_depend_on_the_umask(tmp_path):
    sources = []
    for folder, name in ((tmp_path, "one"), (tmp_path / "benchmarks", "two")):
        folder.mkdir(exist_ok=True)
        sources.append(folder / f"{name}.py")
        sources[-1].write_text("")
        (folder / "pyproject.toml").write_text(
            f'[project]\nname = "{name}"\nversion = "1"\n[build-system]\nrequires = ["setuptools"]\n'
            f'build-backend = "setuptools.build_meta"\n[tool.setuptools]\npy-modules = ["{name}"]\n'
        )
    with umask(0o077):
        release.build_distributions(tmp_path, tmp_path / "made", 1_800_000_000)
    wheels = sorted((tmp_path / "made").glob("*.whl"))
    assert [wheel.name for wheel in wheels] == ["one-1-py3-none-any.whl", "two-1-py3-none-any.whl"]
    modes = {oct(info.external_attr >> 16) for wheel in wheels for info in zipfile.ZipFile(wheel).infolist()}
    assert modes == {"0o100644", "0o100664"}  # 664 is the mode that the wheel format's own tool gives RECORD


def test_the_recipe_has_what_the_image_is_built_from_and_no_more():
    files = release.list_recipe_files(ROOT)
    assert {
        "docker/Dockerfile",
        "compose.yaml",
        "lock/run.txt",
        "fedveil/attacks",
        "attacks/base.py",
        "LICENSE",
    } <= set(files)
    assert "tools/sbom.py" in files  # which the image's own list of components is made by
    assert [file for file in files if "__pycache__" in file or file.startswith(("tests/", "benchmarks/", ".git"))] == []


def run(*command: str | Path, cwd: Path | None = None, stdin: bytes | None = None) -> str:
    env = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "MAKEFLAGS", "MAKELEVEL"}}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, input=stdin, capture_output=True, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]!r}{done.stderr[-2000:]!r}"
    return done.stdout.decode()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen signs a release")
def test_a_release_of_this_checkout_can_be_built_twice_verified_and_installed(tmp_path):
    """From a clone with a dated tag; the list of components is the one part that needs a lock's own environment."""
    clone, key = tmp_path / "clone", tmp_path / "key"
    run("git", "clone", "-q", ROOT, clone)
    for name in ("tools/release.py", "tools/sbom.py", "MANIFEST.in"):
        shutil.copy(ROOT / name, clone / name)
    version = release.tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    changelog = (clone / "CHANGELOG.md").read_text()
    (clone / "CHANGELOG.md").write_text(
        changelog.replace(f"## [{version}] - Unreleased", f"## [{version}] - 2030-01-02")
    )
    run("git", "add", "-A", cwd=clone)
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    run("git", *author, "commit", "-qm", "Date the release", "--allow-empty", cwd=clone)
    run("git", "tag", f"v{version}", cwd=clone)
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
    components = tmp_path / "sbom-python"  # replaces a Python with lock/sbom.txt, which no test installs
    components.write_text('#!/bin/sh\nwhile [ "$1" != --out ]; do shift; done\necho "{}" >"$2"\n')
    components.chmod(0o755)
    (clone / "pyproject.toml").write_text("not the tag's\n")
    folders = []
    for name, mask in (("one", 0o022), ("two", 0o077)):
        with umask(mask):
            folders.append(release.make_release(f"v{version}", key, components, tmp_path / name, clone))
    first, second = ({p.name: p.read_bytes() for p in folder.iterdir()} for folder in folders)
    assert first == second
    assert set(first) == {
        f"fedveil-{version}.tar.gz", f"fedveil-{version}-py3-none-any.whl", f"fedveil-{version}-image.tar.gz",
        f"fedveil_bench-{version}.tar.gz", f"fedveil_bench-{version}-py3-none-any.whl", f"fedveil-{version}.cdx.json",
        "NOTES.md", "SHA256SUMS", "SHA256SUMS.sig",
    }  # fmt: skip
    (tmp_path / "signers").write_text(f"release {(tmp_path / 'key.pub').read_text()}")
    verify = (
        "ssh-keygen", "-Y", "verify", "-f", tmp_path / "signers", "-I", "release", "-n", release.SIGNATURE_NAMESPACE,
        "-s", folders[0] / "SHA256SUMS.sig",
    )  # fmt: skip
    assert "Good" in run(*verify, stdin=first["SHA256SUMS"])
    with pytest.raises(AssertionError, match="incorrect signature|Signature verification failed"):
        run(*verify, stdin=first["SHA256SUMS"].replace(b"0", b"1", 1))
    run("sha256sum", "--check", "SHA256SUMS", cwd=folders[0])
    with tarfile.open(folders[0] / f"fedveil-{version}.tar.gz") as tar:
        source = {name.partition("/")[2] for name in tar.getnames()}
    assert [name for name in source if name.startswith("tests")] == []
    links = set(re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / "README.md").read_text()))
    assert len(links) > 20
    assert links - source == set()
    # The distributions in an environment with only their requirements.
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    wheels = [folders[0] / name for name in first if name.endswith(".whl")]
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", "--no-deps", *wheels)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (others := tmp_path / "others").mkdir()
    for site in sys.path:
        for file in Path(site).iterdir() if site.endswith("site-packages") else ():
            if not file.name.startswith(("fedveil", "__editable__")):
                (others / file.name).symlink_to(file)
    (packages / "others.pth").write_text(f"{others}\n")
    fedveil = tmp_path / "venv" / "bin" / "fedveil"
    (tmp_path / "empty").mkdir()
    assert run(fedveil, "--version", cwd=tmp_path / "empty") == f"fedveil {version}\n"
    assert "core/aggregate" in run(fedveil, "bench", "--list", cwd=tmp_path / "empty")
