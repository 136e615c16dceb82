"""`fedveil completion`: prints a shell script that completes commands and options.

For bash: `eval "$(fedveil completion bash)"` in ~/.bashrc; for zsh: the same with zsh, after compinit, in ~/.zshrc.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from fedveil.console.command_list import list_commands

_BASH = """\
_fedveil() {{
    local words key="${{COMP_WORDS[1]}} ${{COMP_WORDS[2]}}"
    if [ "$COMP_CWORD" -eq 1 ]; then key=""; elif [ "$COMP_CWORD" -eq 2 ]; then key="${{COMP_WORDS[1]}}"; fi
    case "$key" in
{cases}
    *) words="" ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _fedveil fedveil
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell to complete for")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    print((_ZSH if args.shell == "zsh" else "") + completion_script(completion_words()))
    return 0


def completion_script(known: Mapping[str, list[str]]) -> str:
    """Return the shell's completion function; `known` comes from `completion_words`."""
    cases = [
        f'    "{key}") words="{" ".join(candidates)}" ;;' for key, candidates in known.items() if " " in key or not key
    ]
    for key, candidates in known.items():
        if key and " " not in key:  # after the keys with an action, because a command's second word may be anything
            cases.append(f'    "{key}"|"{key} "*) words="{" ".join(candidates)}" ;;')
    return _BASH.format(cases="\n".join(cases))


def completion_words() -> dict[str, list[str]]:
    """Return the possible next words: "" for commands, "site" for its actions and options, "site start" for options."""
    candidates: dict[str, list[str]] = {"": []}
    for name, command in sorted(list_commands().items()):
        parser = argparse.ArgumentParser()
        command.load().add_arguments(parser)
        candidates[""].append(name)
        candidates[name] = _options(parser)
        for action in parser._actions:  # argparse has no public list of them
            if isinstance(action, argparse._SubParsersAction):
                candidates[name] += sorted(action.choices)
                candidates |= {f"{name} {below}": _options(one) for below, one in sorted(action.choices.items())}
    return candidates


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return sorted(name for action in parser._actions for name in action.option_strings if name.startswith("--"))
