"""`fedveil merge`: writes a run's model as one folder of transformers.

Its changes are added to the base's weights: for LoRA, its Hadamard form and all weights. Tokenizer or processor are in
the folder. The weights are fp32, whatever the run computed in.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedveil.console.runs.folder import config_of
from fedveil.errors import ConfigError
from fedveil.records import files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run folder: <run.dir>/<run.name>")
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder that is new, or empty")
    parser.add_argument("--base", default="", metavar="MODEL", help="the base on this machine (default: task.model)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Writes the folder whole, or not at all."""
    config_of(args.folder)  # before torch: no run is said at once
    from fedveil.adapters import written
    from fedveil.console import final_model
    from fedveil.models import library

    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise ConfigError(f"OUT: expected a new or empty folder, found {args.out} with something in it; name another")
    merged = final_model.of(args.folder, args.base).merged()
    with library.quiet(), files.filled(args.out) as folder:
        written.whole(folder, merged)
    print(args.out)
    return 0
