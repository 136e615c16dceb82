"""How `flower-superlink` starts: with the registry and the log, or not at all."""

from __future__ import annotations

import os
import sys

import pytest
import uvicorn
from flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor import NodeAuthServerInterceptor

from fedveil.console.provisioning.operators import Operators
from fedveil.guard import superlink


@pytest.fixture
def folder(tmp_path, monkeypatch):
    Operators.create(tmp_path / "registry", 30)
    (tmp_path / "registry" / "members.json").write_text('{"sites": {}, "retired": {}}')
    monkeypatch.setattr(NodeAuthServerInterceptor, "_wrap_method_handler", superlink.fleet._wrap)  # put back
    return tmp_path


def own(folder, *more: str) -> list[str]:
    given = ["--fedveil-registry", str(folder / "registry"), f"--fedveil-log={folder / 'control.jsonl'}"]
    return ["flower-superlink", *given, *more]


def test_its_own_arguments_are_taken_out_and_flowers_stay(folder, monkeypatch):
    monkeypatch.setattr(sys, "argv", own(folder, "--port", "8000", "--enable-supernode-auth"))
    assert superlink.prepare() is not None
    assert sys.argv[1:] == ["--port", "8000", "--enable-supernode-auth", "--fleet-api-type", "grpc-rere"]


def test_the_control_calls_have_no_other_port(folder, monkeypatch):
    """Flower serves them over gRPC too where this variable says so, and nobody asks for an operator there."""
    monkeypatch.setenv("FLWR_INTERNAL_GRPC_CONTROL_API", "1")
    monkeypatch.setattr(sys, "argv", own(folder))
    superlink.prepare()
    assert "FLWR_INTERNAL_GRPC_CONTROL_API" not in os.environ


@pytest.mark.parametrize("more", [["--fleet-api-type", "grpc-adapter"], ["--fleet-api-type=grpc-adapter"]])
def test_a_fleet_port_that_asks_for_no_key_is_refused(more, folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", own(folder, *more))
    with pytest.raises(SystemExit):
        superlink.prepare()
    assert "--fleet-api-type: expected grpc-rere" in capsys.readouterr().err


def test_nor_is_one_that_is_named_by_half_its_option(folder, monkeypatch):
    """Flower takes the last."""
    monkeypatch.setattr(sys, "argv", own(folder, "--fleet-api-t", "grpc-adapter"))
    superlink.prepare()
    from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink

    assert _parse_args_run_superlink().parse_args().fleet_api_type == "grpc-rere"


@pytest.mark.parametrize("missing", ["registry/members.json", "registry/operators.json"])
def test_without_its_registry_it_does_not_start(missing, folder, monkeypatch, capsys):
    (folder / missing).unlink()
    monkeypatch.setattr(sys, "argv", own(folder))
    with pytest.raises(SystemExit):
        superlink.prepare()
    assert missing in capsys.readouterr().err


@pytest.mark.parametrize("given", [[], ["--fedveil-registry", "x"], ["--fedveil-log", "x"], ["--database", "x"]])
def test_without_its_arguments_it_does_not_start(given, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["flower-superlink", *given])
    with pytest.raises(SystemExit) as ended:
        superlink.prepare()
    assert ended.value.code == 2
    assert "expected --fedveil-registry FOLDER and --fedveil-log FILE" in capsys.readouterr().err


def test_nor_with_a_log_that_was_changed(folder, monkeypatch, capsys):
    (folder / "control.jsonl").write_text("{}\n")
    monkeypatch.setattr(sys, "argv", own(folder))
    with pytest.raises(SystemExit):
        superlink.prepare()
    assert "control.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["--help", "--version", "--simulation"])
def test_where_there_are_no_sites_it_asks_for_nothing(word, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["flower-superlink", word])
    assert superlink.prepare() is None


def test_every_server_of_the_process_is_behind_it(monkeypatch):
    monkeypatch.setattr(uvicorn.Config, "__init__", uvicorn.Config.__init__)  # put back afterwards
    superlink.serve_through(lambda app: (app, "wrapped"))
    assert uvicorn.Config("app", port=1).app == ("app", "wrapped")
