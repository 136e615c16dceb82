"""How `flower-superlink` starts: with the registry and the log, or not at all."""

from __future__ import annotations

import os
import subprocess
import sys

import grpc
import pytest
import uvicorn
from flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor import NodeAuthServerInterceptor

from fedveil.console.provisioning.operator_registry import OperatorRegistry
from fedveil.guard import flower, superlink
from fedveil.guard.flower import fleet_grpc
from fedveil.records import audit_log

SPEAKS = flower.installed_release().speaks


@pytest.fixture
def folder(tmp_path, monkeypatch):
    OperatorRegistry.create(tmp_path / "registry", 30)
    (tmp_path / "registry" / "members.json").write_text('{"sites": {}, "retired": {}}')
    monkeypatch.setattr(NodeAuthServerInterceptor, "_wrap_method_handler", fleet_grpc._wrap)  # put back
    return tmp_path


def own(folder, *more: str) -> list[str]:
    given = ["--fedveil-registry", str(folder / "registry"), f"--fedveil-log={folder / 'control.jsonl'}"]
    return ["flower-superlink", *given, "--enable-supernode-auth", *more]


def test_its_own_arguments_are_taken_out_and_flowers_stay(folder, monkeypatch):
    monkeypatch.setattr(sys, "argv", own(folder, "--port", "8000"))
    assert superlink.prepare_arguments() is not None
    flowers = ["--fleet-api-type", "grpc-rere", "--fleet-api-address", "0.0.0.0:9092"]
    expected = ["--enable-supernode-auth", "--port", "8000", *(flowers if SPEAKS == "gRPC" else [])]
    assert sys.argv[1:] == expected


def test_where_flower_has_one_port_for_all_the_guard_listens_where_sites_are_served(folder, monkeypatch):
    monkeypatch.setattr(sys, "argv", own(folder, "--fleet-api-address", "[::1]:9000"))
    fronts = superlink.prepare_arguments()
    assert fronts.fleet == (("::1", 9000) if SPEAKS == "HTTP" else None)
    assert (fronts.sites is None) == (SPEAKS == "gRPC")


