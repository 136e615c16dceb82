"""Create the bundled demo data, data/e2e, from a folder with the E2E NLG train.jsonl and test.jsonl.

    python tools/make_demo_data.py --data <folder> --out data/e2e

Rows with a meaning representation that the tiny base has seen (`tiny.text_generation.is_public`) are excluded. The rest
are sorted by SHA-256, and the first ones are selected, so the choice is arbitrary but reproducible.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

from tools.tiny.text_generation import is_public, read_rows

Row = dict[str, str]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def train_rows(rows: list[Row], count: int) -> list[Row]:
    """Return `count` rows that the base has not seen."""
    unseen = [row for row in rows if not is_public(row["mr"])]
    return sorted(unseen, key=lambda row: _digest(row["mr"] + "\n" + row["ref"]))[:count]


def test_rows(rows: list[Row], sources: int, references: int) -> list[Row]:
    """Return the first distinct references, in file order, for each of `sources` unseen meaning representations."""
    unseen = {row["mr"]: list[str]() for row in rows if not is_public(row["mr"])}
    for row in rows:
        if row["mr"] in unseen and row["ref"] not in unseen[row["mr"]]:
            unseen[row["mr"]].append(row["ref"])
    chosen = sorted(unseen, key=_digest)[:sources]
    return [{"mr": mr, "ref": ref} for mr in chosen for ref in unseen[mr][:references]]


def write(rows: list[Row], file: Path) -> None:
    """Write one JSON object per line."""
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Extract the demo data from E2E NLG.")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--train", type=int, default=1550, help="training rows")
    parser.add_argument("--sources", type=int, default=150, help="test meaning representations")
    parser.add_argument("--references", type=int, default=100, help="maximum number of references for each of them")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    write(train_rows(read_rows(arguments.data / "train.jsonl"), arguments.train), arguments.out / "train.jsonl")
    test = test_rows(read_rows(arguments.data / "test.jsonl"), arguments.sources, arguments.references)
    write(test, arguments.out / "test.jsonl")


if __name__ == "__main__":
    main()
