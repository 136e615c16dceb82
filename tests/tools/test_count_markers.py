"""Markers of hard English in sample texts, compared with counts by hand."""

from __future__ import annotations

import pytest

from tools import count_markers
from tools.count_markers import Text, find_markers, per_ten_thousand, read_docstrings, read_pages, strip_code


def markers_of(prose: str) -> list[str]:
    return [marker for marker, _ in find_markers(Text("x", prose))]


@pytest.mark.parametrize(("prose", "counted"), [
    ("What is signed; its digest.", ['noun "What"']),
    ("It is kept. What stays is written.", ['noun "What"']),
    ("| key | What it means |\n", ['noun "What"']),
    ("## What it does", ['noun "What"']),
    ("- **What to do.** Read it.", ['noun "What"']),
    ("What is signed? The digest.", []),
    ("It says what it signs.", []),
    ("Whoever asks, Nobody answers.", ["whoever, nobody, somebody, whatever"] * 2),
    ("A folder beside it, and besides a file.", ["beside"]),
    ("It is made anew, of which a part is kept.", ["anew", "of which"]),
])  # fmt: skip
def test_each_marker_is_counted_once_and_nothing_else(prose, counted):
    assert markers_of(prose) == counted


def test_code_is_not_counted():
    text = strip_code("A `nobody` here.\n\n    nobody runs it\n\n```sh\necho nobody\n```\nNobody.\n")
    assert markers_of(text) == ["whoever, nobody, somebody, whatever"]


def test_pages_and_docstrings_are_read_without_the_links_of_packages(tmp_path):
    (tmp_path / "docs" / "deep").mkdir(parents=True)
    (tmp_path / "README.md").write_text("Read it anew.\n")
    (tmp_path / "docs" / "deep" / "page.md").write_text("One of which is here.\n")
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "part.py").write_text(
        '"""What it is.\n\n    nobody, in it\n\nIt ends.\n"""\n\n\ndef run() -> None:\n    """Start it anew."""\n'
    )
    (tmp_path / "other").symlink_to(tmp_path / "core")
    (tmp_path / "core" / "other").symlink_to(tmp_path / "core")
    pages, texts = list(read_pages(tmp_path)), list(read_docstrings(tmp_path, ["core"]))
    assert [text.name for text in pages] == ["README.md", "docs/deep/page.md"]
    assert [text.name for text in texts] == ["core/part.py:1", "core/part.py:9"]
    assert [marker for text in texts for marker, _ in find_markers(text)] == ['noun "What"', "anew"]


def test_the_table_has_the_rates_of_both_groups_and_together(tmp_path, monkeypatch, capsys):
    (tmp_path / "README.md").write_text("anew " + "word " * 99)
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(count_markers, "ROOT", tmp_path)
    assert count_markers.main(["--lines"]) == 0
    printed = capsys.readouterr().out
    assert "README and docs (100 words): " in printed
    assert "anew 100.0" in printed
    assert "  README.md: anew: anew word" in printed
    assert "together (100 words)" in printed
    assert per_ten_thousand(1, 0) == 0.0
