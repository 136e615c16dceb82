"""Make text from another party safe to show in a terminal, a log, a page or an error message.

Text from a server, a site or a file may contain escape codes that rewrite a terminal, line breaks that forge a log
line, or characters that reverse the writing direction, or it may be 20 MB long. This module imports neither torch nor
Flower.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["sanitize"]

LIMIT = 500  # characters shown if the caller sets no other limit


def sanitize(value: object, limit: int = LIMIT) -> str:
    """Return `value` as printable text on one line, cut after `limit` characters.

    | in the text | becomes |
    |---|---|
    | a control character, line break, direction mark, lone surrogate, space other than " " | its escape, as "\\x1b" |
    | more than `limit` characters | the first `limit` characters, and the total number |
    """
    try:
        text = str(value)
    except Exception:  # such as an integer with more digits than Python converts to text
        text = f"<{type(value).__name__} without text>"
    cut = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text[:limit])
    return cut if len(text) <= limit else f"{cut}... ({len(text)} characters)"


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return a "did you mean" question with the most similar name in `known`; "" if none is similar."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {near[0]}? " if near else ""
