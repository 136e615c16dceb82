"""List the committed results with the commit that each measured, and how many relevant commits came since.

    python tools/result_provenance.py

| column | meaning |
|---|---|
| state | clean; dirty, if the code had changes that no commit has ("+"); unknown, if the history lacks the commit |
| behind | commits since then that touch a file that the runner imports today, or its preset |

Imports, including those inside functions, are followed from the runner through fedveil and fedveil_bench. Methods are
loaded by name, so all of strategies/ counts. A renamed file counts only from its renaming on, so the number is a lower
bound.
"""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("fedveil", "fedveil_bench")
# These were measured before results required a clean tree and a commit on main. A result that is measured again is
# removed from these lists; nothing is added to them.
DIRTY = frozenset({
    "core_faults", "core_scale", "core_simulation", "dp_fpl_sites", "dp_fpl_table3", "fedqsn_adaptive",
    "fedqsn_private", "fedqsn_table2", "fedqsn_table3", "fedqsn_table5_cross_silo", "fedqsn_table6",
    "fedqsn_table8", "fedrand_quality", "fedrand_table3", "random_binary_accuracy", "secure_attacks",
    "secure_lying_server",
})  # fmt: skip
UNKNOWN = frozenset({"core_faults", "core_memory"})


@dataclass(frozen=True)
class ResultProvenance:
    """One result's provenance, with the columns above. `behind` is None if the history lacks the commit."""

    name: str
    preset: str
    commit: str
    is_dirty: bool
    is_known: bool
    behind: int | None

    @property
    def state(self) -> str:
        """Return the state in words."""
        words = [*(["dirty"] if self.is_dirty else []), *([] if self.is_known else ["unknown"])]
        return " and ".join(words) or "clean"


def read_provenance(root: Path, with_distance: bool = True) -> list[ResultProvenance]:
    """Return the provenance of all results in benchmarks/results; `with_distance` counts the commits behind."""
    history = read_history(root)
    found = []
    for file in sorted((root / "benchmarks" / "results").glob("*.json")):
        result = json.loads(file.read_text())
        commit = result["commit"].rstrip("+")
        is_known = commit in history
        behind = (
            count_behind(root, commit, list_measured(root, result["preset"])) if is_known and with_distance else None
        )
        found.append(
            ResultProvenance(file.stem, result["preset"], commit, result["commit"].endswith("+"), is_known, behind)
        )
    return found


def read_history(root: Path) -> frozenset[str]:
    """Return the commits in HEAD's history, abbreviated to 12 digits and, as in older results, to 7."""
    commits = (run_git(root, "rev-list", "HEAD") or "").split()
    return frozenset(commit[:digits] for commit in commits for digits in (7, 12))


def count_behind(root: Path, commit: str, files: list[str]) -> int:
    """Return the number of commits since `commit` that touch any of the files."""
    return int(run_git(root, "rev-list", "--count", f"{commit}..HEAD", "--", *files) or 0)


def list_measured(root: Path, preset: str) -> list[str]:
    """Return the files that a preset measures: its own file, the files that its runner imports, and the methods."""
    file = root / "benchmarks" / "presets" / f"{preset}.toml"
    content = tomllib.loads(file.read_text())
    like = content.get("like")
    inherited = list_measured(root, like) if like else []
    runner = content.get("runner")
    imported = list_imports(root, f"fedveil_bench.{runner}") if runner else []
    return sorted({file.relative_to(root).as_posix(), "strategies", *inherited, *imported})


@functools.cache
def list_imports(root: Path, module: str) -> list[str]:
    """Return the files of a module and of everything that it imports from PACKAGES, relative to the root."""
    files: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in files or (file := find_module(root, name)) is None:
            continue
        files[name] = file.resolve().relative_to(root.resolve()).as_posix()
        waiting += [name.rpartition(".")[0], *_named_modules(name, file)]
    return sorted(set(files.values()))


@functools.cache
def find_module(root: Path, name: str) -> Path | None:
    """Return the file of a module in PACKAGES; None if there is none, as for a class or another package."""
    if name.partition(".")[0] not in PACKAGES:
        return None
    for place in (root, root / "benchmarks"):
        path = place.joinpath(*name.split("."))
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return file
    return None


@functools.cache
def _named_modules(name: str, file: Path) -> tuple[str, ...]:
    """Return the dotted names in a file's import statements, which may be modules or what modules contain."""
    return tuple(_iterate_names(name if file.name == "__init__.py" else name.rpartition(".")[0], file))


def _iterate_names(package: str, file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=of, names=names, level=level):
                parts = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                base = ".".join([*parts, *([of] if of else [])])
                yield base
                yield from (f"{base}.{alias.name}" for alias in names)


def run_git(root: Path, *arguments: str) -> str | None:
    """Return what git prints, or None if it fails."""
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def main() -> int:
    """Print the table; return 1 without a git history."""
    if run_git(ROOT, "rev-parse", "HEAD") is None:
        print("error: this is not a git checkout", file=sys.stderr)
        return 1
    results = read_provenance(ROOT)
    width = max(len(result.name) for result in results)
    print(f"{'result':{width}}  {'commit':12}  {'state':17}  behind")
    for result in results:
        behind = "-" if result.behind is None else result.behind
        print(f"{result.name:{width}}  {result.commit:12}  {result.state:17}  {behind:>6}")
    dirty, unknown = sum(r.is_dirty for r in results), sum(not r.is_known for r in results)
    print(f"{len(results)} results: {dirty} dirty, {unknown} of a commit that the history lacks.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
