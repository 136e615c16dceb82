"""Count the core's public names and compare the counts with the project's targets.

    python tools/measure_names.py            # print the table
    python tools/measure_names.py --names    # also print each name that counts against a target

Public names are a module's top-level functions and classes that do not begin with an underscore. A word begins at an
underscore or a capital letter: `load_rows` and `RowLoader` have two.

| measure | target |
|---|---|
| functions with one-word names | at most 30 % |
| classes with one-word names | at most 25 % |
| class names in more than one module | 0 |
| functions, classes and modules named only by a participle | 0 |
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = ("fedveil", "strategies", "server_app", "client_app", "attacks")
BENCHMARKS = ("benchmarks/fedveil_bench",)  # measured separately: the targets apply to the core
PARTICIPLES = frozenset({
    "agreed", "asked", "closed", "deployed", "drawn", "found", "given", "gone", "held", "kept", "left", "looked",
    "made", "named", "opened", "received", "said", "sent", "served", "settled", "shown", "spent", "summed", "taken",
    "thrown", "told", "unseen", "used", "written",
})  # fmt: skip


@dataclass(frozen=True)
class PublicNames:
    """The public names in modules, each as "path:name".

    Attributes:
        functions, classes: those at a module's top level.
        modules: Python files and packages.
    """

    functions: list[str]
    classes: list[str]
    modules: list[str]


@dataclass(frozen=True)
class Measure:
    """A line in the table: the names that count against a target, the total number of names, and the maximum share."""

    text: str
    against: list[str]
    total: int
    target: float

    @property
    def is_met(self) -> bool:
        """Return whether the share is at most the target."""
        return len(self.against) <= self.target * self.total


def collect(root: Path, packages: Sequence[str]) -> PublicNames:
    """Return the public names in the packages' folders. Links are not followed: each leads to another package."""
    names = PublicNames([], [], [])
    for package in packages:
        for at, folders, files in os.walk(root / package):
            folder = Path(at)
            folders[:] = sorted(
                f for f in folders if not (folder / f).is_symlink() and not f.startswith((".", "__", "stock_"))
            )
            for file in sorted(f for f in files if f.endswith(".py")):
                path = folder / file
                where = path.relative_to(root).as_posix()
                if path.stem != "__init__":
                    names.modules.append(f"{where}:{path.stem}")
                elif folder != root / package:
                    names.modules.append(f"{where}:{folder.name}")
                for node in ast.parse(path.read_text(encoding="utf-8")).body:
                    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name[0] != "_":
                        of_kind = names.classes if isinstance(node, ast.ClassDef) else names.functions
                        of_kind.append(f"{where}:{node.name}")
    return names


def count_words(name: str) -> int:
    """Return the number of words: `load_rows`, `RowLoader` and `DpSgd` have two, `PEFT` has one."""
    return len([word for part in name.split("_") for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", part)])


def measure(names: PublicNames) -> list[Measure]:
    """Return the lines for the table."""
    bare = lambda where: where.rpartition(":")[2]  # noqa: E731
    occurrences = Counter(map(bare, names.classes))
    every = [*names.functions, *names.classes, *names.modules]
    return [
        Measure("functions with a name of one word", [n for n in names.functions if count_words(bare(n)) == 1],
                len(names.functions), 0.30),
        Measure("classes with a name of one word", [n for n in names.classes if count_words(bare(n)) == 1],
                len(names.classes), 0.25),
        Measure("classes whose name another module has too", [n for n in names.classes if occurrences[bare(n)] > 1],
                len(names.classes), 0.0),
        Measure("functions, classes and modules named by a participle",
                [n for n in every if bare(n).lower() in PARTICIPLES], len(every), 0.0),
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; with --check, return 1 if the core misses a target."""
    parser = argparse.ArgumentParser(prog="python tools/measure_names.py", description=__doc__.splitlines()[0])
    parser.add_argument("--names", action="store_true", help="list each name that counts against a target")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the core misses a target")
    args = parser.parse_args(argv)
    core, benchmarks = (measure(collect(ROOT, packages)) for packages in (CORE, BENCHMARKS))
    for title, lines in (("the core", core), ("the benchmarks", benchmarks)):
        print(f"{title}:")
        for line in lines:
            _print(line, args.names)
    return int(args.check and not all(line.is_met for line in core))


def _print(line: Measure, with_names: bool) -> None:
    share, verdict = len(line.against) / max(1, line.total), "met" if line.is_met else "missed"
    print(f"  {line.text}: {len(line.against)} of {line.total} ({share:.0%}); at most {line.target:.0%}: {verdict}")
    if with_names:
        print("".join(f"    {name}\n" for name in line.against), end="")


if __name__ == "__main__":
    sys.exit(main())
