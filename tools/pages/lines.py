"""Count a file's lines of code, without docstrings, comments and blank lines.

| line | counted? |
|---|---|
| blank line, comment line, line in a docstring | no |
| code followed by a comment | yes |
| a statement over several lines | each line that contains part of it |
| a multi-line string that is not a docstring | each line |
"""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip
_HAVE_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def of_file(file: str | Path) -> int:
    """Return the number of lines of code in a Python file. Raises SyntaxError for any other file."""
    return of_text(Path(file).read_text(encoding="utf-8"))


def of_text(text: str) -> int:
    """Return the number of lines of code in Python source. Raises SyntaxError for any other text."""
    docstrings = {at for node in ast.walk(ast.parse(text)) if (at := _docstring_at(node)) is not None}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        column = len(token.line[: token.start[1]].encode())  # as ast counts
        if token.type not in _NO_CODE and (token.start[0], column) not in docstrings:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def _docstring_at(node: ast.AST) -> tuple[int, int] | None:
    """Return the line and column (in bytes) where a node's docstring begins; None if there is none."""
    if not isinstance(node, _HAVE_DOCSTRINGS) or ast.get_docstring(node, clean=False) is None:
        return None
    first = node.body[0]
    return first.lineno, first.col_offset
