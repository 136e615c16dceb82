"""Build a release from a tag: distributions, component list, image recipe, notes, checksums and their signature.

    make release TAG=v0.2.0 KEY=~/.ssh/release      # writes dist/release/fedveil-0.2.0/

Only the tag's files are used, not those in the working tree. The same tag gives the same bytes, except for the
signature's container, so that anyone can rebuild the release and compare SHA256SUMS. The key is an Ed25519 key from
`ssh-keygen`; docs/release.md shows how a user verifies and installs a release.
"""

from __future__ import annotations

import argparse
import fnmatch
import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SIGNATURE_NAMESPACE = "fedveil-release"
# Build inputs of an image in addition to those in docker/Dockerfile.dockerignore.
RECIPE_FILES = ("docker", "compose.yaml", "compose.gpu.yaml")


def find_faults(tag: str, tree: Path) -> list[str]:
    """Return sentences that say why a tree cannot be released under a tag; empty if it can."""
    match = re.fullmatch(r"v(\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?)", tag)
    if not match:
        return [f"tag: expected v and a version, such as v0.2.0, found {tag}"]
    version = match[1]
    core = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    bench = tomllib.loads((tree / "benchmarks" / "pyproject.toml").read_text())["project"]
    found = {
        "version in pyproject.toml": core["version"],
        "version in benchmarks/pyproject.toml": bench["version"],
        "version of FedVeil that benchmarks/pyproject.toml requires": next(
            (line.partition("==")[2] for line in bench["dependencies"] if line.startswith("fedveil==")), "none"
        ),
        "version in CITATION.cff": _first_group(r"^version: (\S+)$", (tree / "CITATION.cff").read_text()),
    }
    faults = [f"{name}: expected {version}, found {value}" for name, value in found.items() if value != version]
    heading = _first_group(rf"^(## \[{re.escape(version)}\].*)$", (tree / "CHANGELOG.md").read_text())
    if not re.fullmatch(rf"## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", heading):
        faults.append(f'CHANGELOG.md: expected a heading "## [{version}] - YYYY-MM-DD", found {heading}')
    return faults


