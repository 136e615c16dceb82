"""The `fedveil` command. A sub-command is a file below `commands/` with `add_arguments`; there is nothing to register.

| of a command's file | is |
|---|---|
| its name | the command's name |
| its folder | the command's group in `fedveil --help` |
| the first line of its docstring, "`fedveil x`: does this." | what `fedveil --help` says of it |
| its whole docstring | what `fedveil x --help` begins with |
| `add_arguments(parser)` | its arguments; sets `run`, a function of the parsed arguments that returns the exit code |

Only the chosen command is imported.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import errno
import importlib
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from fedveil import __version__, places
from fedveil.errors import ConfigError, FedVeilError
from fedveil.foreign import shown

DOCUMENTATION = "https://github.com/fedveil/fedveil/tree/main/docs"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_TOGETHER = 1.0  # seconds within which signals count as one
# The groups, in the order of a newcomer's needs. A folder that is not named here comes last.
_GROUPS = {
    "trying": "to try and to measure",
    "running": "runs",
    "site": "at a site",
    "federation": "for whoever operates a federation",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one sub-command; 2 after an error that FedVeil raised on purpose, or in a path, 130 after Ctrl-C."""
    # Before torch: threads that spin for each other make a busy machine many times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    given = list(sys.argv[1:] if argv is None else argv)
    interrupt = _Interrupt()
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT too: a shell's background job would ignore it
        signal.signal(number, interrupt)
    try:
        whole = parser(given[0] if given else "")
        try:
            arguments = whole.parse_args(given)
        finally:
            print(end="", flush=True)  # what --help printed: its errors are said below, not at the interpreter's end
        if "run" not in arguments:  # no command was given
            whole.print_help(sys.stderr)
            return 2
        code = int(arguments.run(arguments))
        print(end="", flush=True)  # not sys.stdout, which is None where it was closed
        return code
    except FedVeilError as error:
        print(f"error: {shown(' '.join(str(error).split()), 4000)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:  # a command whose work goes on elsewhere says that in it
        interrupt.is_done = True
        print(f"interrupted: {str(error) or 'everything that was started is stopped'}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `fedveil methods | head`
        _leave_stdout()
        return 141
    except OSError as error:
        if error.errno in _FULL:
            _leave_stdout()
            where = f"{shown(error.filename)}: " if error.filename else ""
            what = os.strerror(error.errno).lower()
            print(f"error: {where}{what}; free space where this writes, then give the command again", file=sys.stderr)
            return 2
        if error.filename is None:  # not about a file or folder of the user's
            raise
        print(f"error: {error.filename}: {(error.strerror or 'cannot be used').lower()}; name another", file=sys.stderr)
        return 2


def _leave_stdout() -> None:
    """What standard output could not take goes nowhere: the interpreter's end would try once more, and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def commands() -> dict[str, Path]:
    """Every sub-command's file, by its name."""
    files = places.folder("console/commands").glob("*/*.py")
    return {file.stem: file for file in sorted(files) if file.stem != "__init__"}


def parser(chosen: str) -> argparse.ArgumentParser:
    """The command line of one sub-command; for "" or an option, that of all.

    Raises:
        ConfigError: there is no such command; with the nearest one.
    """
    found = commands()
    if chosen and not chosen.startswith("-") and chosen not in found:
        near = difflib.get_close_matches(chosen, found, 1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"command: expected one that fedveil has, found {chosen!r}; {meant}fedveil --help lists them")
    whole = argparse.ArgumentParser(
        prog="fedveil",
        usage=None if chosen in found else "fedveil COMMAND ...",
        description="Federated fine-tuning in which every exchange withholds something on purpose.",
        epilog=None if chosen in found else _listed(found),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole.add_argument("--version", action="version", version=f"fedveil {__version__}")
    if chosen in found:
        module = importlib.import_module(f"fedveil.console.commands.{found[chosen].parent.name}.{chosen}")
        words = (module.__doc__ or "").partition(": ")[2]
        one = whole.add_subparsers(metavar="COMMAND", required=True).add_parser(
            chosen,
            description=words[:1].upper() + words[1:],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(one)
    return whole


def _listed(found: dict[str, Path]) -> str:
    """The commands by group, each with the first line of its file."""
    order = [*_GROUPS, *sorted({file.parent.name for file in found.values()} - set(_GROUPS))]
    lines = []
    for group in order:
        lines += ["", f"{_GROUPS.get(group, group)}:"]
        lines += [f"  {name:<10} {_summary(file)}" for name, file in found.items() if file.parent.name == group]
    docs = f"docs/ and README, where they are named, lie in the source: {DOCUMENTATION}"
    return "\n".join([*lines[1:], "", "fedveil COMMAND --help says more about one of them.", docs])


def _summary(file: Path) -> str:
    """The first line of a command's file without its name: "`fedveil x`: does this." gives "does this"."""
    first = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
    return first.partition(": ")[2].rstrip(".") or first


class _Interrupt:
    """Both signals stop what was started.

    Whoever ends a process and its group sends two at once: the second would break off the stopping. One that comes
    later does, until nothing is left to stop.
    """

    def __init__(self) -> None:
        self.is_done = False
        self._last = -math.inf

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.is_done and now - self._last >= _TOGETHER:
            self._last = now
            raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
