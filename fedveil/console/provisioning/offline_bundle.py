"""An offline bundle: a folder with checksums that a person carries to a site without network access.

    wheels/            FedVeil and all its dependencies
    images/            container images, as files
    requirements.txt   every wheel's name, version and SHA-256, for pip install --require-hashes
    constraints.txt    the versions of all packages
    INSTALL.md         instructions for the site; the first line names the version that made the bundle
    SHA256SUMS         every other file with its SHA-256, in the format of sha256sum -c

The site compares the SHA-256 of SHA256SUMS with the maker by phone, checks the list with `sha256sum -c`, and only
then installs. No program from the bundle takes part in that check: a changed wheel could contain a `fedveil bundle
verify` that always passes. pip then installs only the wheels listed in requirements.txt.
(The bundle that Flower sends to sites is different: see fedveil/console/flower/app_bundle.py.)
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from fedveil import __version__, paths
from fedveil.console.flower.processes import ProcessGroup
from fedveil.errors import ConfigError, StateError

SUMS = "SHA256SUMS"
REQUIREMENTS = "requirements.txt"
_COLLECT_SECONDS = 3600.0
_LINE = re.compile(r"([0-9a-f]{64})  (\S.*)")
_WHEEL = re.compile(r"([\w.]+)-([\w.+!]+)(?:-\d[\w.]*)?(?:-[\w.]+){3}\.whl", re.ASCII)
_INSTALL = """\
# FedVeil {version} without a network

For Python {python} on {machine}. The commands below need no network. Run them in this folder, in this order.

1. Call the person who made this folder and ask for the SHA-256 of SHA256SUMS. Compare it with what this prints:

    sha256sum SHA256SUMS

2. Check every file. Stop if this prints anything:

    sha256sum --quiet -c SHA256SUMS

3. With containers, load each image:

    docker load -i images/NAME.tar

4. Without containers, install on Python {python} of the same system:

    python3 -m venv ../fedveil-venv
    ../fedveil-venv/bin/pip install --require-hashes --no-deps --no-index --find-links wheels -r requirements.txt
    ../fedveil-venv/bin/fedveil bundle verify .       # also finds files that SHA256SUMS does not list

Step 2 must come before step 4, because a program installed from a changed wheel can also lie about the bundle.
"""


class OfflineBundle:
    """An offline bundle.

    Attributes:
        folder: its folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def make(
        cls, folder: Path, source: Path | None, images: Sequence[str], report: Callable[[str], None] = lambda text: None
    ) -> OfflineBundle:
        """Collect wheels and images in a new folder, all or nothing, without checksums yet.

        Args:
            source: a checkout from which to build FedVeil's wheel; None means this installation.
            images: names of container images in this machine's engine.
            report: called with each step, of which some take minutes.

        Raises:
            ConfigError: `source` is not a checkout.
            StateError: `folder` already exists.
            LaunchError: pip or the engine failed; the message includes the last lines of output.
        """
        for name in ("pyproject.toml", "constraints.txt", "lock/run.txt"):
            if source and not (source / name).is_file():
                raise ConfigError(f"--source: expected a checkout, found no {name} in {source}; name a checkout")
        if folder.exists():
            raise StateError(f"offline bundle: expected a folder that does not exist yet, found {folder}; name another")
        partial = folder.with_name(f".{folder.name}.part")
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "images").mkdir(parents=True)
        try:
            _collect(partial, source and source.absolute(), images, report)
            partial.replace(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return cls(folder)

    @property
    def sums(self) -> Path:
        """Return the path of SHA256SUMS."""
        return self.folder / SUMS

    def write_checksums(self) -> str:
        """Write requirements.txt and SHA256SUMS, and return a short summary.

        Raises StateError for an empty or missing folder, a link, or a name that `sha256sum` would escape.
        """
        if not self.folder.is_dir():
            raise StateError(
                f"offline bundle: expected a folder, found none at {self.folder}; collect wheels and images in one"
            )
        if wheels := sorted((self.folder / "wheels").glob("*.whl")):
            (self.folder / REQUIREMENTS).write_text("".join(_requirement(wheel) for wheel in wheels))
        sums = file_checksums(self.folder)
        if not sums:
            raise StateError(
                f"offline bundle: expected files in {self.folder}, found none; collect wheels and images in it"
            )
        self.sums.write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()))
        total = sum((self.folder / name).stat().st_size for name in sums)
        return (
            f"{self.sums}: {len(sums)} files, {total:,} bytes; SHA-256 {_sha256(self.sums)}\n"
            f"Read this SHA-256 to the site by phone; the site compares it before installing: {self.folder}/INSTALL.md"
        )

    def verify(self) -> str:
        """Compare the folder with SHA256SUMS and return a one-line summary. Raises StateError for any difference."""
        try:
            lines = self.sums.read_text().splitlines()
        except (OSError, ValueError) as error:
            raise StateError(
                f"{self.sums}: expected the list of checksums, found none ({type(error).__name__}); copy the folder "
                "again"
            ) from None
        expected = {match[2]: match[1] for line in lines if (match := _LINE.fullmatch(line))}
        if not lines or len(expected) != len(lines):
            raise StateError(
                f"{self.sums}: expected one line per file with a SHA-256 and a name, found other text; copy the "
                "folder again"
            )
        files = file_checksums(self.folder)
        for name in sorted(set(expected) | set(files)):
            if expected.get(name) != files.get(name):
                what = "missing" if name not in files else f"not in {SUMS}" if name not in expected else "changed"
                raise StateError(
                    f"{self.folder / name}: expected the file as {SUMS} lists it, found it {what}; copy the folder "
                    "again"
                )
        return f"{self.folder}: {len(files)} files, all unchanged; SHA-256 of {SUMS} {_sha256(self.sums)}"


