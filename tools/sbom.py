"""List the components of an installation, with licenses and the lock's hashes: CycloneDX 1.6, as JSON.

    make sbom                                                        # for the wheel, into dist/
    python tools/sbom.py --python VENV/bin/python --out FILE         # for that installation, as in the image

It runs in a separate environment, with lock/sbom.txt installed. cyclonedx-py reads the installation; this script adds
the hashes and refuses packages that are not in any file in lock/. Equal installations give equal bytes. Components
other than Python packages, such as an image's Debian packages, are not included.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_BLOCK = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)([^\\\n]*(?:\\\n[^\\\n]*)*)", re.MULTILINE)
_BUILDS = re.compile(r"\+.*")  # torch's CPU build is in the lock under torch's own version


def canonical(name: str) -> str:
    """Return a package's name in the normalized form that package indexes use."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(folder: Path, *, without: list[str], line: str = "") -> tuple[dict[str, tuple[str, list[str]]], set[str]]:
    """Return (version, SHA-256 of its files) by package, and the packages that only the files `without` contain.

    `line`: a file with replacement versions, such as "flower-1.41" (tools/lock.py).
    """
    packages: dict[str, tuple[str, list[str]]] = {}
    remaining_names = set()
    for file in sorted(file for file in folder.glob("*.txt") if not file.stem.startswith("flower-")):
        for name, version, rest in _BLOCK.findall(file.read_text()):
            files = {*packages.get(canonical(name), ("", []))[1], *re.findall(r"sha256:([0-9a-f]{64})", rest)}
            packages[canonical(name)] = (_BUILDS.sub("", version), sorted(files))
            if file.stem not in without:
                remaining_names.add(canonical(name))
    if line:
        for name, version, rest in _BLOCK.findall((folder / f"{line}.txt").read_text()):
            packages[canonical(name)] = (version, sorted(re.findall(r"sha256:([0-9a-f]{64})", rest)))
    return packages, set(packages) - remaining_names


def completed(bom: dict[str, Any], lock: dict[str, tuple[str, list[str]]], left_out: set[str]) -> dict[str, Any]:
    """Return `bom` without `left_out` and with hashes. Raises SystemExit for a package that is not in the lock."""
    components = []
    for component in bom["components"]:
        name, version = canonical(component["name"]), component["version"]
        # pip comes from ensurepip, and nothing imports it; `make bench` installs the benchmarks next to the wheel.
        if name in left_out or name in {"pip", "fedveil-bench"}:
            continue
        if name not in lock or lock[name][0] != _BUILDS.sub("", version):
            there = f"{name} {lock[name][0]}" if name in lock else "none of that name"
            raise SystemExit(
                f"sbom: expected {name} {version} in lock/*.txt, found {there}; install what the lock says"
            )
        files = {
            "type": "distribution", "url": f"https://pypi.org/project/{name}/{lock[name][0]}/",
            "comment": "every file that the lock admits",
            "hashes": [{"alg": "SHA-256", "content": digest} for digest in lock[name][1]],
        }  # fmt: skip
        components.append({**component, "externalReferences": [*component.get("externalReferences", []), files]})
    refs = {component["bom-ref"] for component in components} | {bom["metadata"]["component"]["bom-ref"]}
    links = [
        {**link, **({"dependsOn": [ref for ref in link["dependsOn"] if ref in refs]} if "dependsOn" in link else {})}
        for link in bom["dependencies"]
        if link["ref"] in refs
    ]
    return {**bom, "components": components, "dependencies": links}


def main() -> None:
    """Write the component list."""
    parser = argparse.ArgumentParser(description="List the components of an installation.")
    parser.add_argument("--python", required=True, help="the installation's Python interpreter")
    parser.add_argument(
        "--without", nargs="*", default=[], metavar="NAME", help="leave out packages that only lock/NAME.txt has"
    )
    parser.add_argument(
        "--line", default="", metavar="NAME", help="lock/NAME.txt was installed to replace some versions"
    )
    parser.add_argument("--wheel", type=Path, help="FedVeil's wheel, for its hash")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tool = [
        sys.executable,
        "-m",
        "cyclonedx_py",
        "environment",
        args.python,
        "--pyproject",
        str(ROOT / "pyproject.toml"),
    ]
    flags = ["--mc-type", "application", "--sv", "1.6", "--of", "JSON", "--output-reproducible", "-o", "-"]
    # The builder's PYTHONPATH would add packages that the installation does not have.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*tool, *flags], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"sbom: cyclonedx-py failed: {done.stderr.strip()}")
    bom = completed(json.loads(done.stdout), *locked(ROOT / "lock", without=args.without, line=args.line))
    about = bom["metadata"]["component"]
    about["purl"] = f"pkg:pypi/{about['name']}@{about['version']}"
    if args.wheel:
        about["hashes"] = [{"alg": "SHA-256", "content": hashlib.sha256(args.wheel.read_bytes()).hexdigest()}]
    text = json.dumps(bom, indent=1, sort_keys=True) + "\n"
    valid(text)
    args.out.write_text(text)
    print(f"{args.out}: {len(bom['components'])} components")


def valid(text: str) -> None:
    """Raise SystemExit if the text is not CycloneDX 1.6."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if error:
        raise SystemExit(f"sbom: expected CycloneDX 1.6, found {error}")


if __name__ == "__main__":
    main()
