"""Generate the documentation pages that follow from the code: keys, methods, commands, Python, notebooks.

    make docs       # writes them beside the pages of docs/ in build/docs, and makes the site of both in build/site

The pages are never committed, so they cannot be older than the code. They are Markdown, like the pages of
docs/.
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
from tools.pages import attacks, composition, lines, notebooks, python, results

ROOT = Path(__file__).resolve().parent.parent
_LINES, _COUNTED = "lines of code", "without docstrings, comments and blank lines"
_WORDS: Mapping[Any, str] = {str: "text", bool: "`true`, `false`", int: "an integer", float: "a number"}
_OF_FIELD = re.compile(r"^ {4}(\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", re.MULTILINE)


def pages() -> dict[str, str]:
    """Return the text of every page, by its path below the documentation's folder."""
    page_texts = {"reference/run-config.md": run_config(), "reference/commands.md": commands()}
    page_texts |= {"reference/attacks.md": attacked(), "reference/python/index.md": in_python()}
    page_texts |= {f"reference/python/{name}.md": python.page(name) for name in python.modules()}
    page_texts |= {f"reference/methods/{name}.md": method(name) for name in strategies.list_methods()}
    read = results.read_results()
    page_texts |= {f"reference/results/{name}.md": results.render_result(result) for name, result in read.items()}
    page_texts["reference/results/index.md"] = results.render_index(read)
    return {**page_texts, "reference/methods/index.md": methods(), "reference/methods/what-composes.md": composed()}


def run_config() -> str:
    """Return every key of the run config: its default, its permitted values, its meaning."""
    parts = [
        "# The run config\n\n`fedveil submit --set KEY=VALUE`, `flwr run . -c 'KEY=VALUE'`, or a file for `fedveil "
        "submit --config`. A key that is not here, or a value that it may not have, is refused in one line before any "
        "site is asked.\n"
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
    """Return the methods, one line each."""
    rows = []
    for name in strategies.list_methods():
        cls = strategies.load_method(name)
        title = attacks.title(importlib.import_module(cls.__module__))
        words, code = (cls.__doc__ or "").strip().partition("\n")[0], lines.of_file(inspect.getfile(cls))
        rows.append((f"[`{name}`]({name}.md)", title, words, str(code)))
    every = "\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"
    more = "\n[What composes with what](what-composes.md): noisy steps, secure aggregation, codes, robust rules.\n"
    counted = f"\nLines of code are of the method's one file, {_COUNTED}.\n"
    return "# The methods\n\n" + table(("method.name", "", "in one line", _LINES), rows) + counted + more + every


def method(name: str) -> str:
    """Return a method's docstring, its fields, and its messages."""
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
        f"For a small model of {len(spec)} trained tensors.\n\n"
        + table(("field", "to", "variant", "when", "codec", "unit", "bytes"), wire)
    )


def composed() -> str:
    """Return the page on combinations, where each cell is the result of a round of tiny sites."""
    columns = (*composition.COLUMNS, composition.CODES)
    rows = [
        (f"[`{name}`]({name}.md)", *(composition.cell(name, c) for c in columns)) for name in strategies.list_methods()
    ]
    return (
        "# What composes with what\n\nEvery method with its default fields, in a round of five tiny sites. *no* is "
        "what the code refuses, with its own words for what it found. `dp.*` also needs a task with gradients of "
        'single rows. `secure.noise = "sum"` is with `dp.*` and one step a participation, or with the noise of a '
        "method that adds some.\n\n" + table(("method", *columns), rows)
    )


def attacked() -> str:
    """Return the attacks, with their controls and their lines of code."""
    head = ("file", "", "reads", "must win on", "must lose on", _LINES)
    return (
        "# The attacks\n\nThose that `fedveil audit` runs. An attack that fails one of its controls proves nothing "
        f"about a run. Lines of code are of its one file, {_COUNTED}.\n\n"
        + table(head, attacks.audited())
        + "\n## Attacks that only benchmarks run, and shared functions\n\n"
        + table(("file", "", _LINES), attacks.others())
    )


def in_python() -> str:
    """Return the page on the API for other programs: a federation in one process, and the contract."""
    parts = [
        "# In Python\n\n`fedveil.local` is a federation in one process, as "
        "[a notebook](../../notebooks/federation.ipynb) has it. `fedveil.contract` is what "
        "[a method](../../extend/method.md), [a task](../../extend/task.md) and what runs them are written against. "
        "Names that a page does not show are not public, even where Python finds them.\n"
    ]
    for heading, names in python.modules_by_heading().items():
        rows = [(f"[`{name}`]({name}.md)", python.summary(name)) for name in names]
        parts.append(f"## {heading}\n\n" + table(("module", "in one line"), rows))
    return "\n".join([*parts, "```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"])


def commands() -> str:
    """Return the page with each command's help text."""
    parts = ["# The commands\n\n`fedveil COMMAND --help` prints these on the machine at hand.\n"]
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
    """Copy docs/ to a folder, and write the generated pages next to its pages."""
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
    """Write a page for each notebook in a folder's `notebooks`, and point links on all other pages to it."""
    for page in folder.rglob("*.md"):
        page.write_text(notebooks.to_pages(page.read_text()))
    for notebook in (folder / "notebooks").glob("*.ipynb"):
        notebook.with_suffix(".md").write_text(notebooks.page(notebook))


if __name__ == "__main__":
    main()
