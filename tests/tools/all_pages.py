"""The pages that are generated from code: made once per process, and not during test collection."""

from __future__ import annotations

from functools import cache

from tools import reference


@cache
def all_pages() -> dict[str, str]:
    """The text of every page by its path."""
    return reference.pages()
