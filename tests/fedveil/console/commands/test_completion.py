"""`fedveil completion`: what bash itself makes of the script."""

from __future__ import annotations

import subprocess

import pytest

from fedveil.console.commands.getting_started import completion
from fedveil.console.main import list_commands, main
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def script() -> str:
    return completion.completion_script(completion.completion_words())


def completed(script: str, *typed: str) -> set[str]:
    line = f"COMP_WORDS=({' '.join(typed)} ''); COMP_CWORD={len(typed)}; _fedveil; echo ${{COMPREPLY[@]}}"
    if typed[-1].startswith("-"):
        line = f"COMP_WORDS=({' '.join(typed)}); COMP_CWORD={len(typed) - 1}; _fedveil; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", f"{script}\n{line}"], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_commands_then_actions_then_options(script):
    assert completed(script, "fedveil") == set(list_commands())
    assert {"start", "init", "purge", "--help"} <= completed(script, "fedveil", "site")
    assert {"--kit", "--superlink"} <= completed(script, "fedveil", "site", "start")
    assert "--federation" in completed(script, "fedveil", "submit", "app")
    assert "--superlink" not in completed(script, "fedveil", "site", "purge")
    assert completed(script, "fedveil", "nonsense", "x") == set()


def test_a_part_of_a_word_is_completed(script):
    assert completed(script, "fedveil", "site", "start", "--k") == {"--key", "--key-file", "--kit"}
    assert completed(script, "fedveil", "submit", "--t") == {"--timeout"}


def test_zsh_gets_bashs_function_behind_its_own_line(capsys):
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("autoload -U +X bashcompinit")
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out.startswith("_fedveil() {")


def test_the_page_of_deployment_names_it():
    assert 'eval "$(fedveil completion bash)"' in (ROOT / "docs" / "deploy" / "provision.md").read_text()
