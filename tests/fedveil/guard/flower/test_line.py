"""Which Flower is known, and the words for one that is not."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

from fedveil.errors import ConfigError
from fedveil.guard import clientapp, flower, supernode
from tests.conftest import ROOT


@pytest.mark.parametrize(
    "version,speaks", [("1.39.0", "gRPC"), ("1.39.7", "gRPC"), ("1.41", "HTTP"), ("1.41.0", "HTTP"), ("1.42.0", "HTTP")]
)
def test_a_known_version_says_what_its_supernodes_speak(version, speaks):
    assert flower.release_of(version).speaks == speaks


@pytest.mark.parametrize(
    "version", ["1.38.0", "1.40.0", "1.43.0", "1.390.0", "1.3", "2.39.0", "", "1.39x", "x" * 10**6]
)
def test_another_one_is_refused_in_few_words(version):
    known = r"1\.39 \(gRPC\), 1\.41 \(HTTP\), 1\.42 \(HTTP\)"
    with pytest.raises(ConfigError, match=rf"flwr: this is version .*, but {known} is needed") as caught:
        flower.release_of(version)
    assert len(str(caught.value)) < 200


def test_this_installation_has_a_known_one():
    assert importlib.metadata.version("flwr").startswith(flower.installed_release().release)


@pytest.mark.parametrize("refuses", [clientapp.require_flower, supernode.patch_supernode])
def test_a_program_of_the_guard_does_not_start_with_another(refuses, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.43.0")
    with pytest.raises(SystemExit, match=r"error: flwr: this is version 1\.43\.0, .* see docs/deploy/provision\.md"):
        refuses()


def test_to_know_which_it_is_takes_no_import_of_flower():
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from fedveil.guard import flower; flower.installed_release()"
    )
    done = subprocess.run([sys.executable, "-c", f"{code}; assert 'flwr' not in sys.modules"], check=False)
    assert done.returncode == 0
