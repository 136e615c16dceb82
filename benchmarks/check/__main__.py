"""Check all committed results and docs/results.md, and print a table; exit with 1 if anything differs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.check import page, report, result_file

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 if a recomputed figure, interval or verdict differs from the one in the files, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.check", description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", metavar="FOLDER")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results.md", metavar="FILE")
    asked = parser.parse_args(arguments)
    results = {file.stem: json.loads(file.read_text()) for file in sorted(asked.results.glob("*.json"))}
    if not results:
        parser.error(f"--results: expected JSON files, found none in {asked.results}")
    checks = [result_file.check_result(name, result, asked.results) for name, result in results.items()]
    checks.append(page.check_page(asked.page.read_text(), results))
    sys.stdout.write(report.format_table(checks))
    return 1 if any(check.mismatches for check in checks) else 0


if __name__ == "__main__":
    sys.exit(main())
