"""`python -m fedveil_bench`: `fedveil bench` where no package is installed, by PYTHONPATH."""

from __future__ import annotations

import sys

from fedveil.console.main import run_command
from fedveil_bench import command

if __name__ == "__main__":
    sys.exit(run_command("bench", command))
