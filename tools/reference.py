"""Generate the documentation pages that are derived from the code: keys, methods, commands, Python, notebooks.

    make docs       # writes them next to a copy of docs/ in build/docs, and builds the site from both in build/site

The pages are never committed, so they cannot be out of date. They are Markdown, like the pages in docs/.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import re
import shutil
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fedveil import strategies
from fedveil.config import RunConfig
from fedveil.console import main as console
from fedveil.console.terminal import render_markdown
from fedveil.contract.layout import MessageLayout
from fedveil.contract.method import Method
from tools.pages import attacks, composition, lines, notebooks, paper_claims, python, results

ROOT = Path(__file__).resolve().parent.parent
_LINES, _COUNTED = "lines of code", "without docstrings, comments and blank lines"
_WORDS: Mapping[Any, str] = {str: "text", bool: "`true`, `false`", int: "an integer", float: "a number"}
_OF_FIELD = re.compile(r"^ {4}(\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", re.MULTILINE)


def pages() -> dict[str, str]:
    """Return the text of every page, by its path in the documentation folder."""
    page_texts = {"reference/run-config.md": run_config(), "reference/commands.md": commands()}
    page_texts |= {"reference/attacks.md": attacked(), "reference/python/index.md": in_python()}
    page_texts |= {f"reference/python/{name}.md": python.page(name) for name in python.modules()}
    page_texts |= {f"reference/methods/{name}.md": method(name) for name in strategies.list_methods()}
    read = results.read_results()
    page_texts |= {f"reference/results/{name}.md": results.render_result(result) for name, result in read.items()}
    page_texts["reference/results/index.md"] = results.render_index(read)
    page_texts["reference/results/papers.md"] = paper_claims.render_page(read)
    return {**page_texts, "reference/methods/index.md": methods(), "reference/methods/what-composes.md": composed()}


def run_config() -> str:
    """Return the page with every run config key: its default, permitted values and meaning."""
    parts = [
        "# The run config\n\nSet keys with `fedveil submit --set KEY=VALUE`, `flwr run . -c 'KEY=VALUE'`, or a file "
        "for `fedveil submit --config`. A key that is not listed here, or a value that is not permitted, is refused "
        "with a one-line message before any site is contacted.\n"
    ]
    for section, field in RunConfig.model_fields.items():
        model = field.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        rows = [
            (f"`{section}.{one.alias}`", f"`{_shown(one.default)}`", _values(one), one.description or "")
            for one in model.model_fields.values()
        ]
        parts.append(
            f"## {section}\n\n{inspect.getdoc(model)}\n\n" + table(("key", "default", "may be", "meaning"), rows)
        )
    return "\n".join(parts)


def methods() -> str:
    """Return the page that lists the methods, one line each."""
    rows = []
    for name in strategies.list_methods():
        cls = strategies.load_method(name)
        title = attacks.title(importlib.import_module(cls.__module__))
        words, code = (cls.__doc__ or "").strip().partition("\n")[0], lines.of_file(inspect.getfile(cls))
        rows.append((f"[`{name}`]({name}.md)", title, words, str(code)))
    every = "\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"
    more = "\n[What composes with what](what-composes.md): noisy steps, secure aggregation, codes, robust rules.\n"
    counted = f"\nLines of code are counted in the method's own file, {_COUNTED}.\n"
    return "# The methods\n\n" + table(("method.name", "", "in one line", _LINES), rows) + counted + more + every


def method(name: str) -> str:
    """Return a method's page: its docstring, its fields, and its messages."""
    cls = strategies.load_method(name)
    words = (inspect.getdoc(importlib.import_module(cls.__module__)) or "").partition("\n")
    made = strategies.create_method(name)
    spec = made.adapter.example_spec()
    wire = _wire(made.layout(spec))
    return (
        f"# {words[0].rstrip('.')}\n{render_markdown(words[2])}\n\n## Fields\n\n"
        '`method.params = "name = value"`\n\n'
        + table(("field", "may be", "default", "meaning"), _fields(cls))
        + "\n## On the wire\n\n"
        f"For a small model with {len(spec)} trained tensors:\n\n"
        + table(("field", "to", "variant", "when", "codec", "unit", "bytes"), wire)
    )


