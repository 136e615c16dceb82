"""Break the code deliberately, in one place at a time, and report the changes that no test detects.

    make mutate PACKAGE=ops ARGS="--sample 40 --seed 1"
    python tools/mutate.py --code fedveil/mean.py --tests tests/fedveil/test_mean.py --sample 10

cosmic-ray creates the mutants. This file runs them, because cosmic-ray's runner counts a timeout as a kill and mutates
the working tree itself. Here each worker has a copy of the files that git tracks or does not ignore. A mutant in `x.py`
runs `test_x.py` first, and then the package's other tests. Annotations and lines that begin with an entry of _IDLE are
not mutated. A sample has one mutant per place.

Two controls come first: the tests must pass on the unmodified code, and must fail if a file raises an error on import,
which would not happen if they imported an installed copy.
"""

import argparse
import ast
import contextlib
import difflib
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

EVERY = "not slow and not gpu and not containers and not browser"  # including those marked long
ROOT = Path(__file__).parent.parent
ROOMS = {  # name: (its code, its tests)
    "strategies": (["strategies"], ["tests/strategies", "tests/contract"]),
    "ops": (["fedveil/ops"], ["tests/fedveil/ops", "tests/contract"]),
    "wire": (["fedveil/wire"], ["tests/fedveil/wire", "tests/contract"]),
    "privacy": (["fedveil/privacy"], ["tests/fedveil/privacy", "tests/contract"]),
    "guard": (["fedveil/guard", "fedveil/relay"], ["tests/fedveil/guard", "tests/fedveil/relay"]),
    "client_app": (["client_app"], ["tests/client_app"]),
    "server_app": (["server_app"], ["tests/server_app"]),
    "secagg": (["fedveil/federation/secagg"], ["tests/fedveil/federation/secagg"]),
}
_IDLE = ("@final", "@abstractmethod", "@override", "if TYPE_CHECKING")


class Mutant(NamedTuple):
    """One occurrence of a cosmic-ray operator; `path` is relative to the checkout."""

    path: str
    place: tuple[int, int]
    operator: str
    occurrence: int

    def code(self) -> str:
        """Return the whole file, mutation applied."""
        return str(mutate_code((ROOT / self.path).read_text(), get_operator(self.operator)(), self.occurrence))


def mutants(path: Path) -> Iterator[Mutant]:
    """Yield every mutant of a file with an effect that a test could detect."""
    source = path.read_text()
    lines, nodes = source.splitlines(), list(ast_nodes(get_ast(source)))
    annotations = [getattr(n, key, None) for n in ast.walk(ast.parse(source)) for key in ("annotation", "returns")]
    typed = [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in annotations if n is not None]
    for name in (n for n in operator_names() if not get_operator(n).arguments()):
        starts = (start for node in nodes for start, _ in get_operator(name)().mutation_positions(node))
        for occurrence, place in enumerate(starts):
            if not lines[place[0] - 1].strip().startswith(_IDLE) and not any(a <= place < b for a, b in typed):
                yield Mutant(str(path.relative_to(ROOT)), place, name, occurrence)


