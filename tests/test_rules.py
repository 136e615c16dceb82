"""Rules of the house that no linter knows."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from collections import Counter

import pytest
import torch
from beartype.roar import BeartypeCallHintParamViolation
from jaxtyping import TypeCheckError

from fedveil import paths
from fedveil.console.flower.app_bundle import own_app
from fedveil.contract.param_spec import param_specs_of
from fedveil.ops import masked_weights
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


@pytest.mark.long
def test_training_imports_no_metrics_and_no_plots():
    assert not modules_after("import fedveil.client_app.client_round, fedveil.tasks.text_generation") & {
        "nltk",
        "matplotlib",
        "sacrebleu",
    }


@pytest.mark.long
def test_what_claims_alone_need_is_imported_for_no_other_run():
    """dp-accounting brings scipy's statistics: 1.5 s of a core and 70 MB, in every server and every worker."""
    code = (
        "import fedveil.server_app.flower_strategy, fedveil.server_app.completion, fedveil.client_app.client_round; "
        "from fedveil import strategies; [strategies.load_method(name) for name in strategies.list_methods()]; "
        "from fedveil.privacy import gdp, guarantee_source, ledger, server_side_bound"
    )
    assert not modules_after(code) & {"dp_accounting", "scipy"}


@pytest.mark.long
def test_the_bundle_holds_what_the_apps_import(tmp_path):
    """The app runs from Flower's bundle alone: its own files and nothing of console, attacks or benchmarks."""
    own_app(tmp_path / "app")
    app, installed = str(tmp_path / "app"), [p for p in sys.path if "site-packages" in p]
    code = (
        f"import sys; sys.path[:0] = [{app!r}]; sys.path += {installed!r}; import server_app.app, client_app.app; "
        "import fedveil.server_app.flower_strategy, fedveil.client_app.client_round; from fedveil import strategies; "
        "print(*strategies.list_methods(), fedveil.__path__, strategies.__file__)"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "fedrand" in done.stdout
    assert done.stdout.count(app) == 3  # nothing came from this checkout


def test_the_app_is_the_same_from_a_checkout_and_from_a_wheel(tmp_path):
    """A wheel has the rooms inside the package."""
    for name, source in paths.app_sources().items():
        room, _, rest = name.partition("/")
        target = tmp_path / "fedveil" / (rest if room == "fedveil" else name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    (tmp_path / "fedveil" / "console").mkdir()
    (tmp_path / "fedveil" / "console" / "main.py").write_text("")
    wheel = {name: file.read_bytes() for name, file in paths.app_sources(tmp_path).items()}
    assert wheel == {name: file.read_bytes() for name, file in paths.app_sources().items()}


def test_the_bundle_of_flower_has_the_files_of_places():
    """`flwr build` and `fedveil submit` send the same app: fab-include names what `places.app_sources` finds."""
    app = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    patterns = [*(f"{name}/**/*.py" for name in paths.APP_LINKS), "fedveil/*.py"]
    assert sorted(app["fab-include"]) == sorted(
        [*patterns, *(f"fedveil/{name}/**/*.py" for name in paths.APP_PACKAGES)]
    )
    packages = {file.parent.name for file in (ROOT / "fedveil").glob("*/__init__.py") if not file.parent.is_symlink()}
    beside = {"console", "guard", "local", "relay", "runs", "sweep", "testing"}  # which run beside an app
    assert packages - set(paths.APP_PACKAGES) == beside
    named = {file.relative_to(ROOT).as_posix() for pattern in app["fab-include"] for file in ROOT.glob(pattern)}
    assert set(paths.app_sources()) == named


def test_the_links_of_the_package_are_the_folders_at_the_top():
    links = {file.name for file in (ROOT / "fedveil").iterdir() if file.is_symlink()}
    assert links == {*paths.LINKS, "demo_data"}
    assert all((ROOT / "fedveil" / name / "__init__.py").samefile(ROOT / name / "__init__.py") for name in paths.LINKS)
    assert (ROOT / "fedveil" / "demo_data").samefile(ROOT / "data")
    beside = list((ROOT / "fedveil" / "checkout").iterdir())
    assert {file.name for file in beside if file.is_symlink()} == {file.name for file in beside}
    assert all(file.samefile(ROOT / file.name) for file in beside)


@pytest.mark.long  # it imports all packages
def test_a_walk_through_the_package_ends_and_finds_no_file_twice():
    """Every module that Python can find below `fedveil`; a second name for a file would make a second copy of it."""
    code = (
        "import fedveil, pkgutil, os.path, json\n"
        "found = pkgutil.walk_packages(fedveil.__path__, 'fedveil.', onerror=lambda name: None)\n"
        "print(json.dumps([[m.name, os.path.realpath(m.module_finder.find_spec(m.name).origin)] for m in found]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )  # a link to a folder above itself would make a walk without an end
    module_files = json.loads(done.stdout)
    assert Counter(file for _, file in module_files).most_common(1)[0][1] == 1
    assert {name for name, _ in module_files if "stock_" not in name} == _modules_of_git()


def _modules_of_git() -> set[str]:
    """The modules below fedveil by the files that git has or would take."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "*.py"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    names = {
        file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for file in files
        if (ROOT / file).is_file()
    }
    inside = {name for name in names if name.partition(".")[0] in (*paths.LINKS, "fedveil")} - {"fedveil"}
    return {f"fedveil.{name.removeprefix('fedveil.')}" for name in inside if "stock_" not in name}


@pytest.mark.long
def test_no_file_imports_a_room_by_its_bare_name():
    """A bare `import strategies` makes a second copy of every class. Flower alone names its two apps so."""
    rooms = ("attacks", "client_app", "console", "guard", "relay", "server_app", "strategies")
    bare_imports = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for room in (*paths.LINKS, "fedveil", "benchmarks", "tools", "tests")
        for file in (ROOT / room).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        for name in _imported(node)
        if name.partition(".")[0] in rooms or name.startswith("benchmarks.fedveil_bench")
    ]
    assert bare_imports == []


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []


def test_nothing_but_paths_guesses_a_folder_from_its_file():
    guessing = [
        str(file.relative_to(ROOT))
        for room in (*paths.LINKS, "fedveil", "benchmarks/fedveil_bench")
        for file in (ROOT / room).rglob("*.py")
        if "stock_" not in str(file) and "__file__" in file.read_text()
    ]
    assert sorted(guessing) == ["fedveil/__init__.py", "fedveil/paths.py"]


def test_annotations_are_enforced_in_tests():
    """A mask of floats, a vector of two axes, and a spec that is a number: each in a room of its own."""
    with pytest.raises(TypeCheckError):
        masked_weights.pack_columns(torch.zeros(2, 3), torch.zeros(3), 1)
    with pytest.raises(TypeCheckError):
        masked_weights.broadcast_along(torch.zeros(2, 3), 0, 2)
    with pytest.raises(BeartypeCallHintParamViolation):
        param_specs_of(3)
    with pytest.raises(BeartypeCallHintParamViolation):
        FedAvg().layout(3)


def test_tests_mirror_the_rooms():
    """Beside the rooms' own: the contract suite, deployments, attacks on this project, and benchmarks/check."""
    of_their_own = {".", "attacks_on_us", "check", "contract", "deployment"}
    for tests, code in ((ROOT / "tests", ROOT), (ROOT / "benchmarks" / "tests", ROOT / "benchmarks" / "fedveil_bench")):
        folders = {p.parent.relative_to(tests).as_posix() for p in tests.rglob("test_*.py")}
        assert {f for f in folders - of_their_own if not (code / f).is_dir()} == set()


@pytest.mark.long
def test_tests_of_fedveil_need_no_benchmarks():
    """`make test` runs them where fedveil-bench is not installed."""
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for room in ("tests", "tools")
        for file in (ROOT / room).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        for name in _imported(node)
        if name.partition(".")[0] in ("benchmarks", "fedveil_bench")
    ]
    assert found == []
