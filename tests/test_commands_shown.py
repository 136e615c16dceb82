"""Every command of `fedveil` in a block of README and of docs/ is one that `fedveil` takes, with its options.

It is parsed, and not run: a path that is not there, or a value that is refused later, is not seen here. Left out are
commands between backticks in a sentence, those with " ... " in them, and what stands behind a pipe. Commands of `flwr`
are held against Flower's command line, those between backticks too.

What is run: what a tutorial has in blocks of `sh` (tests/deployment/test_tutorials.py). Blocks of README and of other
pages are only parsed here, unless a test of their own runs them, and targets of `make` are not looked at.
"""

from __future__ import annotations

import argparse
import re
import shlex

import click
import pytest
import typer
from flwr.cli.app import app

from fedveil.console.main import make_parser
from tests.conftest import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_front_page_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 130
    assert len(text.split()) <= 900


def shown(text: str) -> list[str]:
    """Lines of blocks that begin with `fedveil`, each with its continuation, without what stands for more."""
    commands = []
    text = re.sub(r"\\\n\s*", "", re.sub(r"\$\([^)]*\)", "X", text))  # a command's own output is any word
    for line in text.splitlines():
        command = line.removeprefix("    ").removeprefix("(cd pilot-north && ")
        is_block = line.startswith(("    ", "fedveil "))
        if is_block and re.match(r"fedveil [a-z]", command) and " ... " not in f"{command} ":
            commands.append(re.split(r" [>|&]|\) \|\|", command)[0])
    return commands


COMMANDS = sorted({(page.name, command) for page in PAGES for command in shown(page.read_text())})


def test_the_pages_show_many():
    assert len(COMMANDS) > 70
    assert {"README.md", "provision.md", "operate.md", "runs.md", "hospital-pilot.md"} <= {page for page, _ in COMMANDS}


@pytest.mark.parametrize("page, command", COMMANDS, ids=lambda text: text[:60])
def test_a_command_that_is_shown_is_one_that_fedveil_takes(page, command, capsys):
    words = shlex.split(command, comments=True)[1:]
    try:
        assert callable(make_parser(words[0]).parse_args(words).run)
    except SystemExit:
        pytest.fail(f"{page}: {command}\n{capsys.readouterr().err}")


@pytest.mark.parametrize("command", ["dashboard", "site dashboard"])
def test_the_page_of_dashboards_shows_every_option_and_repeats_what_may_be_repeated(command):
    page, parser = (ROOT / "docs" / "dashboard.md").read_text(), make_parser(command.split()[0])
    for name in command.split():
        parser = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices[name]
    options = {action.option_strings[-1]: action for action in parser._actions if action.option_strings}
    for option, action in options.items():
        if option != "--help":
            assert f"{option}`" in page or f"{option} " in page
        if isinstance(action, argparse._AppendAction):
            assert re.search(rf"fedveil {command} .*{option} \S+ {option} ", page)


def of_flower(text: str) -> list[str]:
    """Commands of `flwr` in blocks, and between backticks with what follows them there."""
    text = re.sub(r"\\\n\s*", "", text)
    blocks = re.findall(r"^ {4}(?:\w+=\S+ )?(flwr [a-z].*)$", text, re.MULTILINE)
    return [*blocks, *re.findall(r"`(flwr [a-z-]+ (?!RUN)\S[^`]*)`", text)]


FLOWERS = sorted({(page.name, command) for page in PAGES for command in of_flower(page.read_text())})


def test_the_pages_show_some_of_flowers_own():
    assert {command.split()[1] for _, command in FLOWERS} >= {"run", "ls", "federation"}


@pytest.mark.parametrize("page, command", FLOWERS, ids=lambda text: text[:60])
def test_a_command_of_flower_that_is_shown_is_one_that_flower_takes(page, command):
    """Parsed, not run: tests/deployment runs `flwr run`, on a federation and on the simulation engine."""
    cli_command, words = typer.main.get_command(app), shlex.split(command, comments=True)[1:]
    while isinstance(cli_command, click.Group):
        cli_command, words = cli_command.commands[words[0]], words[1:]
    try:
        cli_command.make_context(command, words)
    except click.UsageError as error:
        pytest.fail(f"{page}: {command}\n{error.format_message()}")
