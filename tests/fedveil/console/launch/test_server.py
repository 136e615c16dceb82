"""`fedveil server start`: ports, files and members come from the federation's folder."""

from __future__ import annotations

import json
import os
import re
import socket
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from fedveil.console.flower.certificates import new_ca, write_server
from fedveil.console.flower.machine import free_ports
from fedveil.console.launch import server
from fedveil.console.main import main
from fedveil.errors import ConfigError
from fedveil.records import process_exit


@pytest.fixture
def pilot(tmp_path, capsys) -> Path:
    fleet, control = free_ports(2)
    text = f'name = "pilot"\nserver = ["localhost"]\nsites = ["a"]\nfleet-port = {fleet}\ncontrol-port = {control}\n'
    (tmp_path / "federation.toml").write_text(text)
    assert main(["provision", str(tmp_path / "federation.toml")]) == 0
    assert f"fedveil server start {tmp_path / 'pilot'}" in capsys.readouterr().out
    return tmp_path / "pilot"


def ports(pilot: Path) -> tuple[int, int]:
    about = server.SiteRegistry(pilot).federation
    return about.fleet_port, about.control_port


def test_both_programs_get_what_the_folder_says(pilot, monkeypatch, capsys):
    fleet, control = ports(pilot)

    def started(processes, name, command, env, port, secret, ca, cwd):
        raise ConfigError(f"started {' '.join(command)} | {port} {secret} {ca} {cwd} {env['FLWR_HOME']}")

    monkeypatch.setattr(server, "start_isolated", started)
    assert main(["server", "start", str(pilot)]) == 2
    stderr = capsys.readouterr().err
    own = pilot / "server"
    for word in (
        f"--fedveil-registry {pilot}/registry", f"--fedveil-log {own}/control-log.jsonl", f"--port {control}",
        f"--fleet-api-address 0.0.0.0:{fleet}", f"--ssl-keyfile {own}/server.key", f"--database {own}/superlink.db",
        f"| {control} {own}/superexec-secret {own}/ca.crt {pilot} {own}/apps",
    ):  # fmt: skip
        assert word in stderr
    assert main(["server", "start", str(pilot), "--listen", f"127.0.0.1:{fleet}", "--state-dir", str(pilot / "s")]) == 2
    stderr = capsys.readouterr().err
    assert f"--fleet-api-address 127.0.0.1:{fleet}" in stderr
    assert f"--database {pilot}/s/superlink.db" in stderr


@pytest.mark.parametrize("which,what", [(0, "fleet-port"), (1, "control-port")])
def test_a_port_in_use_is_named_before_anything_is_started(pilot, which, what):
    port = ports(pilot)[which]
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ConfigError, match=f"{what}: expected a free port at .*:{port}, found one in use: ") as error,
    ):
        server.resolve_server(pilot)
    assert re.search(rf"by process {os.getpid()} \(.+\) \(kill {os.getpid()}\); if this", str(error.value))
    assert server.resolve_server(pilot).control_port == ports(pilot)[1]


def test_a_key_of_the_server_that_others_can_read_is_refused(pilot):
    key = pilot / "server" / "server.key"
    key.chmod(0o640)
    with pytest.raises(ConfigError, match=r"server\.key: expected a file readable only by its owner, found mode 640"):
        server.resolve_server(pilot)
    key.chmod(0o600)
    server.resolve_server(pilot)


def test_who_listens_and_cannot_be_known_is_said_so(pilot, monkeypatch):
    def denied(kind):
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "net_connections", denied)
    with (
        socket.create_server(("127.0.0.1", ports(pilot)[0])),
        pytest.raises(ConfigError, match="by another server or program on this machine; if this federation"),
    ):
        server.resolve_server(pilot)


@pytest.mark.parametrize("listen", ["nonsense", "127.0.0.1:99999", "203.0.113.1:9092"])
def test_an_address_that_is_not_this_machines_is_refused(pilot, listen, capsys):
    assert main(["server", "start", str(pilot), "--listen", listen]) == 2
    assert listen.rpartition(":")[0] in capsys.readouterr().err


def test_a_missing_file_an_expired_certificate_and_another_folder_are_named(pilot, tmp_path, capsys):
    ca, key = new_ca("CA", timedelta(days=1))
    write_server(pilot / "server", ca, key, ["localhost"], timedelta(minutes=-4))
    assert main(["server", "start", str(pilot)]) == 2
    assert "server.pem: expected a certificate that is valid now" in capsys.readouterr().err
    (pilot / "server" / "server.key").unlink()
    assert main(["server", "start", str(pilot)]) == 2
    assert "expected server.key, found none" in capsys.readouterr().err
    assert main(["server", "start", str(tmp_path)]) == 2
    assert "expected a folder made by fedveil provision" in (stderr := capsys.readouterr().err)
    assert stderr.endswith("; name that folder\n")


