"""`fedveil methods`: lists all methods, or shows one in detail.

The details are a method's equations, what each side learns, its parameters, and its messages.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import math
import re
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from fedveil import strategies
from fedveil.console.terminal import render_markdown
from fedveil.contract.layout import Direction, MessageLayout
from fedveil.contract.method import Method
from fedveil.contract.param_spec import Spec
from fedveil.contract.privacy import PrivacyGuarantee
from fedveil.plugins import find_entry_point, load_entry_point

_FP32 = 4  # bytes
_COLUMNS = "fedveil.method_columns"  # the entry-point group
_NO_FIGURES = (
    'no column "measured", because fedveil-bench is not installed (in a checkout: `make bench`); docs/results.md '
    "has the figures"
)
_COMPARED = (
    "down, up: the largest total size of a message's fields in any round, as % of the fp32 trained tensors of a small "
    "model. For details on a method: fedveil methods NAME"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("name", nargs="?", help="a method's name")
    parser.add_argument(
        "--table", action="store_true", help="compare all methods: what is shared and kept, guarantee, bytes, figures"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the list or one method."""
    console = Console(highlight=False)
    if args.table:
        columns = _installed_columns()
        console.print(_compared({name: cells for name, (cells, _) in columns.items()}))
        captions = [caption for _, caption in columns.values()] or [_NO_FIGURES]
        console.print("\n".join([_COMPARED, *captions]), style="dim", markup=False)
        return 0
    if args.name is None:
        console.print(_list())
        console.print("For details on a method: fedveil methods NAME")
        return 0
    _show(console, args.name)
    return 0


def _list() -> Table:
    table = Table("name", "method", "in one line", "adapter")
    for name in strategies.list_methods():
        cls = strategies.load_method(name)
        title = _first_line(inspect.getdoc(importlib.import_module(cls.__module__)))
        adapter = type(strategies.create_method(name).adapter).__name__
        table.add_row(name, title, _first_line(cls.__doc__), adapter)
    return table


def _installed_columns() -> dict[str, tuple[Mapping[str, str], str]]:
    """Return the installed packages' table columns: for each column name, its cells by method title, and a caption.

    Raises:
        ConfigError: two packages provide the same column, or one fails to load.
    """
    columns = {}
    for name in sorted({point.name for point in entry_points(group=_COLUMNS)}):
        module = load_entry_point(find_entry_point(_COLUMNS, name, "column"), "column", ("read_column",))
        columns[name] = module.read_column()
    return columns


def _compared(columns: Mapping[str, Mapping[str, str]]) -> Table:
    """Return a table with one row per method: what each side gets, the guarantee, message sizes, and `columns`.

    `columns` maps each column name to its cells by method title.
    """
    table = Table(show_lines=True)
    table.add_column("method", min_width=max(map(len, strategies.list_methods())))
    for name in ("a client shares / keeps", "the server learns", "guarantee"):
        table.add_column(name)
    for name in ("down", "up"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in columns:
        table.add_column(name)
    for name in strategies.list_methods():
        doc = inspect.getdoc(importlib.import_module(strategies.load_method(name).__module__)) or ""
        words = " ".join(doc.split())
        method = strategies.create_method(name)
        spec = method.adapter.example_spec()
        layout = method.layout(spec)
        dense = sum(math.prod(tensor.shape) * _FP32 for tensor in spec.values())
        costs = [_part(layout, direction, dense) for direction in ("down", "up")]
        guarantee = (
            "epsilon, in the modes named on its page" if isinstance(method, PrivacyGuarantee) else "none on its own"
        )
        parts = " / ".join(shared_and_kept(words))
        learns, title = _sentence(words, "The server learns: "), _first_line(doc).rstrip(".")
        table.add_row(name, parts, learns, guarantee, *costs, *(cells.get(title, "-") for cells in columns.values()))
    return table


def shared_and_kept(words: str) -> tuple[str, str]:
    """Return what a client shares and what it keeps, as stated on the method's page and in docs/methods.md."""
    return _sentence(words, "A client shares: "), _sentence(words, "A client keeps: ")


def _sentence(words: str, head: str) -> str:
    """Return the sentence after `head`, or "see its page" for a method from another package without this sentence."""
    match = re.search(re.escape(head) + r"(.{1,300}?)(?=\. |\.$|$)", words)
    return match[1] if match else "see its page"


def _part(layout: MessageLayout, direction: Direction, dense: int) -> str:
    """Return the size of a message's largest variant, as a percentage of all trained tensors in fp32."""
    sizes: dict[str, int] = {}
    for field in layout.fields:
        if field.direction == direction:
            if None in field.shape:
                return "varies"
            nbytes = field.codec.nbytes(tuple(n for n in field.shape if n is not None))
            for variant in field.variants or ("",):
                sizes[variant] = sizes.get(variant, 0) + nbytes
    most = sizes.pop("", 0) + max(sizes.values(), default=0)
    return f"{100 * most / dense:.0f} %"


def _show(console: Console, name: str) -> None:
    cls = strategies.load_method(name)
    words = inspect.getdoc(importlib.import_module(cls.__module__)) or ""
    if console.is_terminal:
        console.print(Markdown(f"# {render_markdown(words)}"))
    else:  # a pipe or a file: unrendered
        console.print(words, markup=False, soft_wrap=True)
    console.print(_fields(cls))
    method = strategies.create_method(name)
    if not isinstance(method, PrivacyGuarantee) and not method.requests_raw_gradient:
        console.print(
            "Clients can train with noisy steps: dp.clip-norm, dp.noise-multiplier, dp.learning-rate, dp.epsilon",
            markup=False,
        )
    spec = method.adapter.example_spec()
    layout = method.layout(spec)
    console.print(_wire(layout, "down", spec))
    console.print(_wire(layout, "up", spec))


def _fields(cls: type[Method]) -> Table:
    table = Table("field", "type", "default", title='Fields (method.params = "name = value")')
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        table.add_row(field.name, str(field.type), _default(field))
    return table


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return repr(field.default_factory())
    return "required"


def _wire(layout: MessageLayout, direction: Direction, spec: Spec) -> Table:
    words = {"down": "server to client", "up": "client to server"}
    table = Table(title=f"On the wire, {words[direction]}, for a small model ({len(spec)} trained tensors)")
    table.add_column("field", no_wrap=True)
    for name in ("variant", "when", "codec", "shape", "unit"):
        table.add_column(name)
    table.add_column("bytes", justify="right")
    for field in layout.fields:
        if field.direction == direction:
            shape = [n for n in field.shape if n is not None]
            nbytes = f"{field.codec.nbytes(tuple(shape)):,}" if len(shape) == len(field.shape) else "varies"
            form = str(list(field.shape)).replace("None", "any")
            variants = ", ".join(field.variants) or "every"
            table.add_row(field.name, variants, field.when, field.codec.name, form, field.unit, nbytes)
    for word in layout.scalars:
        if word.direction == direction:
            table.add_row(word.name, "every", "always", "JSON", f"one of {', '.join(word.choices)}", "word", "-")
    return table


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]
