"""`fedveil merge`: writes a run's model as one folder of transformers.

Its changes are added to the base's weights: for LoRA, its Hadamard form and all weights. Tokenizer or processor are in
the folder. The weights are fp32, whatever the run computed in. The run's privacy card goes with them, and no signature,
for those are of the files in the run's own `final/`.
"""

from __future__ import annotations

import argparse
import shlex
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
    from fedveil.cards import written as cards
    from fedveil.cards.card import NAME, read
    from fedveil.console import final_model
    from fedveil.models import library

    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise ConfigError(f"OUT: expected a new or empty folder, found {args.out} with something in it; name another")
    final = args.folder / "final"
    card = read(final) if (final / NAME).exists() else None
    merged = final_model.of(args.folder, args.base).merged()
    with library.quiet(), files.filled(args.out) as folder:
        written.whole(folder, merged)
        if card:
            cards.write(folder, card)
    print(args.out)
    if card is None:
        print(
            f"without a privacy card, for the run has none; fedveil card make {shlex.quote(str(args.folder))} writes it"
        )
    return 0
