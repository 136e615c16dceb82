"""Lines of code, counted by hand and in the tables of methods and attacks."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from fedveil import strategies
from fedveil.attacks import base
from tests.conftest import ROOT
from tools import reference
from tools.pages import lines

TEXT = '''"""A docstring
over two lines."""

# a comment
import os  # counts


class A:
    """One line."""

    async def f(self):
        "another kind"
        return (
            1,

            # alone

            2,
        )

    words = """no docstring

    three lines"""
    "an expression, since a statement stands before it"
'''


def test_by_hand():
    """import, class, def; return ( | 1, | 2, | ); words: three lines; the expression."""
    assert lines.of_text(TEXT) == 3 + 4 + 3 + 1


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("\n\n", 0),
        ("# c\n", 0),
        ('"""d"""\n', 0),
        ('"""d"""; x = 1\n', 1),
        ("def ü(): 'd'\n", 1),
        ("def ü():\n  'd'\n", 1),
        ("x=1", 1),
    ],
)
def test_edges(text, count):
    assert lines.of_text(text) == count


def test_what_is_no_python_is_refused():
    with pytest.raises(SyntaxError):
        lines.of_text("def")


def counted(page: str) -> dict[str, int]:
    """The last cell of each row of a page's tables by its first name."""
    return {name: int(n) for name, n in re.findall(r"^\| \[?`([^`]+)`.*\| (\d+) \|$", page, re.M)}


def test_every_method_has_its_lines():
    line_counts = counted(reference.methods())
    assert line_counts == {
        n: lines.of_file(inspect.getfile(strategies.load_method(n))) for n in strategies.list_methods()
    }
    assert min(line_counts.values()) > 10


def test_every_attack_has_its_lines_and_every_other_file_of_the_rooms():
    page = reference.attacked()
    audited, others = map(counted, page.split("## Attacks that only benchmarks run"))
    ours = [a for a in base.list_attacks() if type(a).__module__.startswith("fedveil.")]
    assert set(audited) >= {str(Path(inspect.getfile(type(a))).resolve().relative_to(ROOT)) for a in ours}
    files = [f for f in (ROOT / "attacks").glob("*/*.py") if f.stem != "__init__" and f.parent.name != "audit"]
    rooms = {f"attacks/{f.parent.name}/{f.name}" for f in files}
    assert {*audited, *others} >= rooms
    assert not set(audited) & set(others)
    assert others["attacks/sites/property_inference.py"] == lines.of_file(ROOT / "attacks/sites/property_inference.py")
