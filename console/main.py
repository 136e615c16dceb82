"""The `fedveil` command. A sub-command is a file of this folder with `add_parser` and `run`; nothing to register."""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import signal
import sys
from collections.abc import Sequence
from types import FrameType

import console
from fedveil import __version__
from fedveil.errors import FedVeilError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one sub-command; 2 after an error that FedVeil raised on purpose, 130 after Ctrl-C."""
    # Before torch: threads that spin for each other make a busy machine many times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    arguments = parser().parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT too: a shell's background job would ignore it
        signal.signal(number, _interrupt)
    try:
        return int(arguments.run(arguments))
    except FedVeilError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: everything that was started is stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `fedveil methods | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def parser() -> argparse.ArgumentParser:
    """The whole command line, from the files of this folder."""
    whole = argparse.ArgumentParser(
        prog="fedveil", description="Federated fine-tuning in which every exchange withholds something on purpose."
    )
    whole.add_argument("--version", action="version", version=f"fedveil {__version__}")
    sub = whole.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in sorted(module.name for module in pkgutil.iter_modules(console.__path__)):
        module = importlib.import_module(f"console.{name}")
        if hasattr(module, "add_parser"):
            module.add_parser(sub)
    return whole


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Both signals stop what was started."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
