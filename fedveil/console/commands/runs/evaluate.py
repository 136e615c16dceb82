"""`fedveil evaluate`: scores a run's model on your own examples.

It uses the server's final model, from RUN/final. Examples are read as in the run: the same columns, from a split of a
folder or from a file. The metrics are the run's own, but cover all examples, whereas the run itself scores at
most evaluate.eval-examples of its test data. Under evaluate.validation-share, examples like those that chose the model
are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.table import Table

from fedveil.console.runs.run_reader import config_of
from fedveil.console.terminal import make_console, say
from fedveil.sanitize import sanitize


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run folder: <run.dir>/<run.name>")
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="the examples: a folder or a file")
    parser.add_argument("--split", default="test", help="split of the folder (default: test)")
    parser.add_argument(
        "--eval-examples",
        type=int,
        metavar="N",
        help="number of examples to score (for texts, distinct sources); default: all",
    )
    parser.add_argument("--loss-only", action="store_true", help="skip text generation; report only loss-based metrics")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--base", default="", metavar="MODEL", help="path of the base model on this machine (default: task.model)"
    )
    parser.add_argument("--device", default="auto", help='"auto", "cpu" or "cuda" (default: auto)')
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the scores."""
    config_of(args.folder)  # before importing torch, so that a missing run is reported at once
    from fedveil.console.runs import final_model
    from fedveil.server_app.validation_split import read_test_split

    most = sys.maxsize if args.eval_examples is None else args.eval_examples
    model = final_model.load_final_model(args.folder, args.base, eval_examples=most)
    task, weights = model.task(args.device)
    divided = read_test_split(task, model.config, args.data, args.split)
    rows = divided.test
    scores = task.evaluate(weights, rows, generate=not args.loss_only)
    if args.json:
        print(json.dumps(scores))
        return 0
    scored = f"{len(rows):,} examples" if args.eval_examples is None else f"at most {most:,} of {len(rows):,} examples"
    where = f"{sanitize(args.data, 200)}, {sanitize(args.split, 80)}"
    say(f"{sanitize(args.folder.name, 80)} on {where}: {scored}")
    if said := divided.describe():
        say(said)
    listed = Table("metric")
    listed.add_column("value", justify="right")
    for name, value in scores.items():
        listed.add_row(name, f"{value:.4f}")
    make_console().print(listed)
    return 0
