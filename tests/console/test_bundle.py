from __future__ import annotations

import hashlib
import json

import pytest

from console.main import main


@pytest.fixture
def folder(tmp_path, capsys):
    bundle = tmp_path / "bundle"
    (bundle / "wheels").mkdir(parents=True)
    (bundle / "wheels" / "a.whl").write_bytes(b"wheel")
    (bundle / "image.tar").write_bytes(b"image" * 1000)
    assert main(["bundle", "manifest", str(bundle)]) == 0
    capsys.readouterr()
    return bundle


def test_the_manifest_names_every_file_with_its_hash(folder, capsys):
    files = json.loads((folder / "MANIFEST.json").read_text())["files"]
    assert files == {
        "image.tar": {"bytes": 5000, "sha256": hashlib.sha256(b"image" * 1000).hexdigest()},
        "wheels/a.whl": {"bytes": 5, "sha256": hashlib.sha256(b"wheel").hexdigest()},
    }
    assert main(["bundle", "verify", str(folder)]) == 0
    assert hashlib.sha256((folder / "MANIFEST.json").read_bytes()).hexdigest() in capsys.readouterr().out


@pytest.mark.parametrize("what", ["missing", "changed", "not in the manifest", "link", "manifest"])
def test_what_did_not_arrive_as_it_left_is_found(folder, what, capsys):
    wheel = folder / "wheels" / "a.whl"
    if what == "missing":
        wheel.unlink()
    elif what == "changed":
        wheel.write_bytes(b"wheeL")
    elif what == "link":
        wheel.rename(folder.parent / "a.whl")
        wheel.symlink_to(folder.parent / "a.whl")
    elif what == "manifest":
        (folder / "MANIFEST.json").write_text("[]")
    else:
        (folder / "wheels" / "b.whl").touch()
    assert main(["bundle", "verify", str(folder)]) == 2
    assert what in capsys.readouterr().err


def test_an_empty_folder_is_no_bundle(tmp_path, capsys):
    assert main(["bundle", "manifest", str(tmp_path)]) == 2
    assert main(["bundle", "manifest", str(tmp_path / "none")]) == 2
