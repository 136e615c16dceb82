"""Terminal output for untrusted text, whose markup and emoji codes are not rendered; Markdown for our docstrings."""

from __future__ import annotations

from rich.console import Console


def make_console() -> Console:
    """Return a console that prints strings unchanged.

    Text that may contain escape codes must first pass through `fedveil.sanitize.sanitize`.

    """
    return Console(markup=False, highlight=False, emoji=False)


def render_markdown(docstring: str) -> str:
    """Convert a docstring to Markdown: join table rows; put blank lines before tables, formulas and disclosures."""
    lines: list[str] = []
    for line in docstring.splitlines():
        if lines and lines[-1].startswith("|") and not lines[-1].rstrip().endswith("|"):
            lines[-1] = f"{lines[-1].rstrip()} {line.strip()}"
            continue
        before = lines[-1] if lines else ""
        begins = [line.startswith(mark) and not before.startswith(mark[:1]) for mark in ("|", "    ")]
        if before and (any(begins) or line.startswith("The server learns:")):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def ask_to_delete() -> bool:
    """Ask whether to delete what was listed; anything but yes means no."""
    try:
        return input("delete them? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False