@pytest.mark.parametrize("address", ["9092", ":9092", "x:", "x:0", "x:65536", "x:-1", "x:9092y", "\x1b[2J", "x" * 500])
def test_where_sites_are_served_is_an_address(address, folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", own(folder, f"--fleet-api-address={address}"))
    with pytest.raises(SystemExit) as ended:
        superlink.prepare_arguments()
    assert ended.value.code == 2
    stderr = capsys.readouterr().err
    assert "is not HOST:PORT" in stderr
    assert "\x1b" not in stderr
    assert len(stderr) < 300


@pytest.mark.skipif(SPEAKS == "gRPC", reason="Flower 1.39 listens there itself, and says so")
@pytest.mark.parametrize(
    "control", [["--port", "9092"], ["--port=9092"], ["--por", "9092"], ["--port=1", "--port=9092"]]
)
def test_operators_and_sites_have_a_port_each(control, folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", own(folder, *control))
    with pytest.raises(SystemExit):
        superlink.prepare_arguments()
    assert "port 9092 is also the control port" in capsys.readouterr().err


def test_with_a_flower_that_is_not_known_it_does_not_start(folder, monkeypatch, capsys):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.43.0")
    monkeypatch.setattr(sys, "argv", own(folder))
    with pytest.raises(SystemExit):
        superlink.prepare_arguments()
    assert "error: flwr: this is version" in capsys.readouterr().err


def test_the_control_calls_have_no_other_port(folder, monkeypatch):
    """Flower serves them over gRPC too where this variable says so, and nobody asks for an operator there."""
    monkeypatch.setenv("FLWR_INTERNAL_GRPC_CONTROL_API", "1")
    monkeypatch.setenv("FLWR_INTERNAL_GRPC_FLEET_API", "1")
    monkeypatch.setattr(sys, "argv", own(folder))
    superlink.prepare_arguments()
    assert not {name for name in os.environ if name.startswith("FLWR_INTERNAL_GRPC")}


@pytest.mark.parametrize("more", [["--fleet-api-type", "grpc-adapter"], ["--fleet-api-type=grpc-adapter"]])
def test_a_fleet_port_that_asks_for_no_key_is_refused(more, folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", own(folder, *more))
    with pytest.raises(SystemExit):
        superlink.prepare_arguments()
    assert "--fleet-api-type: it must be grpc-rere" in capsys.readouterr().err


@pytest.mark.skipif(SPEAKS == "HTTP", reason="from 1.41 on Flower warns of the option, and serves no gRPC")
def test_nor_is_one_that_is_named_by_half_its_option(folder, monkeypatch):
    """Flower takes the last."""
    monkeypatch.setattr(sys, "argv", own(folder, "--fleet-api-t", "grpc-adapter"))
    superlink.prepare_arguments()
    from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink

    assert _parse_args_run_superlink().parse_args().fleet_api_type == "grpc-rere"


@pytest.mark.parametrize("flag", ["", "--enable-supernode-aut"])
def test_without_keys_of_sites_it_does_not_start(flag, folder, monkeypatch, capsys):
    """Flower takes half an option too; this program looks for the whole one."""
    given = [flag if word == "--enable-supernode-auth" else word for word in own(folder)]
    monkeypatch.setattr(sys, "argv", [word for word in given if word])
    with pytest.raises(SystemExit) as ended:
        superlink.prepare_arguments()
    assert ended.value.code == 2
    assert "--enable-supernode-auth is missing" in capsys.readouterr().err


def test_that_nothing_is_checked_stands_in_the_log(folder, monkeypatch):
    monkeypatch.setattr(sys, "argv", own(folder, "--without-fleet-checks"))
    installed = []
    monkeypatch.setattr(grpc, "server", grpc.server)  # put back afterwards
    monkeypatch.setattr(superlink, "_install_fleet_port", lambda *given: installed.append(given))
    superlink.prepare_arguments().install_checks()
    assert "--without-fleet-checks" not in sys.argv
    assert audit_log.last_entry(folder / "control.jsonl")["event"] == "unchecked"
    monkeypatch.setattr(sys, "argv", own(folder))
    superlink.prepare_arguments().install_checks()
    assert len(installed) == 1


@pytest.mark.parametrize("missing", ["registry/members.json", "registry/operators.json"])
def test_without_its_registry_it_does_not_start(missing, folder, monkeypatch, capsys):
    (folder / missing).unlink()
    monkeypatch.setattr(sys, "argv", own(folder))
    with pytest.raises(SystemExit):
        superlink.prepare_arguments()
    assert missing in capsys.readouterr().err


@pytest.mark.parametrize("given", [[], ["--fedveil-registry", "x"], ["--fedveil-log", "x"], ["--database", "x"]])
def test_without_its_arguments_it_does_not_start(given, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["flower-superlink", *given])
    with pytest.raises(SystemExit) as ended:
        superlink.prepare_arguments()
    assert ended.value.code == 2
    assert "--fedveil-registry FOLDER and --fedveil-log FILE are needed" in capsys.readouterr().err


def test_nor_with_a_log_that_was_changed(folder, monkeypatch, capsys):
    (folder / "control.jsonl").write_text("{}\n")
    monkeypatch.setattr(sys, "argv", own(folder))
    with pytest.raises(SystemExit):
        superlink.prepare_arguments()
    assert "control.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["--help", "--version", "--simulation"])
def test_where_there_are_no_sites_it_asks_for_nothing(word, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["flower-superlink", word])
    assert superlink.prepare_arguments() is None


def test_every_server_of_the_process_is_behind_it(monkeypatch):
    monkeypatch.setattr(uvicorn.Config, "__init__", uvicorn.Config.__init__)  # put back afterwards
    superlink.serve_through(lambda app: (app, "wrapped"))
    assert uvicorn.Config("app", port=1).app == ("app", "wrapped")


@pytest.mark.long
@pytest.mark.parametrize("main", ["superlink.main()", "loopback_ports.main('flower-superlink')"])
def test_a_superlink_has_all_that_is_mended(main):
    code = f"""
import atexit, logging, sys
from fedveil.guard import loopback_ports, superlink

def show():
    from flwr.server.superlink.linkstate import in_memory_linkstate, sql_linkstate
    for state in (in_memory_linkstate.InMemoryLinkState, sql_linkstate.SqlLinkState):
        for name in ("store_object", "get_message_res", "get_message_ins"):
            print(getattr(state, name).__module__, file=sys.stderr)
    print(*(type(limit).__name__ for limit in logging.getLogger("flwr").filters), file=sys.stderr)

atexit.register(show)
sys.argv = ["flower-superlink", "--help"]
{main}
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    mended = ("duplicate_pushes", "flower.incomplete_replies", "flower.redelivery")
    patches = [f"fedveil.guard.{name}" for name in mended]
    assert ended.stderr.split() == [*patches, *patches, "RefusalLineFilter"]
