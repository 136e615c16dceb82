"""Convert a notebook to Markdown, with unchanged text, fenced code and no outputs, and redirect links to it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(\]\([^)\s]*)\.ipynb\)")


def page(notebook: Path) -> str:
    """Return all cells of a notebook (nbformat 4), in order, and a link to the file itself.

    Raises:
        ValueError: a cell is neither Markdown nor code.
    """
    content = json.loads(notebook.read_text(encoding="utf-8"))
    language = content["metadata"]["language_info"]["name"]
    cells = [_cell(cell, language, f"{notebook.name}, cell {at}") for at, cell in enumerate(content["cells"])]
    return "\n\n".join([*cells, f"This page is a notebook: [{notebook.name}]({notebook.name}).\n"])


def to_pages(text: str) -> str:
    """Return the page with every link to a notebook replaced by a link to the notebook's page."""
    return _LINK.sub(r"\1.md)", text)


def _cell(cell: Mapping[str, Any], language: str, where: str) -> str:
    source = cell["source"]
    text = source if isinstance(source, str) else "".join(source)
    match cell["cell_type"]:
        case "markdown":
            return text
        case "code":
            fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
            return f"{fence}{language}\n{text}\n{fence}"
        case other:
            raise ValueError(f"{where}: expected markdown or code, found {other!r}; make it one of the two")
