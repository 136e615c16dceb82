"""The wheel: what is in it, and that it does everything without a checkout, from any folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedveil import paths
from fedveil.console.main import list_commands
from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Flower's programs with the fresh environment's own Python in their first line.
PROGRAMS = """
import importlib.metadata, pathlib, sys
for entry in importlib.metadata.distribution("flwr").entry_points.select(group="console_scripts"):
    script = pathlib.Path(sys.executable).parent / entry.name
    call = f"from {entry.module} import {entry.attr}\\nsys.exit({entry.attr}())"
    script.write_text(f"#!{sys.executable}\\nimport sys\\n{call}\\n")
    script.chmod(0o755)
"""
LEAST = 'name = "pilot"\nserver = ["localhost"]\nsites = ["north", "south"]\n'
# Imports every command.
EVERY_HELP = """
import contextlib, io
from fedveil.console import main
for name in main.list_commands():
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as said:
        main.main([name, "--help"])
    assert said.getvalue().startswith(f"usage: fedveil {name}"), name
    print(name)
"""


def test_what_a_wheel_is_built_from_has_every_package_and_nothing_else_that_lies_about(tmp_path):
    own = ("pyproject.toml", "strategies/a.py", "fedveil/console/runs/b.py")
    for name in (*own, "runs/c", ".git/d", "fedveil/__pycache__/e"):
        (tmp_path / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "checkout" / name).touch()
    copy = paths.copy_checkout(tmp_path / "copy", tmp_path / "checkout")
    files = sorted(path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file())
    assert files == sorted(own)


@dataclass(frozen=True)
class Installed:
    """A fresh environment with the wheel, whose other packages are those of this one."""

    wheel: Path
    bin: Path
    empty: Path

    def __call__(self, *command: str, timeout: float = 120.0) -> str:
        """What a program of the environment prints, called from an empty folder."""
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]], cwd=self.empty, env=env, capture_output=True, text=True,
            timeout=timeout, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout[-1500:]}{done.stderr[-3000:]}"
        return done.stdout


def pip(*arguments: str) -> None:
    """Run pip; a distribution that PYTHONPATH shows is not taken for one that is installed already."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *arguments], env=env, check=True)


def built(source: Path, into: Path) -> Path:
    """The wheel of a source folder; setuptools is this environment's, nothing is fetched."""
    pip("wheel", "--no-index", "--no-build-isolation", "--no-deps", "-w", str(into), str(source))
    (wheel,) = into.glob("*.whl")
    return wheel


def content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    wheel = built(paths.copy_checkout(folder / "source", ROOT), folder / "dist")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    pip("--python", str(folder / "venv" / "bin" / "python"), "install", "--no-index", "--no-deps", str(wheel))
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # Links to the packages alone: no .pth file is read, such as an editable installation's, and fedveil-bench, which
    # may be installed there, is out of reach.
    (others := folder / "others").mkdir()
    for file in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not file.name.startswith(("fedveil", "__editable__")):
            (others / file.name).symlink_to(file)
    (packages / "others.pth").write_text(f"{others}\n")
    (folder / "empty").mkdir()
    made = Installed(wheel, folder / "venv" / "bin", folder / "empty")
    made("python", "-c", PROGRAMS)
    assert made("python", "-c", "import fedveil; print(*fedveil.__path__)").split() == [str(packages / "fedveil")]
    return made


@pytest.mark.slow
def test_it_has_one_top_level_name_and_the_licence_of_everything_in_it(installed):
    record = next(name for name in zipfile.ZipFile(installed.wheel).namelist() if name.endswith(".dist-info/RECORD"))
    info = record.partition("/")[0]
    names = {line.partition(",")[0] for line in zipfile.ZipFile(installed.wheel).read(record).decode().splitlines()}
    assert {name.partition("/")[0] for name in names} == {"fedveil", info}
    licences = {name.removeprefix(f"{info}/licenses/") for name in names if name.startswith(f"{info}/licenses/")}
    bases = {f"fedveil/assets/{base.name}/README.md" for base in (ROOT / "fedveil" / "assets").iterdir()}
    assert licences == {"LICENSE", "data/e2e/LICENSE", "data/e2e/README.md", *bases}
    assert all("CC BY" in (ROOT / name).read_text() for name in licences - {"LICENSE"})
    assert "fedveil/py.typed" in names


@pytest.mark.slow
def test_it_has_every_module_that_git_has_and_every_file_of_the_checkout_once(installed):
    """setuptools follows the links of the package: a wheel has files in their place."""
    command = ["git", "ls-files", "*.py", "data/*"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    tops = {name: f"fedveil/{name}" for name in paths.LINKS} | {"fedveil": "fedveil", "data": "fedveil/demo_data"}
    inside = {f"{tops[top]}/{rest}" for top, _, rest in (file.partition("/") for file in files) if top in tops}
    names = set(zipfile.ZipFile(installed.wheel).namelist())
    assert inside - names == set()
    python = {name for name in names if name.endswith(".py")}
    assert python - inside == set()
    assert {"pyproject.toml", "LICENSE", "lock"} == {"pyproject.toml", "LICENSE", "lock"} & {
        name.split("/")[2] for name in names if name.startswith("fedveil/checkout/")
    }


@pytest.mark.slow
def test_a_wheel_of_an_installed_wheel_is_the_same(installed):
    """`fedveil bundle make` builds one from what is installed."""
    code = "from pathlib import Path; from fedveil import paths; paths.copy_checkout(Path('source'))"
    installed("python", "-c", code)
    again = content(built(installed.empty / "source", installed.empty / "dist"))
    assert again == content(installed.wheel)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_command_that_needs_no_server_works_from_an_empty_folder(installed):
    assert installed("fedveil", "--version") == f"fedveil {PROJECT['project']['version']}\n"
    assert "  demo " in installed("fedveil", "--help")
    own = {name for name, command in list_commands().items() if command.module.startswith("fedveil.")}
    assert "relay" in own
    assert set(installed("python", "-c", EVERY_HELP).split()) == own
    assert "fedrand" in installed("fedveil", "methods")
    assert "fedrand " in installed("fedveil", "methods", "--table")  # a heading may be broken over lines
    assert "_fedveil" in installed("fedveil", "completion", "bash")
    (installed.empty / "federation.toml").write_text(LEAST)
    assert "2 kits in kits/" in installed("fedveil", "provision", "federation.toml")
    assert "This site would send, each time" in installed("fedveil", "explain", "--set", "method.name=fedrand")
    here = subprocess.run(
        [sys.executable, "-m", "fedveil.console.main", "app", "digest"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert installed("fedveil", "app", "digest") == here.stdout
    assert "figures: fedveil-bench is not installed" in installed("fedveil", "methods", "--table")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_runs_and_its_report_can_be_written_again(installed):
    output = installed("fedveil", "demo", "--methods", "fedavg,fedrand", "--rounds", "1", "--sites", "2", timeout=550)
    assert "Processes left: none" in output
    assert (installed.empty / "runs" / "demo" / "picture.svg").is_file()
    rows = json.loads((installed.empty / "runs" / "demo" / "summary.json").read_text())["rows"]
    assert [(row["name"], row["state"], row["rounds"]) for row in rows] == [
        ("fedavg", "completed", 1), ("fedrand", "completed", 1)
    ]  # fmt: skip
    assert installed("fedveil", "generate", "runs/demo/fedavg", "--prompt", "name : Blue Spice").strip()
    installed("fedveil", "report", "runs/demo/fedavg", "--out", "again.html")
    assert "What each side learned" in (installed.empty / "again.html").read_text()