class Copies:
    """Copies of the working tree, one per worker, and the tests that run in them."""

    def __init__(self, folder: Path, count: int, tests: list[str]) -> None:
        self.tests, self.seconds = tests, 3600.0
        self._free: queue.Queue[Path] = queue.Queue()
        listed = subprocess.check_output(["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, text=True)
        for copy in (folder / str(i) for i in range(count)):
            for name in filter(lambda name: (ROOT / name).is_file(), listed.split("\0")):
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
            self._free.put(copy)

    def judge(self, path: str, code: str) -> str:
        """Test a mutated file and return its outcome: "killed", "survived" or "timeout"."""
        copy = self._free.get()
        try:
            (copy / path).write_text(code)
            own = [str(p) for test in self.tests for p in (copy / test).rglob(f"test_{Path(path).stem}.py")]
            outcomes = (self._run(copy, tests) for tests in (own, self.tests) if tests)
            return next((outcome for outcome in outcomes if outcome != "survived"), "survived")
        finally:
            shutil.copy2(ROOT / path, copy / path)
            self._free.put(copy)

    def _run(self, copy: Path, tests: list[str]) -> str:
        # Limit the address space (in kB), because a mutant may allocate any amount of memory.
        run = f'ulimit -v {16 << 20} && exec "$0" -m pytest -x -q -p no:cacheprovider "$@"'
        own = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        with copy.with_suffix(".log").open("w") as log, subprocess.Popen(
            ["sh", "-c", run, sys.executable, "-m", EVERY, *tests], cwd=copy, env=os.environ | own,
            stdout=log, stderr=log, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                return "killed" if process.wait(self.seconds) else "survived"
            except subprocess.TimeoutExpired:
                return "timeout"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def main() -> int:
    """Return 0 once every mutant has been tried, regardless of the outcome; 1 if a control failed."""
    parser = argparse.ArgumentParser(description="Mutation-test one package, on copies of the working tree.")
    parser.add_argument("room", nargs="?", choices=sorted(ROOMS), default="strategies")
    for name in ("--code", "--tests"):
        parser.add_argument(name, nargs="+", metavar="PATH", help="files or folders, in place of the package's")
    parser.add_argument("--sample", type=int, metavar="N", help="try only N mutants; trying all of them takes hours")
    parser.add_argument("--seed", type=int, default=0, help="seed for the sample")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    code, tests = given.code or ROOMS[given.room][0], given.tests or ROOMS[given.room][1]
    if missing := [name for name in [*code, *tests] if not (ROOT / name).exists()]:
        parser.error(f"expected files or folders of this checkout, not found: {', '.join(missing)}")
    files = [p for name in code for p in ((ROOT / name).rglob("*.py") if (ROOT / name).is_dir() else [ROOT / name])]
    chosen = sorted(mutant for path in files for mutant in mutants(path))
    if given.sample:
        shuffled = random.Random(given.seed).sample(chosen, len(chosen))
        chosen = sorted(list({(m.path, m.place): m for m in shuffled}.values())[: given.sample])
    paths = sorted({m.path for m in chosen})
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.workers) as pool:
        copies, began = Copies(Path(folder), given.workers, tests), time.monotonic()
        if copies.judge(paths[0], (ROOT / paths[0]).read_text()) != "survived":
            sys.exit("\n".join(log.read_text() for log in Path(folder).glob("*.log")) + "\nerror: tests fail unmutated")
        copies.seconds = 30 + 5 * (time.monotonic() - began)
        reached = {path for path in paths if copies.judge(path, "raise ImportError\n") == "killed"}
        chosen, judged = [m for m in chosen if m.path in reached], []
        for outcome in pool.map(lambda m: copies.judge(m.path, m.code()), chosen):
            judged.append((chosen[len(judged)], outcome))
            print(f"\r{len(judged)} of {len(chosen)}", end="\n" if len(judged) == len(chosen) else "", file=sys.stderr)
    for mutant in (mutant for mutant, outcome in judged if outcome == "survived"):
        old, new = (ROOT / mutant.path).read_text().splitlines(), mutant.code().splitlines()
        print(*difflib.unified_diff(old, new, mutant.path, mutant.operator, n=1, lineterm=""), sep="\n", end="\n\n")
    print(f"{'file':50} {'killed':>8} {'survived':>8} {'timeout':>8}")
    for path in paths:
        row = [sum(m.path == path and o == outcome for m, o in judged) for outcome in ("killed", "survived", "timeout")]
        print(f"{path:50}", *(f"{n:8}" for n in row) if path in reached else ["no test here imports it: not mutated"])
    return 0 if len(reached) == len(paths) else 1


if __name__ == "__main__":
    sys.exit(main())
