"""Measures of names in a sample tree, compared with counts by hand."""

from __future__ import annotations

import pytest

from tools import measure_names
from tools.measure_names import collect, count_words, measure


@pytest.mark.parametrize(("name", "words"), [
    ("load", 1), ("load_rows", 2), ("RowLoader", 2), ("DpSgd", 2), ("PEFT", 1), ("PEFTModel", 2), ("Lora2", 1),
    ("quantize_4bit", 2),
])  # fmt: skip
def test_words_begin_with_an_underscore_or_a_capital(name, words):
    assert count_words(name) == words


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "core" / "held").mkdir(parents=True)
    (tmp_path / "core" / "__init__.py").write_text("")
    (tmp_path / "core" / "held" / "__init__.py").write_text("")
    (tmp_path / "core" / "rows.py").write_text(
        "def load(): ...\ndef load_rows(): ...\ndef _hidden(): ...\nclass Plan:\n    def take(self): ...\n"
    )
    (tmp_path / "core" / "held" / "plan.py").write_text("class Plan: ...\nclass RowPlan: ...\ndef found(): ...\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "late.py").write_text("def far(): ...\n")
    (tmp_path / "core" / "other").symlink_to(tmp_path / "other")
    return tmp_path


def test_each_measure_counts_what_it_says(tree):
    functions, classes, twice, participles = measure(collect(tree, ["core"]))
    assert (functions.against, functions.total) == (["core/rows.py:load", "core/held/plan.py:found"], 3)
    assert (classes.against, classes.total) == (["core/rows.py:Plan", "core/held/plan.py:Plan"], 3)
    assert twice.against == classes.against
    assert participles.against == ["core/held/plan.py:found", "core/held/__init__.py:held"]
    assert not any(line.is_met for line in (functions, classes, twice, participles))


def test_a_tree_that_keeps_the_targets_meets_them(tmp_path):
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "rows.py").write_text("def load_rows(): ...\nclass RowPlan: ...\n")
    assert all(line.is_met for line in measure(collect(tmp_path, ["core"])))


def test_the_check_ends_with_one_where_a_target_is_missed(tree, monkeypatch, capsys):
    monkeypatch.setattr(measure_names, "ROOT", tree)
    monkeypatch.setattr(measure_names, "CORE", ("core",))
    assert measure_names.main([]) == 0
    assert measure_names.main(["--check", "--names"]) == 1
    printed = capsys.readouterr().out
    assert "functions with a name of one word: 2 of 3 (67%); at most 30%: missed" in printed
    assert "    core/rows.py:load\n" in printed