def test_a_full_disk_is_said_once_and_so_is_its_end(pilot, monkeypatch, capsys):
    monkeypatch.setattr(server, "_DISK_SECONDS", 0.0)
    programs = server._Programs(server.resolve_server(pilot), None)
    for free in (1 << 40, 1 << 20, 1 << 20, 1 << 40, 1 << 40):
        monkeypatch.setattr(process_exit.shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        programs.tell_full_disk()
    first, second = capsys.readouterr().err.splitlines()
    assert (
        first
        == f"server: the disk of {pilot / 'server'} is full (1 MB free): free some disk space; until then runs fail"
    )
    assert second == f"server: the disk of {pilot / 'server'} has space again"


@pytest.mark.parametrize("content", [b"garbage", b"SQLite format 3\1" + bytes(100)])
def test_a_database_with_garbage_in_its_header_is_named_before_anything_is_started(content, pilot, capsys):
    (pilot / "server" / "superlink.db").write_bytes(content)
    assert main(["server", "start", str(pilot)]) == 2
    assert "superlink.db: expected Flower's database, found a damaged or different file" in (
        stderr := capsys.readouterr().err
    )
    assert f"fedveil members sync {pilot}" in stderr
    server.resolve_server(pilot, state=pilot / "elsewhere")  # none is there


def test_the_app_process_is_told_where_the_key_and_the_signers_are(pilot, monkeypatch, capsys):
    def started(processes, name, command, env, port, secret, ca, cwd):
        raise ConfigError(f"started {env.get('FEDVEIL_INSTRUCTION_KEY')} {env.get('FEDVEIL_SIGNERS')}")

    monkeypatch.setattr(server, "start_isolated", started)
    own = pilot / "server"
    signers = own / "roster" / "signers.json"
    before = signers.read_bytes()
    signers.write_bytes(before.replace(b'"invited"', b'"revoked"'))  # written again from the registry
    assert main(["server", "start", str(pilot)]) == 2
    expected = f"started {own}/instruct/instruction.key {own}/roster/signers.json"
    assert expected in capsys.readouterr().err
    assert signers.read_bytes() == before
    file = pilot / "registry" / "members.json"
    content = json.loads(file.read_text())
    del content["instruction-keys"]  # as before there were any
    file.write_text(json.dumps(content))
    assert main(["server", "start", str(pilot)]) == 2
    assert expected in capsys.readouterr().err  # the key is there: instructions stay signed
    (own / "instruct" / "instruction.key").unlink()
    assert main(["server", "start", str(pilot)]) == 2  # signatures are required, and nothing could sign
    assert "signatures: expected instruction keys, which signatures = required needs" in capsys.readouterr().err
    content["federation"]["signatures"] = "optional"
    file.write_text(json.dumps(content))
    assert main(["server", "start", str(pilot)]) == 2
    assert "started None None" in capsys.readouterr().err


@pytest.mark.parametrize("list_", ["roster/signers.json", "instruct/bundles.toml"])
@pytest.mark.parametrize("which", ["file", "folder"])
def test_a_list_that_other_users_could_change_is_refused_before_anything_is_started(pilot, list_, which):
    file = pilot / "server" / list_
    file.touch(0o600)
    server.resolve_server(pilot)
    path = file if which == "file" else file.parent
    path.chmod(0o770)
    with pytest.raises(ConfigError, match=f"expected a file that only the server's user can change, but {path} has"):
        server.resolve_server(pilot)


def test_an_instruction_key_that_others_can_read_is_missing_or_is_another_is_refused(pilot):
    key = pilot / "server" / "instruct" / "instruction.key"
    key.chmod(0o640)
    with pytest.raises(
        ConfigError, match=r"instruction\.key: expected a file readable only by its owner, found mode 640"
    ):
        server.resolve_server(pilot)
    key.chmod(0o600)
    server.resolve_server(pilot)
    key.write_bytes(os.urandom(32))
    with pytest.raises(
        ConfigError, match=r"instruction\.key: expected the current key .* found a different one; restore"
    ):
        server.resolve_server(pilot)
    key.unlink()
    with pytest.raises(ConfigError, match=r"instruction\.key: expected the key that signs instructions, found none"):
        server.resolve_server(pilot)