def file_checksums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file under `folder` except SHA256SUMS, by relative path.

    Raises StateError for a link, or for a name that `sha256sum` would escape.
    """
    sums = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise StateError(f"{path}: expected files and folders, found a link; put the file itself there")
        if "\n" in name or "\r" in name or "\\" in name:
            raise StateError(f"{path!r}: expected a name without line breaks or backslashes; rename the file")
        if path.is_file() and name != SUMS:
            sums[name] = _sha256(path)
    return sums


def _requirement(wheel: Path) -> str:
    """Return a wheel's line for requirements.txt. Raises StateError if the file is not named like a wheel."""
    match = _WHEEL.fullmatch(wheel.name)
    if match is None:
        raise StateError(
            f"{wheel}: expected a wheel name, such as fedveil-0.2.0-py3-none-any.whl; remove or rename the file"
        )
    return f"{match[1]}=={match[2]} --hash=sha256:{_sha256(wheel)}\n"


def _collect(folder: Path, source: Path | None, images: Sequence[str], report: Callable[[str], None]) -> None:
    """Fill the folder with everything but the checksums."""
    processes = ProcessGroup(folder)
    constraints = source / "constraints.txt" if source else paths.find_file("constraints.txt")
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", str(folder / "wheels"), "--no-deps"]
    wheel += ["--no-build-isolation"]  # otherwise pip would fetch build dependencies of any version
    locked, device = [*wheel, "--require-hashes"], "cpu" if version("torch").endswith("+cpu") else "cuda"
    index = os.environ.get("TORCH_INDEX") if device == "cpu" else None
    with tempfile.TemporaryDirectory(prefix="fedveil-bundle-") as clean:
        # Copy the source, because a checkout's build/ may contain deleted modules, which would end up in the wheel.
        copy = paths.copy_checkout(Path(clean) / "source", source)
        lock = copy / "lock"
        torch = [*(["--index-url", index] if index else []), "-r", str(lock / f"{device}.txt")]
        steps = {
            "torch": [*locked, *torch], "other packages": [*locked, "-r", str(lock / "run.txt")],
            "FedVeil": [*wheel, "--no-index", str(copy)],
        }  # fmt: skip
        count = len(steps) + len(images)
        for number, (name, command) in enumerate(steps.items(), 1):
            report(f"{number} of {count}: collecting {name}; this may take minutes")
            processes.call("wheels", command, os.environ, _COLLECT_SECONDS)
    for number, image in enumerate(images, len(steps) + 1):
        report(f"{number} of {count}: saving the image {image}; this may take minutes")
        file = folder / "images" / f"{image.replace('/', '_').replace(':', '-')}.tar"
        processes.call("image", ["docker", "save", "-o", str(file), image], os.environ, _COLLECT_SECONDS)
    shutil.copy(constraints, folder)
    python = ".".join(platform.python_version_tuple()[:2])
    text = _INSTALL.format(version=__version__, python=python, machine=platform.machine())
    (folder / "INSTALL.md").write_text(text)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
