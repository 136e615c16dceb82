"""The terminal, for text that others wrote: no markup and no emoji codes of theirs are rendered."""

from __future__ import annotations

from rich.console import Console


def terminal() -> Console:
    """A console that prints strings as they are; what may hold escape codes goes through `fedveil.foreign.shown`."""
    return Console(markup=False, highlight=False, emoji=False)
