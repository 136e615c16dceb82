"""`fedveil bench`: runs a benchmark beside its paper's numbers.

A benchmark is one of the presets that --list names. Its result also goes to a JSON file. With --dry-run nothing runs:
it says what is missing, and how long the preset took where it ran last.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedveil import places
from fedveil.benchmarks import ready
from fedveil.benchmarks import run as benchmarks
from fedveil.console.flower import local_federation
from fedveil.console.flower.simulation import LocalSimulation
from fedveil.errors import ConfigError

_METRICS = 6  # a table: more columns break their numbers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("preset", nargs="?", help='"<paper>/<table>"')
    parser.add_argument("--list", action="store_true", help="list the presets")
    parser.add_argument(
        "--dry-run", action="store_true", help="check data, packages and device, of all presets where none is named"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--small", dest="form", action="store_const", const="small",
        help="with the bundled base: what docs/results.md shows of tables whose full form wants a GPU",
    )  # fmt: skip
    form.add_argument(
        "--quick", dest="form", action="store_const", const="quick", help="see it work, in less than four minutes"
    )
    parser.add_argument("--seeds", type=int, default=0, metavar="N", help="number of seeds; default: the preset's own")
    parser.add_argument(
        "--minutes", type=float, metavar="N",
        help="begin no further training after N minutes, and make the table of what there is; 0: of earlier runs alone",
    )  # fmt: skip
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="file for the JSON; default: in benchmarks/results/, or results/; --quick beside --small: in quick/ there",
    )
    parser.set_defaults(run=run, form="full")


def run(args: argparse.Namespace) -> int:
    """Lists the presets, or runs one."""
    console = Console(highlight=False)
    console.width = max(console.width, 160)  # a table that breaks its numbers helps nobody
    if args.list:
        console.print("\n".join(benchmarks.names()) or "no presets", markup=False)
        return 0
    if args.seeds < 0:
        raise ConfigError(f"--seeds: expected 0 or more, found {args.seeds}")
    if args.minutes is not None and not args.minutes >= 0:
        raise ConfigError(f"--minutes: expected 0 or more, found {args.minutes:g}")
    if args.dry_run:
        return _dry_run(args, console)
    if args.preset is None:
        raise ConfigError(f"preset: expected one of {benchmarks.names()}, found none; name one")
    file: Path = args.out or _file(args.preset, args.form)
    options = benchmarks.Options(
        form=args.form,
        seeds=args.seeds,
        device=args.device,
        launch=local_federation,
        simulation=LocalSimulation,
        say=lambda text: console.print(text, markup=False, style="dim"),
        pieces=file.with_suffix(".pieces.jsonl"),
        minutes=args.minutes,
    )
    if args.minutes != 0:  # else nothing is trained, and a table of earlier runs may need no rows
        ready.require(args.preset, options)
    result, files = benchmarks.run_preset(args.preset, options)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")
    for shown in tables(result):
        console.print(shown)
    for line in [*result.get("verdicts", []), *(f"Differs from the paper: {d}" for d in result["differences"])]:
        console.print(f"- {line}", markup=False)
    for suffix, content in files.items():
        (beside := file.with_suffix(f".{suffix}")).write_bytes(content)
        console.print(f"Beside it: {beside}", soft_wrap=True)
    console.print(f"Result: {file}", soft_wrap=True)
    return 0


def _dry_run(args: argparse.Namespace, console: Console) -> int:
    """1 where something is missing, else 0."""
    lacks = 0
    options = benchmarks.Options(form=args.form, seeds=args.seeds, device=args.device)
    every = [name for name in benchmarks.names() if args.form in benchmarks.forms(name)]
    for name in [args.preset] if args.preset else every:
        found = ready.look(name, options, _results())
        console.print(f"{_command(name, args)}: {'NOT READY' if found.missing else 'ready'}", markup=False)
        for line in [*found.there, *(f"MISSING {text}" for text in found.missing), found.time]:
            console.print(f"  {line}", markup=False, soft_wrap=True)
        lacks += bool(found.missing)
    return 1 if lacks else 0


def _command(name: str, args: argparse.Namespace) -> str:
    seeds = f" --seeds {args.seeds}" if args.seeds else ""
    device = "" if args.device == "auto" else f" --device {args.device}"
    form = "" if args.form == "full" else f" --{args.form}"
    return f"fedveil bench {name}{form}{seeds}{device}"


def _file(name: str, form: benchmarks.Form) -> Path:
    """Where a result goes. One that is there to see a preset work must not take the place of a measured one."""
    trial = form == "quick" and "small" in benchmarks.read(name, form)
    return _results() / ("quick" if trial else "") / f"{name.replace('/', '_')}.json"


def _results() -> Path:
    """Beside the committed results in a checkout, in the working directory elsewhere."""
    at = places.checkout()
    return at / "benchmarks" / "results" if at else Path("results")


def tables(result: Mapping[str, Any]) -> list[Table]:
    """The rows, a table for every few metrics: mean [low, high], and what the paper reports."""
    rows = result["rows"]
    metrics = list(dict.fromkeys(name for row in rows for name in row.get("metrics", {})))
    parts = [metrics[i : i + _METRICS] for i in range(0, len(metrics), _METRICS)] or [[]]
    return [_table(result, part, part is parts[0]) for part in parts]


def _table(result: Mapping[str, Any], metrics: Sequence[str], first: bool) -> Table:
    rows, paper = result["rows"], result.get("paper", {})
    if not first:
        rows = [row for row in rows if any(name in row.get("metrics", {}) for name in metrics)]
    counts = [
        key
        for key in ("upload_bytes", "download_bytes", "rounds", "seconds")
        if first and any(key in row for row in rows)
    ]
    form = "" if result["form"] == "full" else f" ({result['form']})"
    shown = Table("row", title=f"{result['preset']}{form}: {result.get('title', '')}")
    for name in [*metrics, *(key.replace("_", " ") for key in counts)]:
        shown.add_column(name, justify="right")
    for row in rows:
        reported = paper.get(row["name"], {})
        cells = [_cell(row.get("metrics", {}).get(name), reported.get(name)) for name in metrics]
        shown.add_row(row["name"], *cells, *(_count(row.get(key)) for key in counts))
    return shown


def _cell(metric: Mapping[str, float] | None, paper: float | None) -> str:
    text = "-"
    if metric:
        text = f"{metric['mean']:.4g}"
        if metric["n"] > 1:
            text += f" \\[{metric['low']:.4g}, {metric['high']:.4g}]"
    return text if paper is None else f"{text}\npaper {paper:g}"


def _count(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"
