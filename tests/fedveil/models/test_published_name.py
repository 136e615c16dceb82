"""The name of the base in files that others read."""

from __future__ import annotations

import pytest

from fedveil.models.published_name import published_name


@pytest.mark.parametrize(
    "model,name",
    [
        ("openai-community/gpt2", "openai-community/gpt2"),
        ("gpt2", "gpt2"),
        ("", ""),
        ("tiny", "fedveil/tiny-clip-prompt"),
        ("/srv/secret/llama", "llama"),  # also where it is not: a card is made on another machine, too
        ("/srv/secret/llama/", "llama"),
        ("/srv/secret/llama/.", "llama"),
        ("~/secret/llama", "llama"),
        ("../../secret/llama", "llama"),
        ("a/b/llama", "llama"),
    ],
)
def test_an_id_stays_and_a_path_gives_its_last_part(model, name):
    assert published_name(model, "clip-prompt") == name


def test_a_folder_that_reads_like_an_id_is_a_folder_and_a_dot_is_its_name(tmp_path, monkeypatch):
    (tmp_path / "secret" / "llama").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert published_name("secret/llama", "x") == "llama"
    monkeypatch.chdir(tmp_path / "secret" / "llama")
    assert published_name(".", "x") == "llama"
