"""Write lock/*.txt: the versions in constraints.txt, with the hash of every file that an index may serve for them.

    make lock                       # after each change to constraints.txt or to the dependencies in pyproject.toml

| file | content |
|---|---|
| tools.txt | build and installation tools: pip, setuptools, build |
| cpu.txt | torch's CPU build, a separate version from torch's own index |
| cuda.txt | alternatively, PyPI's CUDA build with its additional requirements |
| run.txt | all other packages that FedVeil needs to run |
| EXTRA.txt | additional requirements of an extra in pyproject.toml |
| flower-VERSION.txt | replacements for run.txt from constraints-flower-VERSION.txt, installed after it |
| sbom.txt | tools that list the components, in a separate environment |
| check.txt | tools that find missing imports, in a separate environment: pyright, with its Node.js |
| docs.txt | tools that build the documentation site, in a separate environment |

Each file is installed with `pip install --require-hashes --no-deps`: pip resolves nothing, so it installs nothing else.
uv gets the hashes from PyPI. If torch's own index does not answer, and torch's version has not changed, cpu.txt keeps
its hashes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_PYTHON = "3.11"  # the oldest supported version; --universal adds markers for the others
_ALONE = {
    "tools": ("what builds and installs", "pip\nsetuptools\nbuild\n"),
    "check": ("what finds imports that no editor could, in an environment of its own", "basedpyright\n"),
    "docs": ("what makes the site of the documentation, in an environment of its own", "furo\nmyst-parser\nsphinx\n"),
    "sbom": ("what lists the components, in an environment of its own", "cyclonedx-bom\n"),
}
_CUDA = re.compile(r"nvidia-|cuda-|triton$")
_CPU_FILE = re.compile(r"torch-([^-]+)\+cpu-cp31[12]-cp31[12]-manylinux[^#\"]*\.whl#sha256=([0-9a-f]{64})")
_HEAD = "# Made by make lock, which says more: {what}\n"


def compiled(
    *source: str, hashes: bool = False, text: str = "", constraints: str = "constraints.txt"
) -> dict[str, str]:
    """Return uv's lines by package, sorted: "name==version ; marker", followed by hashes if requested."""
    uv = [str(Path(sys.executable).parent / "uv"), "pip", "compile", *source, "-c", constraints, "--universal"]
    flags = ["--python-version", _PYTHON, "--no-header", "--no-annotate", "--no-emit-index-url", "--quiet"]
    flags += ["--generate-hashes"] if hashes else []
    done = subprocess.run([*uv, *flags], cwd=ROOT, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"uv: {done.stderr.strip()}")
    blocks = re.split(r"^(?=[a-z0-9])", done.stdout, flags=re.MULTILINE)
    return {block.partition("==")[0]: block for block in blocks if block.strip()}


def in_place(pins: str, constraints: str) -> tuple[set[str], str]:
    """Return the packages that `pins` names, and `constraints` with its versions for them."""
    names = {canonical(line) for line in pins.splitlines() if "==" in line}
    other_lines = [line for line in constraints.splitlines() if "==" not in line or canonical(line) not in names]
    return names, "\n".join([*other_lines, *(line for line in pins.splitlines() if "==" in line)]) + "\n"


def canonical(pin: str) -> str:
    """Return the name in "Name_x==1" in uv's form."""
    return re.sub(r"[-_.]+", "-", pin.partition("==")[0].strip()).lower()


def of_line(pins: Path, run: dict[str, str]) -> dict[str, str]:
    """Return the blocks for another Flower release, by package; `run` has the blocks for constraints.txt.

    Exits unless `pins` lists exactly the packages whose versions that release changes.
    """
    names, text = in_place(pins.read_text(), (ROOT / "constraints.txt").read_text())
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(text)
        file.flush()
        blocks = compiled("pyproject.toml", hashes=True, constraints=file.name)
    differ = {name for name, block in blocks.items() if block.split()[0] != run.get(name, "").partition(" ")[0].strip()}
    if differ != names:
        raise SystemExit(f"{pins.name}: expected the packages that differ, {sorted(differ)}, found {sorted(names)}")
    return {name: blocks[name] for name in sorted(names)}


def cpu_hashes(page: str, version: str) -> list[str]:
    """Return the SHA-256 of torch's files for CPU, Linux and this project's Pythons, from torch's own index."""
    return sorted({match[2] for match in _CPU_FILE.finditer(page.replace("%2B", "+")) if match[1] == version})


def cpu_block(version: str, index: str, before: str) -> str:
    """Return the lines for torch's CPU build; `before` is the previous lock."""
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=30) as answer:
            hashes = cpu_hashes(answer.read().decode(), version)
    except OSError as error:
        if f"torch=={version}+cpu " not in before:
            raise SystemExit(
                f"torch: expected its index at {index} for the hashes of {version}, found {error}"
            ) from None
        hashes = re.findall(r"sha256:([0-9a-f]{64})", before)
        print(f"torch: {index} does not answer ({error}); cpu.txt keeps its {len(hashes)} hashes", file=sys.stderr)
    if not hashes:
        raise SystemExit(f"torch: expected files of {version}+cpu at {index}, found none")
    return " \\\n    --hash=sha256:".join([f"torch=={version}+cpu", *hashes]) + "\n"


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description="Write lock/*.txt.")
    parser.add_argument("--torch-index", default=os.environ.get("TORCH_INDEX") or TORCH_INDEX)
    index = parser.parse_args().torch_index
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    project, every = "pyproject.toml", [word for extra in extras for word in ("--extra", extra)]
    blocks = compiled(project, *every, hashes=True)
    alone_run = compiled(project)
    run = set(alone_run)
    cuda = {name for name in run if _CUDA.match(name)} | {"torch"}
    files = {
        "cuda": ("torch's build for CUDA, and what it needs besides run.txt", cuda),
        "run": ("what FedVeil runs with, besides cpu.txt or cuda.txt", run - cuda),
    }
    for extra in extras:
        more = set(compiled(project, "--extra", extra)) - run
        files[extra] = (f'what the extra "{extra}" needs besides run.txt', more)
    for name, (what, text) in _ALONE.items():
        alone = compiled("-", hashes=True, text=text)
        files[name], blocks = (what, set(alone)), alone | blocks
    for pins in sorted(ROOT.glob("constraints-flower-*.txt")):
        line = pins.stem.removeprefix("constraints-")
        text = "".join(of_line(pins, alone_run).values())
        (ROOT / "lock" / f"{line}.txt").write_text(_HEAD.format(what=f"{pins.name} in place of run.txt's") + text)
    for name, (what, packages) in files.items():
        text = "".join(blocks[package] for package in sorted(packages))
        (ROOT / "lock" / f"{name}.txt").write_text(_HEAD.format(what=what) + text)
    version, file = blocks["torch"].split()[0].removeprefix("torch=="), ROOT / "lock" / "cpu.txt"
    block = cpu_block(version, index, file.read_text() if file.exists() else "")
    file.write_text(_HEAD.format(what="torch's build for the CPU, of its own index") + block)


if __name__ == "__main__":
    main()
