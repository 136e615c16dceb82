"""The list of bundles that a server's ServerApp process may install."""

from __future__ import annotations

import hashlib
import importlib
import io
import os
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from fedveil.errors import ConfigError, PolicyError
from fedveil.federation.message_signatures.environment import APP_DIGEST_VARIABLE, BUNDLES_VARIABLE
from fedveil.guard import permitted_bundles, serverapp
from fedveil.guard.permitted_bundles import BundleCheck


def bundle(text: str = "app = 1\n") -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(zipfile.ZipInfo("pyproject.toml"), text)  # with a fixed date: equal texts, equal bundles
    return packed.getvalue()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Runtime(ModuleType):
    """Flower's module: it extracts a bundle unless the folder exists, as Flower does."""

    def __init__(self, folder: Path) -> None:
        super().__init__("runtime")
        self.folder, self.installed = folder, list[bytes]()
        self.fab_from_proto = lambda proto: proto
        self.install_from_fab = self.extract

    def extract(self, content: bytes, skip_prompt: bool = False) -> Path:
        assert skip_prompt
        self.installed.append(content)
        if not self.folder.exists():
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                archive.extractall(self.folder)
        return self.folder


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv(APP_DIGEST_VARIABLE, "")


@pytest.fixture
def runtime(tmp_path) -> Runtime:
    made = Runtime(tmp_path / "apps" / "fedveil.app.1")
    BundleCheck(made, tmp_path / "bundles.toml").install()
    return made


def run(runtime: Runtime, content: bytes, named: str | None = None) -> Path:
    fab = runtime.fab_from_proto(SimpleNamespace(hash_str=digest(content) if named is None else named, content=content))
    return runtime.install_from_fab(fab.content, skip_prompt=True)


def permit(tmp_path: Path, *digests: str) -> None:
    (tmp_path / "bundles.toml").write_text(f"digests = {list(digests)}\n")


def test_without_the_file_every_bundle_runs_and_with_it_the_permitted_ones_alone(runtime, tmp_path):
    assert run(runtime, bundle()) == runtime.folder
    permit(tmp_path, "ab" * 32, digest(bundle()))  # takes effect at once
    assert run(runtime, bundle()) == runtime.folder
    other = bundle("app = 2\n")
    permit(tmp_path, digest(other).replace("a", "b"), digest(bundle()))
    with pytest.raises(PolicyError, match=f"app digest: {digest(other)} is not one of the 2 in .*; nothing"):
        run(runtime, other)
    permit(tmp_path)
    with pytest.raises(PolicyError, match="is not one of the 0 in"):
        run(runtime, bundle())
    assert runtime.installed == [bundle(), bundle()]


@pytest.mark.parametrize("which", ["file", "folder"])
def test_a_list_that_other_users_may_write_closes_the_server(runtime, tmp_path, which):
    permit(tmp_path, digest(bundle()))
    path = tmp_path / "bundles.toml" if which == "file" else tmp_path
    before = path.stat().st_mode
    path.chmod(before | 0o002)
    with pytest.raises(ConfigError, match=f"only this user may be able to change the digests, but {path} has mode"):
        run(runtime, bundle())
    assert runtime.installed == []
    path.chmod(before)
    assert run(runtime, bundle()) == runtime.folder


@pytest.mark.parametrize(
    "text", ["", "digests = 5", 'digests = ["ab"]', f'digests = ["{"AB" * 32}"]', "digests = [", "digests = [5]",
             f'digests = ["{"ab" * 32}"]\nmore = 1', f'digest = ["{"ab" * 32}"]', "# " + "x" * (1 << 20)]
)  # fmt: skip
def test_a_file_of_another_form_closes_the_server(runtime, tmp_path, text):
    (tmp_path / "bundles.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"bundles.toml: cannot read the digests of the bundles"):
        run(runtime, bundle())
    assert runtime.installed == []


def test_a_file_that_cannot_be_read_closes_the_server(runtime, tmp_path):
    (tmp_path / "bundles.toml").mkdir()
    with pytest.raises(ConfigError, match=r"cannot read the digests of the bundles .* \(IsADirectoryError"):
        run(runtime, bundle())
    assert runtime.installed == []


def test_a_permitted_bundle_under_another_name_loads_no_other_folder(runtime, tmp_path):
    """Flower loads the folder of the digest that the SuperLink names, not that of the bundle that it sent."""
    permit(tmp_path, digest(bundle()))
    with pytest.raises(PolicyError, match="app digest: the SuperLink names"):
        run(runtime, bundle(), named="ab" * 32)
    assert runtime.installed == []


def test_a_folder_with_other_files_than_the_bundle_is_not_loaded(runtime, tmp_path):
    permit(tmp_path, digest(bundle()))
    runtime.folder.mkdir(parents=True)
    (runtime.folder / "pyproject.toml").write_text("app = 2\n")
    with pytest.raises(PolicyError, match="the bundle's own files"):
        run(runtime, bundle())


def test_the_process_measures_its_bundle_also_where_no_file_is_named(monkeypatch, tmp_path):
    """The server signs for the bundle that it runs, not for the digest that the SuperLink names."""
    monkeypatch.delenv(BUNDLES_VARIABLE, raising=False)
    made = Runtime(tmp_path / "apps" / "fedveil.app.1")
    monkeypatch.setitem(sys.modules, "a_runtime", made)
    permitted_bundles.patch_install("a_runtime")
    assert run(made, bundle()) == made.folder
    assert os.environ[APP_DIGEST_VARIABLE] == digest(bundle())
    with pytest.raises(PolicyError, match="app digest: the SuperLink names"):
        run(made, bundle(), named="ab" * 32)
    assert made.installed == [bundle()]


def test_every_function_that_is_replaced_is_flowers(monkeypatch):
    loaded = importlib.import_module(serverapp.RUNTIME)
    flowers = loaded.install_from_fab
    for name in ("fab_from_proto", "install_from_fab"):
        monkeypatch.setattr(loaded, name, getattr(loaded, name))  # puts it back
    permitted_bundles.patch_install(serverapp.RUNTIME)
    assert loaded.install_from_fab is not flowers
