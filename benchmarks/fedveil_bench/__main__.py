"""`python -m fedveil_bench`: the same as `fedveil bench`, for use through PYTHONPATH when no package is installed."""

from __future__ import annotations

import sys

from fedveil.console.main import run_command
from fedveil_bench import command

if __name__ == "__main__":
    sys.exit(run_command("bench", command))