def extract_notes(changelog: str, version: str) -> str:
    """Return a version's section in a changelog, without its heading. Raises KeyError if there is none."""
    parts = re.split(r"^## \[(.+?)\].*\n", changelog, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[version].strip() + "\n"


def list_recipe_files(tree: Path) -> list[str]:
    """Return the sorted paths, relative to `tree`, of the files from which the images are built.

    These are the files that docker/Dockerfile.dockerignore admits to a build, and RECIPE_FILES.
    """
    rules = (tree / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    admitted = [*(rule[1:] for rule in rules if rule.startswith("!")), *RECIPE_FILES]
    refused = [rule.removeprefix("**/") for rule in rules if rule.startswith("**/")]
    missing = [name for name in admitted if not (tree / name).exists()]
    if missing:
        raise FileNotFoundError(f"docker/Dockerfile.dockerignore: expected {missing[0]} in the tag, found nothing")
    files = []
    for name in admitted:
        top = tree / name
        # A link to a folder counts as a file in the archive: its target is admitted under its own name.
        below = (
            [top]
            if top.is_file() or top.is_symlink()
            else [p for p in top.rglob("*") if p.is_symlink() or not p.is_dir()]
        )
        files += [path.relative_to(tree) for path in below]
    kept = (path for path in files if not any(fnmatch.fnmatch(part, rule) for part in path.parts for rule in refused))
    return sorted({path.as_posix() for path in kept})


def pack_files(files: Mapping[str, Path], archive: Path, epoch: int) -> None:
    """Write a reproducible .tar.gz: sorted names, one modification time, and no owners.

    Args:
        files: maps names in the archive to paths. Symbolic links remain links.
        epoch: the modification time of each member, in seconds since 1970.
    """
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(files):
            member = tar.gettarinfo(files[name], name)
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime = epoch
            member.mode = 0o755 if member.mode & 0o100 else 0o644
            if member.isfile():
                with files[name].open("rb") as data:
                    tar.addfile(member, data)
            else:
                tar.addfile(member)
    archive.write_bytes(gzip.compress(content.getvalue(), compresslevel=9, mtime=0))


def repack_source(archive: Path, epoch: int) -> None:
    """Rewrite a source archive with fixed times and owners, which setuptools takes from the clock and the user."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        top = Path(folder)
        files = {path.relative_to(top).as_posix(): path for path in top.rglob("*") if not path.is_dir()}
        pack_files(files, archive, epoch)


def build_distributions(tree: Path, into: Path, epoch: int) -> None:
    """Build the source archives and wheels of FedVeil and its benchmarks."""
    env = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "PYTHONWARNINGS": "ignore"}
    for source in (tree, tree / "benchmarks"):
        command = [sys.executable, "-m", "build", "--no-isolation", "-C--quiet", "--outdir", str(into), str(source)]
        _check(command, env=env)
    for archive in into.glob("*.tar.gz"):
        repack_source(archive, epoch)


def write_checksums(folder: Path) -> Path:
    """Write SHA256SUMS for all files in a folder, in the format of `sha256sum --check`, and return its path."""
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in sorted(folder.iterdir())]
    sums = folder / "SHA256SUMS"
    sums.write_text("".join(lines))
    return sums


def sign_checksums(sums: Path, key: Path) -> None:
    """Sign a file with `ssh-keygen -Y sign`; the signature is written next to it, with the suffix .sig."""
    _check(["ssh-keygen", "-q", "-Y", "sign", "-f", str(key), "-n", SIGNATURE_NAMESPACE, str(sums)])


def make_release(tag: str, key: Path, sbom_python: Path, into: Path, repository: Path = ROOT) -> Path:
    """Build the release of a tag and return its folder.

    Args:
        tag: the tag, such as v0.2.0.
        key: an Ed25519 private key from `ssh-keygen`.
        sbom_python: a Python interpreter with lock/sbom.txt installed.
        into: the parent of the release folder; an older release of the same version is replaced.
        repository: the checkout that has the tag.
    """
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary) / "tree"
        _extract_tag(repository, tag, tree)
        if faults := find_faults(tag, tree):
            raise SystemExit("\n".join(f"error: {fault}" for fault in faults))
        version = tag.removeprefix("v")
        epoch = int(_check(["git", "log", "-1", "--format=%ct", tag, "--"], cwd=repository))
        made = Path(temporary) / f"fedveil-{version}"
        made.mkdir()
        recipe = {f"fedveil-{version}/{name}": tree / name for name in list_recipe_files(tree)}
        pack_files(recipe, made / f"fedveil-{version}-image.tar.gz", epoch)
        build_distributions(tree, made, epoch)
        wheel = made / f"fedveil-{version}-py3-none-any.whl"
        without = ["test", "tools", "sbom", "docs", "check"]
        _check(
            [str(sbom_python), str(tree / "tools" / "sbom.py"), "--python", sys.executable, "--without", *without,
             "--wheel", str(wheel), "--out", str(made / f"fedveil-{version}.cdx.json")]
        )  # fmt: skip
        (made / "NOTES.md").write_text(extract_notes((tree / "CHANGELOG.md").read_text(), version))
        sign_checksums(write_checksums(made), key)
        into.mkdir(parents=True, exist_ok=True)
        target = into / made.name
        if target.exists():
            shutil.rmtree(target)
        shutil.copytree(made, target)
    return target


def main(arguments: Iterable[str] | None = None) -> None:
    """Build the release named on the command line."""
    parser = argparse.ArgumentParser(description="Build a release from a tag.")
    parser.add_argument("tag", help="the tag, such as v0.2.0")
    parser.add_argument("--key", required=True, type=Path, help="an Ed25519 private key from ssh-keygen")
    parser.add_argument(
        "--sbom-python", required=True, type=Path, help="a Python interpreter with lock/sbom.txt installed"
    )
    parser.add_argument("--into", type=Path, default=ROOT / "dist" / "release")
    args = parser.parse_args(None if arguments is None else list(arguments))
    folder = make_release(args.tag, args.key.expanduser(), args.sbom_python.absolute(), args.into)
    for path in sorted(folder.iterdir()):
        print(f"{path.stat().st_size:>12,}  {path.name}")
    print(folder)


def _extract_tag(repository: Path, tag: str, tree: Path) -> None:
    """Extract a tag's files to a new folder."""
    _check(
        ["git", "rev-parse", "--verify", "--quiet", f"refs/tags/{tag}^{{commit}}"],
        cwd=repository,
        what=f"tag: {tag} not found",
    )
    tree.mkdir()
    packed = subprocess.run(
        ["git", "archive", "--format=tar", f"refs/tags/{tag}"], cwd=repository, stdout=subprocess.PIPE, check=True
    )
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as tar:
        tar.extractall(tree, filter="data")


def _check(command: list[str], cwd: Path | None = None, env: Mapping[str, str] | None = None, what: str = "") -> str:
    """Return a command's output. Raises SystemExit with `what`, or the command's message, if it fails."""
    # A wheel records its files' modes, which must not depend on the builder's umask.
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, umask=0o022)
    if done.returncode:
        raise SystemExit(f"error: {what or f'{command[0]}: ' + (done.stderr or done.stdout)[-2000:].strip()}")
    return done.stdout


def _first_group(pattern: str, text: str) -> str:
    """Return the first group of a pattern's first match in a text, or "nothing"."""
    match = re.search(pattern, text, re.MULTILINE)
    return match[1] if match else "nothing"


if __name__ == "__main__":
    main()
