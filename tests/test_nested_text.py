"""JSON and TOML from elsewhere: 3,000 brackets in brackets are an error in words, and no RecursionError."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from fedveil.console.main import main
from fedveil.console.provisioning import kit_reader
from fedveil.console.provisioning.federation_folder import SiteRegistry, parse_federation, registry_folder
from fedveil.console.provisioning.operator_registry import OperatorRegistry
from fedveil.console.run_config_args import parse_overrides
from fedveil.console.runs.run_reader import config_of
from fedveil.data.row_files import parse_line
from fedveil.errors import ConfigError, FedVeilError
from tests.conftest import ROOT

DEEP = "[" * 3000
# Text that this very process or a child of its own has just written.
_OWN = {
    "client_app/instruction.py", "client_app/policy/epsilon_main.py", "client_app/policy/privacy_cost.py",
    "client_app/worker/connection.py", "client_app/worker/service.py", "fedveil/cards/signing/in_toto.py",
    "fedveil/console/flower/local_deployment.py", "fedveil/console/flower/simulation.py",
    "fedveil/data/dataset_cache.py", "fedveil/guard/process_zygote.py", "fedveil/models/bundled.py",
    "fedveil/records/log_rotation.py", "fedveil/records/process_exit.py", "fedveil/relay/endpoint_config.py",
    "fedveil/relay/status_events.py", "fedveil/training/ranks/channel.py", "server_app/completion.py",
    "server_app/run_fingerprint.py",
}  # fmt: skip


def _unguarded(file: Path) -> list[int]:
    """Lines that parse JSON or TOML outside of a `try` that takes RecursionError."""
    found: list[int] = []

    def walk(node: ast.AST, guarded: bool) -> None:
        if isinstance(node, ast.Try):
            taken = any(
                "RecursionError" in ast.dump(handler.type) for handler in node.handlers if handler.type is not None
            )
            for part in node.body:
                walk(part, guarded or taken)
            for part in (*node.handlers, *node.orelse, *node.finalbody):
                walk(part, guarded)
            return
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {
            f"{module}.{name}" for module in ("json", "tomllib") for name in ("load", "loads")
        } and not guarded:  # fmt: skip
            found.append(node.lineno)
        for part in ast.iter_child_nodes(node):
            walk(part, guarded)

    walk(ast.parse(file.read_text()), False)
    return found


def test_every_parser_of_what_others_wrote_takes_brackets_in_brackets():
    files = [file for folder in ("fedveil", "server_app", "client_app") for file in (ROOT / folder).rglob("*.py")]
    names = {str(file.relative_to(ROOT)): file for file in files if "benchmarks" not in file.parts}
    assert set(names) >= _OWN
    found = [f"{name}:{line}" for name, file in names.items() if name not in _OWN for line in _unguarded(file)]
    assert sorted(found) == []


@pytest.mark.parametrize("text", [DEEP, f"x = {DEEP}"])
def test_brackets_in_brackets_are_an_error_in_words(tmp_path, text):
    file = tmp_path / "federation.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"federation\.toml"):
        parse_federation(file)
    with pytest.raises(ConfigError, match="--config"):
        parse_overrides(file, [])
    assert parse_overrides(None, [f"a={DEEP}"]) == {"a": DEEP}  # a value that is no TOML is text
    registry = registry_folder(tmp_path)
    registry.mkdir()
    for name in ("members.json", "operators.json"):
        (registry / name).write_text(text)
    with pytest.raises(ConfigError, match=r"members\.json"):
        SiteRegistry(tmp_path)
    with pytest.raises(ConfigError, match=r"operators\.json"):
        OperatorRegistry(registry)
    (tmp_path / "site.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"site\.toml"):
        kit_reader.read_kit(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(FedVeilError, match=r"config\.json"):
        config_of(tmp_path)
    with pytest.raises(FedVeilError, match="line 1"):
        parse_line(text.encode(), 1, file)


def test_the_command_says_so_and_shows_no_traceback(tmp_path, capsys):
    (tmp_path / "federation.toml").write_text(f"x = {DEEP}")
    assert main(["provision", str(tmp_path / "federation.toml")]) == 2
    assert "federation.toml" in capsys.readouterr().err
