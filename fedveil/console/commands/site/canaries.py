"""`fedveil canaries`: plants canaries in a site's examples, to bound epsilon from below.

The command reads the training examples in DATA and writes two folders. In OUT/data, some examples have another
example's target; OUT/secret lists them. The site trains on OUT/data as on any other data. People and
processes that train or serve the run must not read OUT/secret. After the run, `fedveil audit RUN --canaries
SITE=OUT` reports a lower bound on the run's epsilon. The training data loses two examples per
pair. Files that columns refer to, such as images, are not copied: put them at the same paths relative to OUT/data.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features

from fedveil.attacks.canaries import pairs
from fedveil.console.terminal import say
from fedveil.data import tables, units
from fedveil.data.columnar_files import is_columnar
from fedveil.data.split_files import split_files
from fedveil.errors import ConfigError
from fedveil.records.atomic_files import fill_folder
from fedveil.sanitize import sanitize


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("data", type=Path, metavar="DATA", help="the site's examples: a folder or a file")
    parser.add_argument("out", type=Path, metavar="OUT", help="a new or empty folder")
    parser.add_argument("--target-column", default="ref", metavar="NAME", help="as task.target-column (default: ref)")
    parser.add_argument("--pairs", type=int, default=200, metavar="N", help="number of canaries (default: 200)")
    parser.add_argument(
        "--unit-column",
        default="",
        metavar="NAME",
        help="as dp.unit-column: each canary is a whole unit (default: a row)",
    )
    parser.add_argument("--unit-rows", type=int, default=4, metavar="K", help="rows per such unit (default: 4)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the complete folder, or nothing."""
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise ConfigError(f"OUT: expected a new or empty folder, found {args.out}, which is not empty; name another")
    if not 0 < args.pairs <= pairs.MOST:
        raise ConfigError(f"--pairs: expected {pairs.LEAST} to {pairs.MOST}, found {args.pairs}")
    if not 1 <= args.unit_rows <= pairs.MOST_UNIT_ROWS:
        raise ConfigError(f"--unit-rows: expected 1 to {pairs.MOST_UNIT_ROWS}, found {args.unit_rows}")
    files = split_files(args.data, "train")
    rows = tables.read_table(files, (args.target_column,))
    coins = np.array([secrets.randbelow(2) == 1 for _ in range(args.pairs)])
    # Draw the choice from the operating system too: a predictable choice would reveal which examples are canaries.
    by_unit = None
    if args.unit_column:
        by_unit = units.group_ids(itertools.chain(*units.read_ids_of_files(files, args.unit_column)))
    unit_rows = args.unit_rows if args.unit_column else 1
    made = pairs.plant_canaries(list(rows), args.target_column, coins, random.SystemRandom(), by_unit, unit_rows)
    suffix = ".parquet" if is_columnar(files[0]) else ".jsonl"  # both formats keep texts unchanged
    with fill_folder(args.out) as folder:
        secret = folder / pairs.SECRET
        secret.mkdir(mode=0o700)
        (folder / pairs.DATA).mkdir()
        _write(made.train, rows.features, folder / pairs.DATA / f"train{suffix}")
        _write(made.first, rows.features, secret / f"{pairs.FIRST}{suffix}")
        _write(made.second, rows.features, secret / f"{pairs.SECOND}{suffix}")
        coin_bits = "".join("1" if coin else "0" for coin in coins)
        (secret / pairs.COINS).write_text(json.dumps({"coins": coin_bits, "rows": unit_rows}))
    out = sanitize(str(args.out), 300)
    say(f"{len(made.train)} examples with {args.pairs} canaries: {out}/{pairs.DATA}")
    say(f"The list of canaries: {out}/{pairs.SECRET}; hide it from everyone who trains.")
    say(f"After the run: fedveil audit RUN --canaries SITE={out}")
    return 0


def _write(rows: Sequence[Mapping[str, Any]], features: Features, file: Path) -> None:
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    else:
        Dataset.from_list([dict(row) for row in rows], features=features).to_parquet(str(file))
