"""Copies of the policies by which a site decided."""

from __future__ import annotations

import hashlib
import os

import pytest

from fedveil.client_app.policy.policy_copies import FOLDER, find_copy, keep_copy
from fedveil.errors import StateError


@pytest.fixture
def policy(tmp_path):
    file = tmp_path / "site-policy.toml"
    file.write_bytes(b"max-rounds = 2\r\n")
    return file


def test_a_copy_has_the_bytes_of_the_policy_under_its_digest(tmp_path, policy):
    state = tmp_path / "state"
    digest = keep_copy(state, str(policy))
    assert digest == hashlib.sha256(policy.read_bytes()).hexdigest()
    assert find_copy(state, digest).read_bytes() == policy.read_bytes()
    assert find_copy(state, digest).stat().st_mode & 0o777 == 0o600


def test_each_version_is_kept_once(tmp_path, policy):
    state = tmp_path / "state"
    first = keep_copy(state, str(policy))
    before = find_copy(state, first).stat()
    assert keep_copy(state, str(policy)) == first
    assert find_copy(state, first).stat().st_mtime_ns == before.st_mtime_ns
    policy.write_text("max-rounds = 3")
    assert keep_copy(state, str(policy)) != first
    assert len(list((state / FOLDER).iterdir())) == 2


def test_a_changed_copy_is_not_found_and_is_written_anew(tmp_path, policy):
    state = tmp_path / "state"
    digest = keep_copy(state, str(policy))
    find_copy(state, digest).write_text("max-rounds = 9")
    assert find_copy(state, digest) is None
    keep_copy(state, str(policy))
    assert find_copy(state, digest).read_bytes() == policy.read_bytes()


@pytest.mark.parametrize("name", ["", "missing.toml"])
def test_without_a_readable_policy_there_is_no_copy(tmp_path, name):
    assert keep_copy(tmp_path / "state", str(tmp_path / name) if name else "") == ""
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "A" * 64, "0" * 63, "0" * 64 + "/x"])
def test_only_a_digest_names_a_copy(tmp_path, policy, digest):
    keep_copy(tmp_path / "state", str(policy))
    assert find_copy(tmp_path / "state", digest) is None


def test_a_site_that_cannot_keep_a_copy_says_so(tmp_path, policy):
    state = tmp_path / "state"
    state.mkdir()
    (state / FOLDER).write_text("a file in the folder's place")
    with pytest.raises(StateError, match="cannot keep a copy of the policy"):
        keep_copy(state, str(policy))
    assert os.listdir(state) == [FOLDER]
