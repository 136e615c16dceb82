"""`fedveil merge`: writes a run's model as a single transformers folder.

The run's changes are added to the base weights; this works for LoRA, its Hadamard form, and full weights.
The folder includes the tokenizer or processor. The weights are fp32, regardless of the run's compute
precision. The run's privacy card is copied too, but not its signatures, which cover the files in the run's
own `final/`.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from fedveil.console.runs.run_reader import config_of
from fedveil.console.terminal import say
from fedveil.errors import ConfigError
from fedveil.records import atomic_files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run folder: <run.dir>/<run.name>")
    parser.add_argument("out", type=Path, metavar="OUT", help="a new or empty folder")
    parser.add_argument(
        "--base", default="", metavar="MODEL", help="path of the base model on this machine (default: task.model)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the complete folder, or nothing."""
    config_of(args.folder)  # before importing torch, so that a missing run is reported at once
    from fedveil.adapters import export
    from fedveil.cards import collect as cards
    from fedveil.cards.card import NAME, read_card
    from fedveil.console.runs import final_model
    from fedveil.models import library_logging

    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise ConfigError(f"OUT: expected a new or empty folder, found {args.out}, which is not empty; name another")
    final = args.folder / "final"
    card = read_card(final) if (final / NAME).exists() else None
    merged = final_model.load_final_model(args.folder, args.base).merged()
    with library_logging.quiet_libraries(), atomic_files.fill_folder(args.out) as folder:
        export.write_merged(folder, merged)
        if card:
            cards.write_card(folder, card)
    print(args.out)
    if card is None:
        say(
            "there is no privacy card, because the run has none; "
            f"fedveil card make {shlex.quote(str(args.folder))} writes one"
        )
    return 0
