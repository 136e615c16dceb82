"""`fedveil bench`: runs a benchmark and compares it with the numbers in its paper.

--list lists the benchmarks; each is a preset. The result is also written to a JSON file. With --dry-run nothing is run:
the command shows what is missing, and how long the preset took the last time.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedveil.errors import ConfigError
from fedveil_bench import folders, provenance, requirements
from fedveil_bench import runner as benchmarks

COMMAND_GROUP = "getting_started"

_METRICS = 6  # maximum number of metrics per table: with more columns, numbers would wrap


class LazyModule:
    """A module that is imported when an attribute is first accessed.

    A GPU machine may lack modules for starting a federation, such as grpc, which the GPU presets do not need.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


def create_simulation(*args: Any, **kwargs: Any) -> Any:
    """Create a `fedveil.testing.simulation.LocalSimulation`, which is imported only now."""
    return LazyModule("fedveil.testing.simulation").LocalSimulation(*args, **kwargs)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("preset", nargs="?", help='"<paper>/<table>"')
    parser.add_argument("--list", action="store_true", help="list the presets")
    parser.add_argument(
        "--dry-run", action="store_true", help="check data, packages and device, for all presets if none is named"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--small", dest="form", action="store_const", const="small",
        help="run with the bundled base, as in docs/results.md for tables whose full form needs a GPU",
    )  # fmt: skip
    form.add_argument(
        "--quick", dest="form", action="store_const", const="quick", help="run a short trial, in less than four minutes"
    )
    parser.add_argument("--seeds", type=int, default=0, metavar="N", help="number of seeds; default: the preset's own")
    parser.add_argument(
        "--minutes", type=float, metavar="N",
        help=
            "start no further training after N minutes, and make the table from the results so far; 0: from "
            "earlier runs only",
    )  # fmt: skip
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="file for the JSON; default: in benchmarks/results/, or results/; --quick of a preset with --small: in "
        "quick/ there. A result in benchmarks/results/ needs a clean tree and a commit of main",
    )
    parser.set_defaults(run=run_command, form="full")


def run_command(args: argparse.Namespace) -> int:
    """List the presets, or run one."""
    console = Console(highlight=False)
    console.width = max(console.width, 160)  # a table with wrapped numbers would be unreadable
    if args.list:
        console.print("\n".join(benchmarks.list_presets()) or "no presets", markup=False)
        return 0
    if args.seeds < 0:
        raise ConfigError(f"--seeds: expected 0 or more, found {args.seeds}")
    if args.minutes is not None and not args.minutes >= 0:
        raise ConfigError(f"--minutes: expected 0 or more, found {args.minutes:g}")
    if args.dry_run:
        return _dry_run(args, console)
    if args.preset is None:
        raise ConfigError(f"preset: expected one of {benchmarks.list_presets()}, found none; name one")
    benchmarks.read_preset(args.preset, args.form)  # so that an error about a wrong name comes first
    file: Path = args.out or _file(args.preset, args.form)
    provenance.require_provenance(file)
    options = benchmarks.BenchOptions(
        form=args.form,
        seeds=args.seeds,
        device=args.device,
        launch=LazyModule("fedveil.testing.deployment"),
        simulation=create_simulation,
        say=lambda text: console.print(text, markup=False, style="dim"),
        pieces=file.with_suffix(".pieces.jsonl"),
        minutes=args.minutes,
    )
    if args.minutes != 0:  # with 0 nothing is trained, and a table from earlier runs may need no data
        requirements.require_ready(args.preset, options)
    result, files = benchmarks.run_preset(args.preset, options)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")
    for table in result_tables(result):
        console.print(table)
    for line in [*result.get("verdicts", []), *(f"Differs from the paper: {d}" for d in result["differences"])]:
        console.print(f"- {line}", markup=False)
    for suffix, content in files.items():
        (beside := file.with_suffix(f".{suffix}")).write_bytes(content)
        console.print(f"Also written: {beside}", soft_wrap=True)
    console.print(f"Result: {file}", soft_wrap=True)
    return 0


def _dry_run(args: argparse.Namespace, console: Console) -> int:
    """Return 1 if something is missing, otherwise 0."""
    lacks = 0
    options = benchmarks.BenchOptions(form=args.form, seeds=args.seeds, device=args.device)
    every = [name for name in benchmarks.list_presets() if args.form in benchmarks.check_forms(name)]
    for name in [args.preset] if args.preset else every:
        readiness = requirements.check_ready(name, options, _results())
        console.print(f"{_command(name, args)}: {'NOT READY' if readiness.missing else 'ready'}", markup=False)
        for line in [*readiness.there, *(f"MISSING {text}" for text in readiness.missing), readiness.time]:
            console.print(f"  {line}", markup=False, soft_wrap=True)
        lacks += bool(readiness.missing)
    return 1 if lacks else 0


def _command(name: str, args: argparse.Namespace) -> str:
    seeds = f" --seeds {args.seeds}" if args.seeds else ""
    device = "" if args.device == "auto" else f" --device {args.device}"
    form = "" if args.form == "full" else f" --{args.form}"
    return f"fedveil bench {name}{form}{seeds}{device}"


def _file(name: str, form: benchmarks.Form) -> Path:
    """Return the path of the result. A preset's quick run must not overwrite a measured result."""
    trial = form == "quick" and "small" in benchmarks.read_preset(name, form)
    return _results() / (provenance.TRIALS if trial else "") / f"{name.replace('/', '_')}.json"


def _results() -> Path:
    """Return the results folder: the committed results in a checkout, otherwise a folder in the working directory."""
    return folders.results_folder() or Path("results")


def result_tables(result: Mapping[str, Any]) -> list[Table]:
    """Return the rows as tables with a few metrics each: mean [low, high], and the paper's value."""
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
    table = Table("row", title=f"{result['preset']}{form}: {result.get('title', '')}")
    for name in [*metrics, *(key.replace("_", " ") for key in counts)]:
        table.add_column(name, justify="right")
    for row in rows:
        reported = paper.get(row["name"], {})
        cells = [_cell(row.get("metrics", {}).get(name), reported.get(name)) for name in metrics]
        table.add_row(row["name"], *cells, *(_count(row.get(key)) for key in counts))
    return table


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
