"""Check that pyright can resolve every import of this project's own modules, as an editor must.

    python tools/find_imports.py .venv/check/bin/basedpyright --pythonpath .venv/bin/python

Imports of other packages are not checked: extras such as mlflow need not be installed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

_OWN = re.compile(r'Import "(fedveil|fedveil_bench|benchmarks|tests|tools)\b')


def unresolved(report: dict[str, Any]) -> list[str]:
    """Return "file:line: message" for each unresolved import of our own modules.

    Args:
        report: pyright's output with `--outputjson`.

    Raises:
        ValueError: pyright read no files.
    """
    if not report["summary"]["filesAnalyzed"]:
        raise ValueError("pyright: expected project files, found none; see [tool.basedpyright]")
    return [
        f"{entry['file']}:{entry['range']['start']['line'] + 1}: {entry['message']}"
        for entry in report["generalDiagnostics"]
        if entry.get("rule") == "reportMissingImports" and _OWN.match(entry["message"])
    ]


def main(command: list[str]) -> int:
    """Run pyright with `command`; return 1 if an import is not found."""
    done = subprocess.run([*command, "--outputjson"], capture_output=True, text=True, check=False)
    try:
        report = json.loads(done.stdout)
    except json.JSONDecodeError:
        print(f"pyright: expected JSON, found {done.stdout[-500:]}{done.stderr[-500:]}", file=sys.stderr)
        return 2
    lines = unresolved(report)
    print("\n".join([*lines, f"pyright: {report['summary']['filesAnalyzed']} files, {len(lines)} imports not found"]))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
