"""`fedveil completion`: prints what makes a shell complete commands and options.

For bash: `eval "$(fedveil completion bash)"` in ~/.bashrc; for zsh: the same with zsh, after compinit, in ~/.zshrc.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping

from fedveil import places

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
    """Adds the arguments."""
    parser.add_argument("shell", choices=("bash", "zsh"), help="of which shell")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the script."""
    print((_ZSH if args.shell == "zsh" else "") + script(words()))
    return 0


def script(known: Mapping[str, list[str]]) -> str:
    """The function for the shell; `known` as `words` gives them."""
    cases = [f'    "{key}") words="{" ".join(found)}" ;;' for key, found in known.items() if " " in key or not key]
    for key, found in known.items():
        if key and " " not in key:  # after those with an action, for a command's second word may be anything
            cases.append(f'    "{key}"|"{key} "*) words="{" ".join(found)}" ;;')
    return _BASH.format(cases="\n".join(cases))


def words() -> dict[str, list[str]]:
    """What may come next: "" has the commands, "site" its actions and options, "site start" that action's options."""
    found: dict[str, list[str]] = {"": []}
    for file in sorted(places.folder("console/commands").glob("*/*.py"), key=lambda file: file.stem):
        if file.stem == "__init__":
            continue
        module = importlib.import_module(f"fedveil.console.commands.{file.parent.name}.{file.stem}")
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        found[""].append(file.stem)
        found[file.stem] = _options(parser)
        for action in parser._actions:  # argparse has no public list of them
            if isinstance(action, argparse._SubParsersAction):
                found[file.stem] += sorted(action.choices)
                found |= {f"{file.stem} {name}": _options(one) for name, one in sorted(action.choices.items())}
    return found


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return sorted(name for action in parser._actions for name in action.option_strings if name.startswith("--"))
