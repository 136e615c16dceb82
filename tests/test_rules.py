"""Rules of the house that no linter knows."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter

import pytest
import torch
from beartype.roar import BeartypeCallHintParamViolation
from jaxtyping import TypeCheckError

from fedveil import places
from fedveil.algebra import columns
from fedveil.console.flower.bundle import own_app
from fedveil.contract.spec import spec_of
from fedveil.strategies.fedavg import FedAvg
from tests.conftest import ROOT

HEAVY = {"torch", "transformers", "peft", "datasets", "nltk", "matplotlib"}


def modules_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; print(*sorted(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return {name.split(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize(
    "code",
    [
        "import fedveil.server_app.app",
        "import fedveil.client_app.app",
        "import fedveil.console.main",
        "import fedveil.config",
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(code):
    assert not modules_after(code) & HEAVY


def test_training_imports_no_metrics_and_no_plots():
    assert not modules_after("import fedveil.client_app.turn, fedveil.tasks.text_generation") & {
        "nltk",
        "matplotlib",
        "sacrebleu",
    }


def test_what_claims_alone_need_is_imported_for_no_other_run():
    """dp-accounting brings scipy's statistics: 1.5 s of a core and 70 MB, in every server and every worker."""
    code = (
        "import fedveil.server_app.strategy, fedveil.server_app.ending, fedveil.client_app.turn; "
        "from fedveil import strategies; [strategies.load(name) for name in strategies.names()]; "
        "from fedveil.privacy import claims, from_reports, gaussian, ledger"
    )
    assert not modules_after(code) & {"dp_accounting", "scipy"}


def test_the_bundle_holds_what_the_apps_import(tmp_path):
    """The app runs from Flower's bundle alone: its own files and nothing of console, attacks or benchmarks."""
    own_app(tmp_path / "app")
    app, installed = str(tmp_path / "app"), [p for p in sys.path if "site-packages" in p]
    code = (
        f"import sys; sys.path[:0] = [{app!r}]; sys.path += {installed!r}; import server_app.app, client_app.app; "
        "import fedveil.server_app.strategy, fedveil.client_app.turn; from fedveil import strategies; "
        "print(*strategies.names(), fedveil.__path__, strategies.__file__)"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "fedrand" in done.stdout
    assert done.stdout.count(app) == 3  # nothing came from this checkout


def test_the_app_is_the_same_from_a_checkout_and_from_a_wheel(tmp_path):
    """A wheel has the rooms inside the package."""
    for name, source in places.app_sources().items():
        room, _, rest = name.partition("/")
        target = tmp_path / "fedveil" / (rest if room == "fedveil" else name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    (tmp_path / "fedveil" / "console").mkdir()
    (tmp_path / "fedveil" / "console" / "main.py").write_text("")
    wheel = {name: file.read_bytes() for name, file in places.app_sources(tmp_path).items()}
    assert wheel == {name: file.read_bytes() for name, file in places.app_sources().items()}


def test_no_file_imports_a_room_by_its_bare_name():
    """A bare `import strategies` makes a second copy of every class. Flower alone names its two apps so."""
    rooms = ("attacks", "benchmarks", "client_app", "console", "guard", "server_app", "strategies")
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for room in (*rooms, "fedveil", "tools", "tests")
        for file in (ROOT / room).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        for name in _imported(node)
        if name.partition(".")[0] in rooms
    ]
    assert found == []


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []


def test_nothing_but_places_guesses_a_folder_from_its_file():
    guessing = [
        str(file.relative_to(ROOT))
        for room in ("attacks", "benchmarks", "client_app", "console", "guard", "server_app", "strategies", "fedveil")
        for file in (ROOT / room).rglob("*.py")
        if "__file__" in file.read_text()
    ]
    assert guessing == ["fedveil/__init__.py", "fedveil/places.py"]


def test_annotations_are_enforced_in_tests():
    """A mask of floats, a vector of two axes, and a spec that is a number: each in a room of its own."""
    with pytest.raises(TypeCheckError):
        columns.pack(torch.zeros(2, 3), torch.zeros(3), 1)
    with pytest.raises(TypeCheckError):
        columns.along(torch.zeros(2, 3), 0, 2)
    with pytest.raises(BeartypeCallHintParamViolation):
        spec_of(3)
    with pytest.raises(BeartypeCallHintParamViolation):
        FedAvg().layout(3)


ROOMS = ("attacks", "benchmarks", "client_app", "console", "fedveil", "guard", "server_app", "strategies", "tools")
SOURCES = [file for room in ROOMS for file in (ROOT / room).rglob("*.py")]


def test_no_room_has_more_than_fifteen_files_side_by_side():
    """A room that needs more has two subjects. `strategies` too is below it today; there a file is a method."""
    counts = Counter(file.parent.relative_to(ROOT).as_posix() for file in SOURCES if file.name != "__init__.py")
    del counts["strategies"]
    assert {room: count for room, count in counts.items() if count > 15} == {}


def test_no_file_is_longer_than_300_lines_and_no_function_than_60():
    long = []
    for file in SOURCES:
        text, name = file.read_text(), file.relative_to(ROOT).as_posix()
        if (lines := text.count("\n")) > 300:
            long.append(f"{name}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and (lines := (node.end_lineno or 0) - node.lineno + 1) > 60:
                long.append(f"{name}: {node.name} has {lines} lines")
    assert long == []


def test_tests_mirror_the_rooms():
    """Beside the rooms' own: the contract suite, live deployments, attacks on this project itself."""
    folders = {p.parent.relative_to(ROOT / "tests").as_posix() for p in (ROOT / "tests").rglob("test_*.py")}
    of_their_own = {".", "attacks_on_us", "contract", "deployment"}
    assert {f for f in folders - of_their_own if not (ROOT / f).is_dir()} == set()
