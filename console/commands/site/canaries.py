"""`fedveil canaries`: puts canaries into a site's rows, to bound epsilon from below.

Takes DATA's rows for training and writes OUT/data, in which some places hold a row with another row's target, and
OUT/secret, which says which. The site trains on OUT/data as on any other rows; whoever trains or serves the run must
not read OUT/secret. After the run, `fedveil audit RUN --canaries SITE=OUT` says which epsilon the run shows at least.
Twice as many rows as pairs are given up. Columns that name other files need those beside OUT/data.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features

from fedveil.attacks.canaries import pairs
from fedveil.console.terminal import terminal
from fedveil.errors import ConfigError
from fedveil.foreign import shown
from fedveil.records.files import filled
from fedveil.rows import reading


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("data", type=Path, metavar="DATA", help="the site's folder or file of rows")
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder that is new, or empty")
    parser.add_argument("--target-column", default="ref", metavar="NAME", help="as task.target-column (default: ref)")
    parser.add_argument("--pairs", type=int, default=200, metavar="N", help="how many canaries (default: 200)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Writes the folder whole, or not at all."""
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise ConfigError(f"OUT: expected a new or empty folder, found {args.out} with something in it; name another")
    if not 0 < args.pairs <= pairs.MOST:
        raise ConfigError(f"--pairs: expected {pairs.LEAST} to {pairs.MOST}, found {args.pairs}")
    file = reading.split_file(args.data, "train")
    rows = reading.read(file, (args.target_column,))
    coins = np.array([secrets.randbelow(2) == 1 for _ in range(args.pairs)])
    # The choice is the system's too: who knows which rows are canaries could look for them.
    made = pairs.planted(list(rows), args.target_column, coins, random.SystemRandom())
    with filled(args.out) as folder:
        secret = folder / pairs.SECRET
        secret.mkdir(mode=0o700)
        (folder / pairs.DATA).mkdir()
        _write(made.train, rows.features, folder / pairs.DATA / f"train{file.suffix}")
        _write(made.first, rows.features, secret / f"{pairs.FIRST}{file.suffix}")
        _write(made.second, rows.features, secret / f"{pairs.SECOND}{file.suffix}")
        told = "".join("1" if coin else "0" for coin in coins)
        (secret / pairs.COINS).write_text(json.dumps({"coins": told}))
    out = shown(str(args.out), 300)
    say = terminal()
    say.print(f"{len(made.train)} rows with {args.pairs} canaries: {out}/{pairs.DATA}", soft_wrap=True)
    say.print(f"Which they are: {out}/{pairs.SECRET}; keep it from whoever trains.", soft_wrap=True)
    say.print(f"After the run: fedveil audit RUN --canaries SITE={out}", soft_wrap=True)
    return 0


def _write(rows: Sequence[Mapping[str, Any]], features: Features, file: Path) -> None:
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    else:
        Dataset.from_list([dict(row) for row in rows], features=features).to_parquet(str(file))
