"""`fedveil methods`: lists the methods, or shows one in full.

In full: its equations, what each side learns, its fields, and what it puts on the wire.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import math
import re
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from fedveil import strategies
from fedveil.console import measured
from fedveil.console.terminal import markdown
from fedveil.contract.budget import Claim
from fedveil.contract.layout import Direction, Layout
from fedveil.contract.method import Method
from fedveil.contract.spec import Spec

_FP32 = 4  # bytes
_COMPARED = (
    "down, up: the most bytes of a message's fields in any round, in % of the trained tensors in fp32, for a small "
    "model. In full: fedveil methods NAME"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("name", nargs="?", help="a method's name")
    parser.add_argument(
        "--table", action="store_true", help="which one? what is shared and stays, guarantee, bytes, figures"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the list or one method."""
    console = Console(highlight=False)
    if args.table:
        figures, whence = measured.committed()
        console.print(_compared(figures))
        console.print(f"{_COMPARED}\n{whence}", style="dim", markup=False)
        return 0
    if args.name is None:
        console.print(_list())
        console.print("One of them in full: fedveil methods NAME")
        return 0
    _show(console, args.name)
    return 0


def _list() -> Table:
    table = Table("name", "method", "in one line", "adapter")
    for name in strategies.names():
        cls = strategies.load(name)
        title = _first_line(inspect.getdoc(importlib.import_module(cls.__module__)))
        adapter = type(strategies.create(name).adapter).__name__
        table.add_row(name, title, _first_line(cls.__doc__), adapter)
    return table


def _compared(figures: Mapping[str, str]) -> Table:
    """A row a method: who has what and what is guaranteed, in its own words, bytes by its layout, and figures.

    `figures`: what was measured, by a method's title.
    """
    table = Table(show_lines=True)
    table.add_column("method", min_width=max(map(len, strategies.names())))
    for name in ("a client shares / stays with it", "the server learns", "guarantee"):
        table.add_column(name)
    for name in ("down", "up"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("measured")
    for name in strategies.names():
        doc = inspect.getdoc(importlib.import_module(strategies.load(name).__module__)) or ""
        words = " ".join(doc.split())
        method = strategies.create(name)
        spec = method.adapter.example_spec()
        layout = method.layout(spec)
        dense = sum(math.prod(tensor.shape) * _FP32 for tensor in spec.values())
        costs = [_part(layout, direction, dense) for direction in ("down", "up")]
        guarantee = "epsilon, in the modes that its page names" if isinstance(method, Claim) else "none by itself"
        parts = " / ".join(shared(words))
        learns = _sentence(words, "The server learns: ")
        table.add_row(name, parts, learns, guarantee, *costs, figures.get(_first_line(doc).rstrip("."), "-"))
    return table


def shared(words: str) -> tuple[str, str]:
    """What a client shares, and what stays with it, as a method's page says: README's table has the same."""
    return _sentence(words, "A client shares: "), _sentence(words, "With it stays: ")


def _sentence(words: str, head: str) -> str:
    """The sentence after `head`, "see its page" where a method of another package has none."""
    found = re.search(re.escape(head) + r"(.{1,300}?)(?=\. |\.$|$)", words)
    return found[1] if found else "see its page"


def _part(layout: Layout, direction: Direction, dense: int) -> str:
    """Bytes of a message's largest variant, in percent of all trained tensors in fp32."""
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
    cls = strategies.load(name)
    words = inspect.getdoc(importlib.import_module(cls.__module__)) or ""
    if console.is_terminal:
        console.print(Markdown(f"# {markdown(words)}"))
    else:  # a pipe, a file: as it stands in the code
        console.print(words, markup=False, soft_wrap=True)
    console.print(_fields(cls))
    method = strategies.create(name)
    if not isinstance(method, Claim) and not method.asks_gradient:
        console.print("Clients may train by noisy steps: dp.clip, dp.noise, dp.learning-rate, dp.epsilon", markup=False)
    spec = method.adapter.example_spec()
    layout = method.layout(spec)
    console.print(_wire(layout, "down", spec))
    console.print(_wire(layout, "up", spec))


def _fields(cls: type[Method]) -> Table:
    table = Table("field", "type", "default", title='Fields (method.fields = "name = value")')
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        table.add_row(field.name, str(field.type), _default(field))
    return table


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return repr(field.default_factory())
    return "required"


def _wire(layout: Layout, direction: Direction, spec: Spec) -> Table:
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
