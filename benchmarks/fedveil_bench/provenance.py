"""The commit that a benchmark measures, and the rule for results that are committed to the repository.

A committed result names a commit that others can check out: its tree was clean, and it belongs to main's history. Files
in benchmarks/results do not count as changes, because a run writes its results there.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from fedveil.errors import ConfigError
from fedveil_bench import folders

_RESULTS = "benchmarks/results"
_MAIN = ("main", "origin/main")
TRIALS = "quick"  # the folder in benchmarks/results for trials, which are not committed
_FREE = (TRIALS, "gpu")  # a GPU machine often has a copy without git, which the commit field of its results shows


def measured_commit(root: Path | None = None) -> str:
    """Return the commit that is checked out, followed by "+" if any code differs from it; empty without git."""
    root = root or folders.checkout_folder()
    commit = _git(root, "rev-parse", "--short=12", "HEAD") if root else ""
    return f"{commit}+" if root and commit and find_changes(root) else commit


def find_changes(root: Path) -> list[str]:
    """Return the files that differ from the commit or are not in it, except results and ignored files."""
    status = _git(root, "status", "--porcelain", "--untracked-files=all", "--", ".", f":(exclude){_RESULTS}")
    return [line[3:] for line in status.splitlines()]


def is_in_main(root: Path, commit: str) -> bool:
    """Return whether a commit belongs to the history of main."""
    return any(
        subprocess.run(
            ["git", "-C", str(root), "merge-base", "--is-ancestor", commit, branch], capture_output=True, check=False
        ).returncode
        == 0
        for branch in _MAIN
    )


def require_provenance(file: Path, root: Path | None = None) -> None:
    """Check that a result may be written to `file`; outside benchmarks/results, and in quick/ and gpu/, it always may.

    Raises:
        ConfigError: the tree has changes, or the commit is not in the history of main.
    """
    root = root or folders.checkout_folder()
    results = root / _RESULTS if root else None
    parents = file.absolute().parents
    if root is None or results is None or results not in parents or any(results / free in parents for free in _FREE):
        return
    if not (commit := _git(root, "rev-parse", "--short=12", "HEAD")):
        raise ConfigError(f"result {file.name}: expected a git checkout, found none; write elsewhere with --out")
    if changes := find_changes(root):
        raise ConfigError(
            f"result {file.name}: expected the code of a commit, found {len(changes)} changed files, such as "
            f"{changes[0]}; commit them, or write elsewhere with --out"
        )
    if not any(_git(root, "rev-parse", "--verify", "--quiet", branch) for branch in _MAIN):
        raise ConfigError(f"result {file.name}: expected a clone with main, found none; write elsewhere with --out")
    if not is_in_main(root, commit):
        raise ConfigError(
            f"result {file.name}: expected a commit in the history of main, found {commit}; merge it first, or write "
            "elsewhere with --out"
        )


def _git(root: Path | None, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:  # without the git program, no commit can be named
        return ""
    return done.stdout.rstrip("\n") if done.returncode == 0 else ""
