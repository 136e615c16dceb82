"""Rules of the house that no linter knows."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
    "code", ["import server_app.app", "import client_app.app", "import console.main", "import fedveil.config"]
)
def test_nothing_heavy_is_imported_before_it_is_needed(code):
    assert not modules_after(code) & HEAVY


def test_training_imports_no_metrics_and_no_plots():
    assert not modules_after("import client_app.turn, fedveil.tasks.text_generation") & {
        "nltk",
        "matplotlib",
        "sacrebleu",
    }


def test_the_bundle_holds_what_the_apps_import(tmp_path):
    """The app runs from the Flower bundle alone: the four packages and nothing of console, attacks or benchmarks."""
    for package in ("fedveil", "strategies", "server_app", "client_app"):
        for path in (ROOT / package).rglob("*.py"):
            target = tmp_path / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    code = "import server_app.app, client_app.app, server_app.strategy, client_app.turn, strategies; print(strategies.names())"
    done = subprocess.run([sys.executable, "-S", "-c", f"import site, sys; sys.path[:0] = [{str(tmp_path)!r}]; sys.path += {[p for p in sys.path if 'site-packages' in p]!r}; {code}"], capture_output=True, text=True, cwd=tmp_path, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "fedrand" in done.stdout
