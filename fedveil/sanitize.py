"""Make text of another party safe to show: in a terminal, a log, a page or an error message.

Text from a server, a site or a file may contain escape codes that rewrite a terminal, line breaks that forge a line of
a log, marks that reverse the direction of writing, or 20 MB. This module imports neither torch nor Flower.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["sanitize"]

LIMIT = 500  # characters that are shown where a caller names no other bound


def sanitize(value: object, limit: int = LIMIT) -> str:
    """`value` as printable text on one line: the first `limit` of its characters, and how many there are.

    | in the text | becomes |
    |---|---|
    | a control, a line break, a mark of direction, a lone surrogate, a space other than " " | its escape, as "\\x1b" |
    | more than `limit` characters | the first `limit`, and how many there are |
    """
    try:
        text = str(value)
    except Exception:  # such as an integer of more digits than Python turns into text
        text = f"<{type(value).__name__} without text>"
    cut = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text[:limit])
    return cut if len(text) <= limit else f"{cut}... ({len(text)} characters)"


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return a "did you mean" question with the name in `known` most like `name`; "" if none is similar."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {near[0]}? " if near else ""
