"""`fedveil methods`: lists all methods, or shows one in detail.

The details are a method's equations, what each side learns, its parameters, and its messages.

`--for` lists only the methods for an adapter (lora, hadamard-lora, residual-lora, all, prompt, prefix), for a task such
as text-generation, or for text or images, whose tasks are clip-prompt, image-classification and vision-language.

`--json` prints one JSON object for other programs:

| field | value |
|---|---|
| format | 1; a field changes its name or meaning only with this number |
| methods | a list |

A method has name, title, summary, adapters, tasks, client_shares, client_keeps, server_learns, guarantee ("epsilon" or
"none"), down_percent and up_percent (the largest total size of a message's fields in any round, as % of the fp32
trained tensors of a small model; null if it varies), and columns, the texts of installed packages by column.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json
import math
import re
import typing
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from fedveil import strategies, tasks
from fedveil.console.terminal import render_markdown, say
from fedveil.contract.layout import Direction, MessageLayout
from fedveil.contract.method import Method
from fedveil.contract.param_spec import Spec
from fedveil.contract.privacy import PrivacyGuarantee
from fedveil.errors import ConfigError
from fedveil.plugins import find_entry_point, load_entry_point
from fedveil.sanitize import sanitize, suggest_name

_FP32 = 4  # bytes
_NO_PAGE = "see its page"
_COLUMNS = "fedveil.method_columns"  # the entry-point group
JSON_FORMAT = 1
_NO_FIGURES = "figures: fedveil-bench is not installed (in a checkout: `make bench`); docs/results.md has them"
_COMPARED = (
    "tasks: t text, i images, o own model. keeps: whether a part of the model stays at the site. down, up: the largest "
    "total size of a message's fields in any round, as % of the fp32 trained tensors of a small model."
)
_NEXT = "What a client shares, what the server learns, parameters and messages: fedveil methods NAME"
_TEXT = ("preference", "text-classification", "text-generation", "token-classification")
_IMAGES = ("clip-prompt", "image-classification", "vision-language")
_FAMILIES = {"text": _TEXT, "images": _IMAGES}
_LETTERS = {"t": _TEXT, "i": _IMAGES, "o": ("own-model",)}


@dataclasses.dataclass(frozen=True)
class MethodFacts:
    """A method's facts, as in the JSON of `fedveil methods`; the command's help describes the fields."""

    name: str
    title: str
    summary: str
    adapters: Sequence[str]
    tasks: Sequence[str]
    client_shares: str
    client_keeps: str
    server_learns: str
    guarantee: str
    down_percent: int | None
    up_percent: int | None
    columns: Mapping[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("name", nargs="?", help="a method's name")
    parser.add_argument(
        "--table", action="store_true", help="compare all methods, one per line: adapters, tasks, guarantee, bytes"
    )
    parser.add_argument(
        "--for",
        dest="purpose",
        default="",
        metavar="WHAT",
        help="only methods for an adapter (lora), a task (clip-prompt), text or images",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for other programs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the list or one method."""
    names = [args.name] if args.name else strategies.list_methods()
    if args.purpose:
        names = filter_methods(names, args.purpose)
    if args.json:
        columns = {name: cells for name, (cells, _) in _installed_columns().items()}
        facts = [dataclasses.asdict(method_facts(name, columns)) for name in names]
        print(json.dumps({"format": JSON_FORMAT, "methods": facts}, indent=1, allow_nan=False))
        return 0
    if args.table:
        installed = _installed_columns()
        for line in table_lines([method_facts(name) for name in names]):
            say(line)
        say(_COMPARED)
        for cells, caption in installed.values():
            _say_column(cells, caption, names)
        if not installed:
            say(_NO_FIGURES)
        say(_NEXT)
        return 0
    if args.name is None or args.purpose:
        _say_list(names)
        say("For details on a method: fedveil methods NAME")
        return 0
    _show(Console(highlight=False), args.name)
    return 0


def filter_methods(names: Sequence[str], purpose: str) -> list[str]:
    """Return the methods among `names` that can train with an adapter, or for a task, or for text or images.

    Raises:
        ConfigError: `purpose` is none of these.
    """
    every_kind = {adapter.kind for name in strategies.list_methods() for adapter in _adapters(name)}
    wanted = _FAMILIES.get(purpose, (purpose,))
    if purpose in every_kind:
        return [name for name in names if purpose in _kinds(name)]
    if not set(wanted) <= set(tasks.list_tasks()):
        known = sorted({*every_kind, *_FAMILIES, *tasks.list_tasks()})
        raise ConfigError(
            f"--for: found {sanitize(purpose, 80)!r}; {suggest_name(purpose, known)}expected one of {', '.join(known)}"
        )
    return [name for name in names if set(wanted) & set(_tasks(name))]