def composed() -> str:
    """Return the page on combinations, in which each cell is the result of a round with tiny sites."""
    columns = (*composition.COLUMNS, composition.CODES)
    rows = [
        (f"[`{name}`]({name}.md)", *(composition.cell(name, c) for c in columns)) for name in strategies.list_methods()
    ]
    return (
        "# What composes with what\n\nEach method was run with its default fields, in a round with five tiny sites. "
        "*no* means that the code refuses the combination; the reason is the code's own message. `dp.*` also requires "
        'a task with per-example gradients. `secure.noise = "sum"` is combined with `dp.*` and one step per '
        "participation, or with the method's own noise if it adds any.\n\n" + table(("method", *columns), rows)
    )


def attacked() -> str:
    """Return the page that lists the attacks, with their controls and lines of code."""
    head = ("file", "", "reads", "must succeed on", "must fail on", _LINES)
    return (
        "# The attacks\n\n`fedveil audit` runs these attacks. An attack that fails one of its controls proves nothing "
        f"about a run. Lines of code are counted in the attack's own file, {_COUNTED}.\n\n"
        + table(head, attacks.audited())
        + "\n## Attacks that only benchmarks run, and shared functions\n\n"
        + table(("file", "", _LINES), attacks.others())
    )


def in_python() -> str:
    """Return the index page of the Python API for other programs."""
    parts = [
        "# In Python\n\n`fedveil.local` runs a federation in one process, as in "
        "[a notebook](../../notebooks/federation.ipynb). `fedveil.contract` has the interfaces between "
        "[methods](../../extend/method.md), [tasks](../../extend/task.md) and the code that runs them. "
        "Names that are not on these pages are not public, even if Python can import them.\n"
    ]
    for heading, names in python.modules_by_heading().items():
        rows = [(f"[`{name}`]({name}.md)", python.summary(name)) for name in names]
        parts.append(f"## {heading}\n\n" + table(("module", "in one line"), rows))
    return "\n".join([*parts, "```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"])


def commands() -> str:
    """Return the page with each command's help text."""
    parts = ["# The commands\n\n`fedveil COMMAND --help` prints the same texts.\n"]
    for name in sorted(console.list_commands()):
        whole = console.make_parser(name)
        chosen = next(a for a in whole._actions if isinstance(a, argparse._SubParsersAction)).choices[name]
        parts.append(f"## fedveil {name}\n\n```text\n{chosen.format_help().rstrip()}\n```\n")
        for action in chosen._actions:
            if isinstance(action, argparse._SubParsersAction):
                for below, one in action.choices.items():
                    parts.append(f"### fedveil {name} {below}\n\n```text\n{one.format_help().rstrip()}\n```\n")
    return "\n".join(parts)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, with bars in cells escaped."""
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _values(field: FieldInfo) -> str:
    kind = field.annotation
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(kind))
    signs = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    bounds = [
        f"{words} {getattr(m, sign)}" for m in field.metadata for sign, words in signs.items() if hasattr(m, sign)
    ]
    return ", ".join([_WORDS.get(kind, str(kind)), *bounds])


def _shown(value: object) -> str:
    return f"{value}".lower() if isinstance(value, bool) else (f"{value}" or '""')


def _fields(cls: type[Method]) -> list[tuple[str, str, str, str]]:
    words = {
        name: " ".join(meaning.split())
        for base in reversed(cls.__mro__)
        for names, meaning in _OF_FIELD.findall((inspect.getdoc(base) or "").partition("Attributes:")[2])
        for name in names.split(", ")
    }
    return [
        (f"`{field.name}`", f"`{field.type}`", f"`{default!r}`", words.get(field.name, ""))
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        for default in [field.default if field.default_factory is dataclasses.MISSING else field.default_factory()]
    ]


def _wire(layout: MessageLayout) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for field in layout.fields:
        shape = [n for n in field.shape if n is not None]
        nbytes = f"{field.codec.nbytes(tuple(shape)):,}" if len(shape) == len(field.shape) else "varies"
        to = {"down": "client", "up": "server"}[field.direction]
        every = ", ".join(field.variants) or "every"
        rows.append((f"`{field.name}`", to, every, field.when, field.codec.name, field.unit, nbytes))
    return rows


def main() -> None:
    """Copy docs/ to a folder, and write the generated pages to it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder)
    for name, text in pages().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    with_notebooks(folder)


def with_notebooks(folder: Path) -> None:
    """Write a page for each notebook in a folder's `notebooks`, and redirect links on all other pages to it."""
    for page in folder.rglob("*.md"):
        page.write_text(notebooks.to_pages(page.read_text()))
    for notebook in (folder / "notebooks").glob("*.ipynb"):
        notebook.with_suffix(".md").write_text(notebooks.page(notebook))


if __name__ == "__main__":
    main()
