"""Who may change a file that a program trusts."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from fedveil import paths


@pytest.fixture
def file(tmp_path):
    made = tmp_path / "own" / "list"
    made.parent.mkdir(mode=0o755)
    made.touch(0o644)
    return made


def test_a_file_that_only_its_owner_may_change_has_no_other_writer(file):
    assert paths.find_other_writer(file, file.stat()) == ""


@pytest.mark.parametrize("which", ["file", "folder"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_a_group_or_others_that_may_write_the_file_or_its_folder_are_found(file, which, mode):
    path = file if which == "file" else file.parent
    path.chmod(0o700 | mode)
    expected = f"{path} has mode {0o700 | mode:o}, so its group or other users may write to it; chmod go-w {path}"
    assert paths.find_other_writer(file, file.stat()) == expected


def test_another_owner_is_found_and_root_is_none(file):
    def owned_by(user: int) -> os.stat_result:
        mode, ino, dev, links, _, *rest = file.stat()
        return os.stat_result((mode, ino, dev, links, user, *rest))

    other = os.geteuid() + 1
    assert f"{file} belongs to user {other}; chown it" in paths.find_other_writer(file, owned_by(other))
    assert paths.find_other_writer(file, owned_by(0)) == ""


def test_a_links_own_folder_and_that_of_its_target_both_count(file, tmp_path):
    link = tmp_path / "links" / "list"
    link.parent.mkdir(mode=0o755)
    link.symlink_to(file)
    assert paths.find_other_writer(link, link.stat()) == ""
    for folder in (link.parent, file.parent):
        folder.chmod(0o775)
        assert f"{folder} has mode 775" in paths.find_other_writer(link, link.stat())
        folder.chmod(0o755)


def test_on_a_read_only_mount_the_folder_does_not_count_but_the_file_does(file, monkeypatch):
    file.parent.chmod(0o777)
    assert paths.find_other_writer(file, file.stat())
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    assert paths.find_other_writer(file, file.stat()) == ""
    file.chmod(0o664)
    assert f"{file} has mode 664" in paths.find_other_writer(file, file.stat())
