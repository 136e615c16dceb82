"""Check that pyright can resolve every import of this project's own modules, as an editor must.

    python tools/find_imports.py .venv/check/bin/basedpyright --pythonpath .venv/bin/python

Imports of other packages are not checked: extras such as mlflow need not be installed. pyright reads a copy of the
project in which each file has only its import statements, on the same lines: inferring the types of everything else
would take minutes, and does not change which modules it finds.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_SKIPPED = {"build", "checkout", "dist", "node_modules"}  # and hidden folders
_OWN = re.compile(r'Import "(fedveil|fedveil_bench|benchmarks|tests|tools)\b')


def keep_imports(source: str) -> str:
    """Return a program with only the import statements of `source`, each on its own line, at the top level."""
    lines: dict[int, list[str]] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            lines.setdefault(node.lineno, []).append(ast.unparse(node))
    return "\n".join("; ".join(lines.get(number, ())) for number in range(1, max(lines, default=0) + 1)) + "\n"


def copy_imports(root: Path, to: Path) -> None:
    """Write a project's Python files, with only their imports, and its settings to another folder.

    pyright does not enter linked folders, such as fedveil/client_app, so the copy has folders in their place.
    """
    for folder, folders, files in os.walk(root, followlinks=True):
        below = to / Path(folder).relative_to(root)
        below.mkdir(exist_ok=True)
        folders[:] = [name for name in folders if name not in _SKIPPED and not name.startswith(".")]
        for name in files:
            if name.endswith(".py"):
                (below / name).write_text(keep_imports((Path(folder) / name).read_text("utf-8")), "utf-8")
    (to / "pyproject.toml").write_bytes((root / "pyproject.toml").read_bytes())


def unresolved(report: dict[str, Any]) -> list[str]:
    """Return "file:line: message" for each unresolved import of our own modules.

    Args:
        report: pyright's output with `--outputjson`.

    Raises:
        ValueError: pyright read no files.
    """
    if not report["summary"]["filesAnalyzed"]:
        raise ValueError("pyright: it read no project files; see [tool.basedpyright]")
    return [
        f"{entry['file']}:{entry['range']['start']['line'] + 1}: {entry['message']}"
        for entry in report["generalDiagnostics"]
        if entry.get("rule") == "reportMissingImports" and _OWN.match(entry["message"])
    ]


def main(command: list[str]) -> int:
    """Run pyright with `command`; return 1 if an import is not found."""
    command = [str(Path(part).absolute()) if "/" in part else part for part in command]
    with tempfile.TemporaryDirectory() as folder:
        copy_imports(ROOT, copied := Path(folder).resolve())
        done = subprocess.run(
            [*command, "--outputjson", "--project", str(copied)],
            cwd=copied, capture_output=True, text=True, check=False,
        )  # fmt: skip
    done.stdout = done.stdout.replace(f"{copied}/", "")
    try:
        report = json.loads(done.stdout)
    except json.JSONDecodeError:
        print(f"pyright: its output is not JSON: {done.stdout[-500:]}{done.stderr[-500:]}", file=sys.stderr)
        return 2
    lines = unresolved(report)
    print("\n".join([*lines, f"pyright: {report['summary']['filesAnalyzed']} files, {len(lines)} imports not found"]))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
