"""Count words that indicate awkward English in the documentation and in docstrings, per 10,000 words.

    python tools/count_markers.py            # print the table
    python tools/count_markers.py --lines    # also print each occurrence

| marker | what is counted |
|---|---|
| noun "What" | sentences, cells and items that begin with "What" and do not end with a question mark |
| whoever, nobody, somebody, whatever | these words |
| beside | this word, but not "besides" |
| anew | this word |
| of which | these words |

The texts are README.md, the Markdown of docs/ without code blocks and text in backticks, and the docstrings of the
packages. Indented examples in docstrings (four spaces or more) are excluded.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("fedveil", "strategies", "server_app", "client_app", "attacks", "benchmarks", "tools")
MARKERS = {
    'noun "What"': re.compile(r"(?:^[#>*|\-\s\d.]*|[.:;!?|]\**\s+|\"\"\"\s*)\**(What)\b(?![^.|?!]*\?)", re.MULTILINE),
    "whoever, nobody, somebody, whatever": re.compile(r"\b(whoever|nobody|somebody|whatever)\b", re.IGNORECASE),
    "beside": re.compile(r"\b(beside)\b", re.IGNORECASE),
    "anew": re.compile(r"\b(anew)\b", re.IGNORECASE),
    "of which": re.compile(r"\b(of which)\b", re.IGNORECASE),
}


@dataclass(frozen=True)
class Text:
    """A text to search for markers.

    Attributes:
        name: the file's path, with the line number where the text begins.
        prose: the text without code.
    """

    name: str
    prose: str

    @property
    def words(self) -> int:
        """Return the number of words."""
        return len(re.findall(r"[A-Za-z][A-Za-z'’-]*", self.prose))


def strip_code(markdown: str) -> str:
    """Return Markdown without fenced and indented blocks and without inline code."""
    without_fences = re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in without_fences.splitlines() if not line.startswith("    ")]
    return re.sub(r"`[^`]*`", "", "\n".join(lines))


def strip_examples(docstring: str) -> str:
    """Return a docstring without its indented examples and the text in backticks."""
    lines = textwrap.dedent(docstring).splitlines()
    prose = [line for line in lines if not re.match(r" {4}\S", line) or re.match(r" {4}\w+(, \w+)*: ", line)]
    return re.sub(r"`[^`]*`", "", "\n".join(prose))


def read_pages(root: Path) -> Iterator[Text]:
    """Yield README.md and each page in docs/."""
    for page in (root / "README.md", *sorted((root / "docs").rglob("*.md"))):
        if page.is_file():
            yield Text(page.relative_to(root).as_posix(), strip_code(page.read_text(encoding="utf-8")))


def read_docstrings(root: Path, packages: Sequence[str] = PACKAGES) -> Iterator[Text]:
    """Yield each docstring in the packages. Links are not followed, because each leads to another package."""
    for package in packages:
        for folder, folders, files in os.walk(root / package):
            folders[:] = sorted(f for f in folders if not (Path(folder) / f).is_symlink() and not f.startswith("."))
            for file in sorted(f for f in files if f.endswith(".py")):
                path = Path(folder) / file
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                        docstring = ast.get_docstring(node)
                        if docstring:
                            line = getattr(node, "lineno", 1)
                            yield Text(f"{path.relative_to(root).as_posix()}:{line}", strip_examples(docstring))


def find_markers(text: Text) -> Iterator[tuple[str, str]]:
    """Yield each marker in a text with its line."""
    lines = text.prose.splitlines()
    for marker, pattern in MARKERS.items():
        for match in pattern.finditer(text.prose):
            yield marker, lines[text.prose.count("\n", 0, match.start(1))].strip()


def per_ten_thousand(count: int, words: int) -> float:
    """Return a count per 10,000 words; 0 without words."""
    return 10_000 * count / words if words else 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and, with --lines, the occurrences; return 0."""
    parser = argparse.ArgumentParser(prog="python tools/count_markers.py", description=__doc__.splitlines()[0])
    parser.add_argument("--lines", action="store_true", help="also print each occurrence")
    args = parser.parse_args(argv)
    groups = {"README and docs": list(read_pages(ROOT)), "docstrings": list(read_docstrings(ROOT))}
    groups["together"] = [text for texts in groups.values() for text in texts]
    for group, texts in groups.items():
        words = sum(text.words for text in texts)
        found = [(text.name, marker, line) for text in texts for marker, line in find_markers(text)]
        rates = (f"{marker} {per_ten_thousand(sum(m == marker for _, m, _ in found), words):.1f}" for marker in MARKERS)
        print(f"markers per 10,000 words, {group} ({words:,} words): {'; '.join(rates)}")
        if args.lines and group != "together":
            print("".join(f"  {name}: {marker}: {line[:110]}\n" for name, marker, line in found), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
