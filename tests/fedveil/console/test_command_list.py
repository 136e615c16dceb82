"""Commands of other packages: found by entry points, behind FedVeil's own, and imported only when they are chosen."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fedveil.console import command_list, main
from fedveil.errors import ConfigError
from tests.conftest import ROOT
from tests.own_entry_points import provide_entry_points, write_distribution

pytestmark = pytest.mark.usefixtures("signal_handlers")
GREET = '''"""`fedveil greet`: says hello.

To whom it is asked to.
"""

COMMAND_GROUP = "site"
print("imported")


def add_arguments(parser):
    """Add the arguments."""
    parser.add_argument("name", help="of a site")
    parser.set_defaults(run=lambda args: print("hello", args.name) or 0)
'''


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package with one command, whose module is greet_command unless another is named."""
    (tmp_path / "greet_command.py").write_text(GREET)
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(package: str, name: str = "greet", module: str = "greet_command") -> None:
        write_distribution(tmp_path, package, "1.0", {command_list.ENTRY_POINTS: {name: module}})

    yield install
    sys.modules.pop("greet_command", None)


def test_a_command_of_another_package_runs_and_stands_in_the_help_of_its_group(install, capsys):
    install("ward")
    site = main.make_parser("").format_help().partition("at a site:\n")[2].partition("\n\n")[0]
    assert "  greet      says hello" in site.splitlines()
    assert "imported" not in capsys.readouterr().out  # the help reads its source
    assert main.main(["greet", "north"]) == 0
    assert capsys.readouterr().out == "imported\nhello north\n"


def test_an_argument_that_hides_the_function_of_its_command_is_named(install, tmp_path, capsys):
    (tmp_path / "greet_command.py").write_text(GREET.replace('"name", help', '"run", help'))
    install("ward")
    assert main.main(["greet", "north"]) == 2
    assert "error: command: greet has an argument named run, which hides its function" in capsys.readouterr().err


def test_a_command_without_a_group_stands_behind_all_others(install, tmp_path):
    (tmp_path / "greet_command.py").write_text(GREET.replace('COMMAND_GROUP = "site"', ""))
    install("ward")
    last = main.make_parser("").format_help().partition("from other packages:\n")[2].splitlines()[0]
    assert last == "  greet      says hello"


def test_no_package_takes_the_place_of_a_command_of_fedveil(install, capsys):
    install("impostor", "methods")
    assert command_list.list_commands()["methods"].is_own
    assert main.main(["methods", "fedavg"]) == 0
    assert "imported" not in capsys.readouterr().out


def test_two_packages_with_one_command_are_refused_when_it_is_chosen(install, capsys):
    install("ward")
    install("other-ward")
    assert main.main(["greet", "north"]) == 2
    assert 'command: expected one package that provides "greet", found ' in capsys.readouterr().err
    assert main.make_parser("").format_help().count("  greet ") == 1  # and no other command suffers


@pytest.mark.parametrize(
    ("module", "shown", "refused"),
    [
        ("no_such_module", "cannot be loaded: no module no_such_module", "does not load: No module named"),
        (
            "no_such_package.command",
            "cannot be loaded: no module no_such_package.command",
            "does not load: No module named",
        ),
        ("json", "JSON (JavaScript Object Notation)", "must be a module with add_arguments, but is <module 'json'"),
    ],
)
def test_a_command_that_does_not_load_is_refused_and_breaks_no_other(install, module, shown, refused):
    install("broken", module=module)
    assert f"  greet      {shown}" in main.make_parser("").format_help()
    with pytest.raises(ConfigError, match=f'command: .*"greet" of the package broken .*{refused}'):
        main.make_parser("greet")


def test_a_wrong_name_is_compared_with_commands_of_other_packages_too(install):
    install("ward")
    with pytest.raises(ConfigError, match=r"unknown command 'gret'; did you mean 'greet'\?"):
        main.make_parser("gret")


def test_a_command_of_fedveil_is_found_without_a_look_at_every_installed_package(monkeypatch):
    monkeypatch.setattr(command_list, "entry_points", None)
    assert command_list.find_command("methods").module == "fedveil.console.commands.getting_started.methods"


def test_the_relay_is_found_by_its_entry_point():
    relay = command_list.list_commands()["relay"]
    assert (relay.module, relay.group, relay.is_own) == ("fedveil.relay.command", "site", False)


def test_a_run_by_pythonpath_gets_the_entry_points_of_a_project(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "un-installed"\nversion = "1.0"\n[project.entry-points."fedveil.commands"]\nbow = "json"\n'
    )
    provide_entry_points(tmp_path / "pyproject.toml")
    assert "bow" in command_list.list_commands()
    path = [*sys.path]
    provide_entry_points(tmp_path / "pyproject.toml")  # now that it is there
    assert sys.path == path
    code = "from fedveil.console.command_list import list_commands; print('bow' in list_commands())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
