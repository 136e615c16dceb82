import argparse
import dataclasses
import errno
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedveil import __version__, strategies
from fedveil.console import main
from fedveil.console.commands.getting_started import methods

pytestmark = pytest.mark.usefixtures("signal_handlers")


def test_an_error_is_one_line_and_exit_code_2(capsys):
    assert main.main(["report", "/nowhere/at all"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: run folder /nowhere/at all: expected ")
    assert error.count("\n") == 1


def test_an_unknown_method_is_an_error_that_names_the_known_ones(capsys):
    assert main.main(["demo", "--methods", "fedavg,nonsense"]) == 2
    error = capsys.readouterr().err
    assert "nonsense" in error
    assert "fedrand" in error


def test_a_path_that_cannot_be_used_is_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main.main(["site", "guard", "--bin", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'file'}: file exists; name another\n"


def test_interrupt_is_exit_code_130(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(methods, "run", interrupted)
    assert main.main(["methods"]) == 130
    assert "stopped" in capsys.readouterr().err


def test_help_lists_every_sub_command_without_importing_torch():
    code = "import sys; from fedveil.console.main import make_parser; print(make_parser('').format_help())"
    code += "; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("demo", "methods", "relay", "report"):
        assert f"  {name} " in done.stdout


def test_every_command_says_what_it_does_in_a_line_of_the_help(capsys):
    help_lines = main.make_parser("").format_help().splitlines()
    for name, command in main.list_commands().items():
        assert Path(importlib.util.find_spec(command.module).origin).read_text().startswith(f'"""`fedveil {name}`: ')
        (line,) = (line for line in help_lines if line.startswith(f"  {name} "))
        assert len(line) <= 80
        with pytest.raises(SystemExit):
            main.main([name, "--help"])
        help_text = capsys.readouterr().out
        assert f"usage: fedveil {name} " in help_text
        assert line.split(maxsplit=1)[1].casefold() in help_text.casefold()


def without_help(parser: argparse.ArgumentParser, name: str) -> list[str]:
    option_names = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub, its in action.choices.items():
                option_names += without_help(its, f"{name} {sub}")
        elif not action.help:
            option_names.append(f"{name} {action.dest}")
    return option_names


def test_every_argument_says_what_it_is():
    assert [line for name in main.list_commands() for line in without_help(main.make_parser(name), "fedveil")] == []


@pytest.mark.parametrize("given,meant", [("dmo", "did you mean 'demo'? fedveil --help"), ("xyzzy", "; fedveil --help")])
def test_a_wrong_command_is_one_line_that_names_the_nearest(given, meant, capsys):
    assert main.main([given, "--rounds", "1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: command: unknown command {given!r}; ")
    assert meant in error
    assert error.count("\n") == 1


def test_no_command_shows_the_help(capsys):
    assert main.main([]) == 2
    assert "for a federation's operator:" in capsys.readouterr().err


def test_methods_lists_every_method(capsys):
    assert main.main(["methods"]) == 0
    stdout = capsys.readouterr().out
    assert all(name in stdout for name in strategies.list_methods())


@pytest.mark.parametrize("name", strategies.list_methods())
def test_methods_shows_fields_and_wire(name, capsys):
    assert main.main(["methods", name]) == 0
    stdout = capsys.readouterr().out
    assert "learns" in stdout
    assert all(field.name in stdout for field in dataclasses.fields(strategies.create_method(name)))
    assert "client to server" in stdout


def test_the_help_says_where_the_documents_are_that_messages_name(capsys):
    with pytest.raises(SystemExit):
        main.main(["--help"])
    assert f"a checkout, or a release's fedveil-{__version__}.tar.gz" in capsys.readouterr().out


# What a command prints by itself may still be in a buffer when it has ended.
FEW = "from fedveil.console import main; from fedveil.console.commands.getting_started import methods"
FEW += "; methods.run = lambda args: print('few') or 0; raise SystemExit(main.main(['methods']))"


@pytest.mark.long
@pytest.mark.parametrize(
    "given",
    [["-m", "fedveil.console.main", *words.split()] for words in ("methods", "--help", "methods --help")]
    + [["-c", FEW]],
)
def test_a_full_disk_is_one_line_and_no_traceback(given):
    with open("/dev/full", "w") as full:
        command, buffered = [sys.executable, *given], os.environ | {"PYTHONUNBUFFERED": ""}
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=buffered)
    words = "error: no space left on device; free space there, then run the command again\n"
    assert (done.returncode, done.stderr) == (2, words)


@pytest.mark.parametrize(
    "error,words",
    [
        (OSError(errno.ENOSPC, "x"), "error: no space left on device; free space there"),
        (OSError(errno.EDQUOT, "x", "/a/\x1bb"), r"error: /a/\x1bb: disk quota exceeded; free space there"),
    ],
)
def test_a_file_without_room_is_one_line(error, words, monkeypatch, capsys):
    def full(args):
        raise error

    monkeypatch.setattr(methods, "run", full)
    assert main.main(["methods"]) == 2
    assert capsys.readouterr().err == f"{words}, then run the command again\n"


def test_an_error_of_the_system_that_no_file_has_is_not_hidden(monkeypatch):
    def broken(args):
        raise OSError(errno.EINVAL, "x")

    monkeypatch.setattr(methods, "run", broken)
    with pytest.raises(OSError, match="x"):
        main.main(["methods"])


def test_a_command_of_another_distribution_is_named_with_it(monkeypatch, capsys):
    monkeypatch.setattr(main, "find_command", lambda name: None)
    assert main.main(["bench", "--list"]) == 2
    assert "bench is part of the package fedveil-bench (in a checkout: make bench)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["methods", "--tabel"], "error: did you mean --table? unrecognized arguments: --tabel"),
        (["site", "strat"], "error: did you mean start? argument ACTION: invalid choice: 'strat'"),
        (["site", "start", "--polcy", "x"], "error: did you mean --policy? unrecognized arguments: --polcy x"),
        (["methods", "--zzzzz"], "error: unrecognized arguments: --zzzzz"),
    ],
)
def test_a_mistyped_option_or_action_is_asked_about_first(given, meant, capsys):
    with pytest.raises(SystemExit) as ended:
        main.main(given)
    assert ended.value.code == 2
    assert meant in capsys.readouterr().err