def _adapters(name: str) -> list[Any]:
    """Return the classes of adapters that a method accepts."""
    hint = typing.get_type_hints(strategies.load_method(name)).get("adapter")
    return list(typing.get_args(hint)) or [hint or type(strategies.create_method(name).adapter)]


def _kinds(name: str) -> list[str]:
    """Return the kinds of adapters that a method accepts, the default first."""
    default = strategies.create_method(name).adapter.kind
    return [default, *(adapter.kind for adapter in _adapters(name) if adapter.kind != default)]


def _tasks(name: str) -> list[str]:
    """Return the tasks whose models offer what one of the method's adapters needs."""
    mounts = {adapter.mount for adapter in _adapters(name)}
    return [task for task in tasks.list_tasks() if mounts & set(tasks.task_info(task).mounts)]


def _say_list(names: Sequence[str]) -> None:
    """Print each method with its title and its purpose."""
    for name in names:
        cls = strategies.load_method(name)
        title = _first_line(inspect.getdoc(importlib.import_module(cls.__module__))).rstrip(".")
        adapter = strategies.create_method(name).adapter.kind
        say(f"{name:<16} {title} ({adapter}): {_first_line(cls.__doc__)}", hang=17)


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


def _say_column(cells: Mapping[str, str], caption: str, names: Sequence[str]) -> None:
    """Print a package's texts about methods under the table, since they take more than a column."""
    say(f"\n{caption}")
    for method in names:
        if cell := cells.get(_title(method)):
            say(f"{method:<16} {cell}", hang=17)


def method_facts(name: str, columns: Mapping[str, Mapping[str, str]] = MappingProxyType({})) -> MethodFacts:
    """Return a method's facts; `columns` maps each column name to its cells by method title."""
    cls, method = strategies.load_method(name), strategies.create_method(name)
    words = " ".join((inspect.getdoc(importlib.import_module(cls.__module__)) or "").split())
    spec = method.adapter.example_spec()
    layout = method.layout(spec)
    dense = sum(math.prod(tensor.shape) * _FP32 for tensor in spec.values())
    down, up = (_percent(layout, direction, dense) for direction in ("down", "up"))
    shares, keeps = shared_and_kept(words)
    title = _title(name)
    return MethodFacts(
        name, title, _first_line(cls.__doc__), _kinds(name), _tasks(name), shares, keeps,
        _sentence(words, "The server learns: "), "epsilon" if isinstance(method, PrivacyGuarantee) else "none",
        down, up, {column: cells[title] for column, cells in columns.items() if title in cells},
    )  # fmt: skip


def table_lines(facts: Sequence[MethodFacts]) -> list[str]:
    """Return the table's head and one line per method, each within 80 columns."""
    lines = [_line("method", "adapters", "tasks", "keeps", "guarantee", "down %", "up %")]
    for one in facts:
        letters = "".join(letter for letter, names in _LETTERS.items() if set(names) & set(one.tasks))
        keeps = "no" if one.client_keeps.startswith("nothing") else "?" if one.client_keeps == _NO_PAGE else "yes"
        others = len(one.adapters) - 1
        kinds = one.adapters[0] + (f" (or {others} others)" if others > 1 else ", ".join(["", *one.adapters[1:]]))
        sizes = ("varies" if size is None else str(size) for size in (one.down_percent, one.up_percent))
        lines.append(_line(one.name, kinds, letters, keeps, one.guarantee, *sizes))
    return lines


def _line(name: str, adapters: str, letters: str, keeps: str, guarantee: str, down: str, up: str) -> str:
    return f"{name:<16} {adapters:<24} {letters:<5} {keeps:<5} {guarantee:<9} {down:>6} {up:>6}"


def _title(name: str) -> str:
    """Return a method's title, the first line of its module."""
    return _first_line(inspect.getdoc(importlib.import_module(strategies.load_method(name).__module__))).rstrip(".")


def shared_and_kept(words: str) -> tuple[str, str]:
    """Return what a client shares and what it keeps, as stated on the method's page and in docs/methods.md."""
    return _sentence(words, "A client shares: "), _sentence(words, "A client keeps: ")


def _sentence(words: str, head: str) -> str:
    """Return the sentence after `head`, or a placeholder for a method from another package without this sentence."""
    match = re.search(re.escape(head) + r"(.{1,300}?)(?=\. |\.$|$)", words)
    return match[1] if match else _NO_PAGE


def _percent(layout: MessageLayout, direction: Direction, dense: int) -> int | None:
    """Return the size of a message's largest variant, as % of all trained tensors in fp32; None if it varies."""
    sizes: dict[str, int] = {}
    for field in layout.fields:
        if field.direction == direction:
            if None in field.shape:
                return None
            nbytes = field.codec.nbytes(tuple(n for n in field.shape if n is not None))
            for variant in field.variants or ("",):
                sizes[variant] = sizes.get(variant, 0) + nbytes
    most = sizes.pop("", 0) + max(sizes.values(), default=0)
    return round(100 * most / dense)


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
