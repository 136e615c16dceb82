"""The pages that follow from the code: made once in a process, and not while tests are collected."""

from __future__ import annotations

from functools import cache

from tools import reference


@cache
def all_pages() -> dict[str, str]:
    """The text of every page by its path."""
    return reference.pages()
