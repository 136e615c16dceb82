"""The `fedveil` command. A subcommand is a file under `commands/` with `add_arguments`, or a module in another package
that is named by an entry point (fedveil/console/command_list.py).

| in a command file | use |
|---|---|
| the file name | the command name |
| the folder | the command's group in `fedveil --help` |
| the first line of the docstring, "`fedveil x`: does this." | the summary in `fedveil --help` |
| the whole docstring | the beginning of `fedveil x --help` |
| `add_arguments(parser)` | adds the arguments and sets `run`, which gets the parsed ones and returns the exit code |

Only the chosen command is imported.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, ModuleType
from typing import NoReturn

from fedveil import __version__, proxies
from fedveil.console.command_list import CommandSource, find_command, list_commands
from fedveil.console.terminal import say
from fedveil.errors import ConfigError, FedVeilError
from fedveil.sanitize import sanitize, suggest_name

__all__ = ["main", "run_command"]

# Commands that docs/ and results mention, but that another of our distributions provides.
_SEPARATE = {"bench": "the package fedveil-bench (in a checkout: make bench)"}
_FULL = (errno.ENOSPC, errno.EDQUOT)
_TOGETHER = 1.0  # signals within this many seconds count as one
# The groups, in the order in which a newcomer needs them. Any other folder comes last.
_GROUPS = {
    "getting_started": "getting started",
    "runs": "runs",
    "site": "at a site",
    "federation": "for a federation's operator",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; return 2 after a FedVeil or path error, and 130 after Ctrl-C."""
    given = list(sys.argv[1:] if argv is None else argv)
    return _run(lambda: make_parser(given[0] if given else ""), given)


def run_command(name: str, module: ModuleType, argv: Sequence[str] | None = None) -> int:
    """Run the command in `module` as `main` does, for a package on PYTHONPATH that has no entry points."""
    given = [name, *(sys.argv[1:] if argv is None else argv)]
    return _run(lambda: _command_parser(name, module), given)


def _run(parser: Callable[[], argparse.ArgumentParser], given: Sequence[str]) -> int:
    # Set this before importing torch, because spinning threads make a busy machine many times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    proxies.exempt_loopback(os.environ)
    os.environ.setdefault("PYTHONUTF8", "1")  # for children: rows and paths are not in the locale's encoding
    interrupt = _Interrupt()
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT too, because shell background jobs ignore it by default
        signal.signal(number, interrupt)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup sets it
        signal.signal(signal.SIGHUP, interrupt)  # the terminal was closed: what this command started must not stay
    try:
        whole = parser()
        try:
            arguments = whole.parse_args(given)
        finally:
            print(end="", flush=True)  # flush the help text here, so that errors are reported below, not at exit
        if "run" not in arguments:  # no command was given
            whole.print_help(sys.stderr)
            return 2
        if not callable(arguments.run):
            raise ConfigError(f"command: {given[0]} has an argument named run, which hides its function; rename it")
        code = int(arguments.run(arguments))
        print(end="", flush=True)  # not sys.stdout, which is None if it was closed
        return code
    except FedVeilError as error:
        _say_error(sanitize(" ".join(str(error).split()), 4000))
        return 2
    except KeyboardInterrupt as error:  # its message tells if the command's work continues elsewhere
        interrupt.is_done = True
        words = str(error) or "all started processes were stopped"
        say(f"interrupted: {words}", mark="interrupted:", verdict="warn", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `fedveil methods | head`
        _leave_stdout()
        return 141
    except OSError as error:
        if error.errno in _FULL:
            _leave_stdout()
            where = f"{sanitize(error.filename)}: " if error.filename else ""
            what = os.strerror(error.errno).lower()
            _say_error(f"{where}{what}; free space there, then run the command again")
            return 2
        if error.filename is None:  # not about one of the user's files or folders
            raise
        _say_error(f"{error.filename}: {(error.strerror or 'cannot be used').lower()}; name another")
        return 2


def _say_error(words: str) -> None:
    say(f"error: {words}", hang=7, mark="error:", verdict="fail", file=sys.stderr)


def _leave_stdout() -> None:
    """Redirect unwritable standard output to the null device.

    Otherwise, the interpreter would retry at exit and report an error.
    """
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_parser(chosen: str) -> argparse.ArgumentParser:
    """Return the parser for one subcommand, or, if `chosen` is "" or an option, for the command list.

    Raises:
        ConfigError: there is no such command; the message suggests the closest one.
    """
    if chosen and not chosen.startswith("-"):
        command = find_command(chosen)
        if command is None:
            if chosen in _SEPARATE:
                raise ConfigError(f"command: {chosen} is part of {_SEPARATE[chosen]}, which is not installed here")
            near = difflib.get_close_matches(chosen, list_commands(), 1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"command: unknown command {chosen!r}; {meant}fedveil --help lists all commands")
        return _command_parser(chosen, command.load())
    return _bare_parser("fedveil COMMAND ...", _listed(list_commands()))


def _command_parser(name: str, module: ModuleType) -> argparse.ArgumentParser:
    """Return the command-line parser for the command in `module`."""
    whole, words = _bare_parser(), (module.__doc__ or "").partition(": ")[2]
    one = whole.add_subparsers(metavar="COMMAND", required=True).add_parser(
        name,
        description=words[:1].upper() + words[1:],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(one)
    return whole


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose errors first suggest the option or action that the user probably meant."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the error, and exit with 2."""
        choice = re.search(r"invalid choice: '(.*?)' \(choose", message)
        option = re.search(r"unrecognized arguments:.*?(--[\w-]+)", message)
        known = list(_choices(self)) if choice else list(_options(self))
        mistyped = choice or option
        super().error(f"{suggest_name(mistyped[1], known) if mistyped else ''}{message}")


def _choices(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:  # argparse has no public list of them
        yield from map(str, action.choices or ())


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the long options of a parser and of its actions."""
    for action in parser._actions:
        yield from (name for name in action.option_strings if name.startswith("--"))
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _options(inner)


def _bare_parser(usage: str | None = None, epilog: str | None = None) -> argparse.ArgumentParser:
    whole = CommandParser(
        prog="fedveil",
        usage=usage,
        description="Fine-tune models across sites that cannot share data, and measure what updates still reveal.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole.add_argument("--version", action="version", version=f"fedveil {__version__}")
    return whole


def _listed(commands: Mapping[str, CommandSource]) -> str:
    """Return the list of commands by group, each with its summary."""
    groups = [*_GROUPS, *sorted({command.group for command in commands.values()} - set(_GROUPS))]
    lines = []
    for group in groups:
        inside = sorted(name for name, command in commands.items() if command.group == group)
        lines += ["", f"{_GROUPS.get(group, group)}:", *(f"  {name:<10} {commands[name].summary}" for name in inside)]
    docs = f"README and docs/ are in FedVeil's source: a checkout, or a release's fedveil-{__version__}.tar.gz."
    return "\n".join([*lines[1:], "", "For details on a command, run: fedveil COMMAND --help", docs])


class _Interrupt:
    """Handler for SIGINT and SIGTERM, which makes the command stop the processes it started.

    A tool that ends a process and its group sends two signals at once, and the second would interrupt the
    shutdown, so it is ignored. A later signal does interrupt, until nothing is left to stop.
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
