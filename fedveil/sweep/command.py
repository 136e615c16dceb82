"""`fedveil sweep`: run one config over a grid of values and seeds, in one process.

It ends with a table of means and 95 % intervals over seeds, and a plot. Each run has its own folder under --out, which
`fedveil report` and `fedveil audit` can read. After Ctrl-C, the same command resumes the sweep: completed runs are not
repeated.

    fedveil sweep run.toml --site north=rows/north --site south=rows/south \\
        --grid train.learning-rate=1e-3,3e-3 --grid train.epochs=1,2 --seeds 3
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from fedveil.console.run_config_args import parse_overrides
from fedveil.console.terminal import make_console
from fedveil.errors import ConfigError

COMMAND_GROUP = "runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("config", type=Path, metavar="FILE", help="the run config, a TOML file with task.evaluation")
    parser.add_argument(
        "--site", action="append", default=[], metavar="NAME=FOLDER", help="a site and its examples; repeatable"
    )
    parser.add_argument("--sites", type=int, metavar="N", help="instead of --site: N sites that divide task.data")
    parser.add_argument(
        "--grid",
        action="append",
        default=[],
        metavar="KEY=V,V",
        help='values of a run config key; repeatable; use a list if values contain commas: \'KEY=["a, b", "c"]\'',
    )
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="runs per cell, with seeds 0 to N - 1")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="run config override; repeatable"
    )
    parser.add_argument("--metric", default="", help="the metric to plot (default: evaluate.metric)")
    parser.add_argument("--out", type=Path, default=Path("sweep"), metavar="FOLDER", help="default: sweep")
    parser.add_argument("--device", default="cpu", help='"cpu", "cuda" or "auto" (default: cpu)')
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the grid; print the table; write sweep.json and sweep.svg."""
    settings = parse_overrides(args.config, args.set)
    named = dict(_named(text) for text in args.site)
    if bool(named) == (args.sites is not None):
        raise ConfigError("--site: give either --site NAME=FOLDER for each site, or --sites N with task.data")
    from fedveil.local.config_rules import read_config  # these modules import torch
    from fedveil.records.atomic_files import write_atomic
    from fedveil.sweep.grid import Grid
    from fedveil.sweep.picture import sweep_svg
    from fedveil.sweep.sweep import run_sweep
    from fedveil.sweep.table import sweep_table

    console, grid = make_console(), Grid.from_texts(args.grid, args.seeds)
    config = read_config(settings)
    sites: Mapping[str, Path] | int = named or args.sites
    try:
        result = run_sweep(config, sites, grid, args.out, args.device, lambda text: console.print(text, soft_wrap=True))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"run the same command again to resume the sweep in {args.out}") from None
    metric = args.metric or config.evaluate.metric
    picture = args.out / "sweep.svg"
    svg = sweep_svg(result, metric).replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    write_atomic(picture, svg.encode())
    console.print(sweep_table(result))
    console.print(f"best mean {metric}: {result.best(metric).label}", soft_wrap=True)
    console.print(str(picture.absolute()), soft_wrap=True)
    return 0


def _named(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise ConfigError(
            f'--site: expected NAME=FOLDER, found "{text}"; give the site\'s name and the folder with its examples'
        )
    return name, Path(folder)
