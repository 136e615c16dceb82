"""Lines of code of a file: what is left of it without docstrings, comments and blank lines.

| line | counts |
|---|---|
| blank, a comment alone, a line of a docstring | no |
| code with a comment behind it | yes |
| a statement over several lines | each line that holds a part of it |
| a text over several lines that is no docstring | each line |
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
    """Lines of code of a file of Python. Raises SyntaxError for what is none."""
    return of_text(Path(file).read_text(encoding="utf-8"))


def of_text(text: str) -> int:
    """Lines of code of Python. Raises SyntaxError for what is none."""
    docstrings = {at for node in ast.walk(ast.parse(text)) if (at := _docstring_at(node)) is not None}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        column = len(token.line[: token.start[1]].encode())  # as ast counts
        if token.type not in _NO_CODE and (token.start[0], column) not in docstrings:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def _docstring_at(node: ast.AST) -> tuple[int, int] | None:
    """Line and column, in bytes, at which a node's docstring begins; None where it has none."""
    if not isinstance(node, _HAVE_DOCSTRINGS) or ast.get_docstring(node, clean=False) is None:
        return None
    first = node.body[0]
    return first.lineno, first.col_offset
