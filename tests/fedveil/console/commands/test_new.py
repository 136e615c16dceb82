"""`fedveil new`: what it writes is what docs/extend shows, and runs as it is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fedveil import config
from fedveil.console.commands.getting_started.new import study_files
from fedveil.console.main import main
from fedveil.errors import ConfigError
from tests.conftest import ROOT


def shown(page: str) -> dict[str, str]:
    """The files that a page of docs/extend shows, by name."""
    text = (ROOT / "docs" / "extend" / f"{page}.md").read_text()
    found = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return {re.match(r"# (\w+\.py)\n", code)[1]: code for code in found}


def install(folder: Path) -> None:
    """Leave the entry points as pip does."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    about = folder / f"{project['name']}-{project['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1.0\n")
    groups = project["entry-points"].items()
    lines = (f"[{group}]\n" + "".join(f"{name} = {module}\n" for name, module in of.items()) for group, of in groups)
    (about / "entry_points.txt").write_text("".join(lines))


@pytest.mark.parametrize("page", ["method", "task"])
def test_method_and_task_are_those_of_the_pages(page):
    files = study_files("my-study")
    for name, code in shown(page).items():
        folder = "tests" if name.startswith("test_") else "my_study"
        assert files[f"{folder}/{name}"].replace("from my_study.", "from ") == code


def test_every_file_is_written_and_parses(tmp_path, capsys):
    folder = tmp_path / "my-study"
    assert main(["new", str(folder)]) == 0
    assert f"Wrote {len(study_files('my-study'))} files to {folder}" in capsys.readouterr().out.replace("\n", "")
    assert {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} == set(
        study_files("my-study")
    )
    for name, text in study_files("my-study").items():
        assert "{{" not in text, name
        if name.endswith(".py"):
            compile(text, name, "exec")
    tomllib.loads((folder / "pyproject.toml").read_text())


def test_the_rows_are_drawn_from_the_places_of_the_largest_sign():
    files = study_files("a")
    rows = [json.loads(line) for line in files["data/north/train.jsonl"].splitlines()]
    assert len(rows) == 120
    assert all(row["ward"] == max(range(3), key=lambda i: row["signs"][i]) for row in rows)
    assert {row["ward"] for row in rows} == {0, 1, 2}
    assert files["data/north/train.jsonl"] != files["data/south/train.jsonl"]


@pytest.mark.parametrize(
    "name",
    [
        "My-study",
        "1st",
        "a b",
        "a--b",
        "-a",
        "a-",
        "a" * 41,
        "",
        "..",
        "a.b",
        "é",
        "json",
        "fedveil",
        "tests",
        "numpy",
        "class",
        'a"b',
    ],
)
def test_a_name_that_no_package_can_have_is_refused(name):
    with pytest.raises(ConfigError, match="FOLDER: expected a name"):
        study_files(name)


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_what_is_there_stays(tmp_path, capsys, kind):
    there = tmp_path / "study"
    {"folder": there.mkdir, "file": there.touch, "dangling link": lambda: there.symlink_to("nowhere")}[kind]()
    before = list(tmp_path.rglob("*"))
    assert main(["new", str(there)]) == 2
    assert "expected a new folder, found one at" in capsys.readouterr().err
    assert list(tmp_path.rglob("*")) == before


def test_the_run_configs_have_no_unknown_key():
    for name in ("run.toml", "task.toml"):
        flat = tomllib.loads(study_files("my-study")[name])
        known = config.RunConfig().flat()
        assert {f"{section}.{key}" for section, keys in flat.items() for key in keys} <= set(known)


@pytest.mark.long
def test_what_is_written_runs_and_passes_its_own_tests(tmp_path):
    folder = tmp_path / "my-study"
    assert main(["new", str(folder)]) == 0
    install(folder)
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "PYTEST_ADDOPTS": ""}

    def python(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    assert re.search(r"^1\d passed", python("-m", "pytest", "-q", "-p", "no:cacheprovider"), re.MULTILINE)
    before, after = re.findall(r"'accuracy': ([\d.]+)", python("train.py", "run.toml"))
    assert float(before) < 0.6 < 0.8 < float(after)
