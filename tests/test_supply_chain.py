"""tools/lock.py and tools/sbom.py: what they make of an index's page and of a list of components."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import ModuleType

import pytest

from fedveil.guard import flower
from tests.conftest import ROOT


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LOCK, SBOM = tool("lock"), tool("sbom")


def test_of_torchs_own_index_only_this_version_for_linux_and_our_pythons_is_taken():
    def line(file: str, digit: str) -> str:
        return f'<a href="/whl/cpu/{file}#sha256={digit * 64}" data-x="1">{file}</a><br/>\n'

    page = (
        line("torch-2.13.0%2Bcpu-cp312-cp312-manylinux_2_28_x86_64.whl", "2")
        + line("torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_aarch64.whl", "1")
        + line("torch-2.13.0%2Bcpu-cp311-cp311-win_amd64.whl", "3")
        + line("torch-2.13.0%2Bcpu-cp313-cp313-manylinux_2_28_x86_64.whl", "4")
        + line("torch-2.13.1%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl", "5")
        + line("torch-2.13.0%2Bcu130-cp311-cp311-manylinux_2_28_x86_64.whl", "6")
    )
    assert LOCK.cpu_hashes(page, "2.13.0") == ["1" * 64, "2" * 64]


def test_where_torchs_index_does_not_answer_its_hashes_stay_for_the_same_version_alone(tmp_path):
    before = f"# head\ntorch==2.13.0+cpu \\\n    --hash=sha256:{'a' * 64}\n"
    nowhere = (tmp_path / "none").as_uri()
    assert LOCK.cpu_block("2.13.0", nowhere, before) == before.partition("\n")[2]
    with pytest.raises(SystemExit, match=r"hashes of 2\.14\.0"):
        LOCK.cpu_block("2.14.0", nowhere, before)


def bom(*names: str) -> dict:
    return {
        "metadata": {"component": {"name": "fedveil", "bom-ref": "root"}},
        "components": [
            {"name": name.partition("==")[0], "version": name.partition("==")[2], "bom-ref": name} for name in names
        ],
        "dependencies": [{"ref": "root", "dependsOn": list(names)}, *({"ref": name} for name in names)],
    }


def test_each_component_has_the_hashes_of_the_lock_and_what_is_left_out_is_gone(tmp_path):
    for name, text in {
        "run": f"a.b==1 ; sys_platform == 'linux' \\\n    --hash=sha256:{'a' * 64} \\\n    --hash=sha256:{'b' * 64}\n",
        "cpu": f"torch==2+cpu \\\n    --hash=sha256:{'c' * 64}\n",
        "cuda": f"torch==2 \\\n    --hash=sha256:{'d' * 64}\n",
        "test": f"a-b==1 \\\n    --hash=sha256:{'a' * 64}\npytest==9 \\\n    --hash=sha256:{'e' * 64}\n",
    }.items():
        (tmp_path / f"{name}.txt").write_text(text)
    lock, left_out = SBOM.locked(tmp_path, without=["test"])
    assert left_out == {"pytest"}
    document = SBOM.completed(bom("A_b==1", "torch==2+cpu", "pytest==9"), lock, left_out)
    hashes = {
        component["name"]: [h["content"][0] for h in component["externalReferences"][-1]["hashes"]]
        for component in document["components"]
    }
    assert hashes == {"A_b": ["a", "b"], "torch": ["c", "d"]}
    assert document["dependencies"][0]["dependsOn"] == ["A_b==1", "torch==2+cpu"]
    assert {link["ref"] for link in document["dependencies"]} == {"root", "A_b==1", "torch==2+cpu"}


@pytest.mark.parametrize("name", ["a-b==2", "unknown==1"])
def test_a_package_that_the_lock_has_not_is_refused(name):
    with pytest.raises(SystemExit, match=r"in lock/\*\.txt"):
        SBOM.completed(bom(name), {"a-b": ("1", ["a" * 64])}, set())


def test_packages_on_the_builders_path_are_not_listed(monkeypatch, tmp_path):
    """A checkout on PYTHONPATH, whose fedveil.egg-info names a second FedVeil, ended `make sbom` and `make release`."""
    given = {}

    def run(command, *, env, **_):
        given.update(env)
        return subprocess.CompletedProcess(command, 1, "", "ended here")

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["sbom.py", "--python", sys.executable, "--out", str(tmp_path / "bom.json")])
    with pytest.raises(SystemExit, match="ended here"):
        SBOM.main()
    assert "PATH" in given
    assert "PYTHONPATH" not in given


def test_the_lock_of_this_tree_has_a_hash_for_every_component():
    lock, left_out = SBOM.locked(ROOT / "lock", without=["test", "tools", "sbom"])
    assert all(hashes for _, hashes in lock.values())
    assert {"pytest", "cyclonedx-bom", "pip"} <= left_out
    assert {"torch", "flwr", "setuptools"}.isdisjoint(left_out)
    assert lock["flwr"][0].startswith("1.39.")


@pytest.mark.parametrize("release", [line.release for line in flower.LINES[1:]])
def test_of_another_flower_the_components_are_those_in_its_place(release):
    lock, _ = SBOM.locked(ROOT / "lock", without=["test", "tools", "sbom"], line=f"flower-{release}")
    assert lock["flwr"][0].startswith(f"{release}.")
    assert lock["cryptography"][0].startswith("50.")
    assert all(hashes for _, hashes in lock.values())


def test_the_versions_of_another_flower_take_the_place_of_their_packages_alone():
    names, text = LOCK.in_place("# why\nFlwr_x==2\nuv==3\n", "# all\nflwr-x==1\nflwr==1\nuv==1\nuvicorn==1\n")
    assert names == {"flwr-x", "uv"}
    assert text.splitlines() == ["# all", "flwr==1", "uvicorn==1", "Flwr_x==2", "uv==3"]
