"""`fedveil site start`: what comes from the kit, what goes before it, and what is said before anything is started."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import tomllib
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from fedveil.client_app.node_config import SiteConfig
from fedveil.console.flower.certificates import new_ca, write_certificate, write_server
from fedveil.console.flower.instruction_key_files import public_key
from fedveil.console.flower.processes import ProcessGroup
from fedveil.console.launch import online_watch, restarts, site_lock
from fedveil.console.launch import site as site_start
from fedveil.console.main import main
from fedveil.console.provisioning import enrollment
from fedveil.console.runs import site_notes
from fedveil.errors import ConfigError
from tests.conftest import ROOT, extract
from tests.fedveil.console.tls import tls_server

TEXT = 'name = "pilot"\nserver = ["localhost"]\nsites = ["north"]\n'


@pytest.fixture
def kit(tmp_path, monkeypatch, capsys) -> Path:
    """Of site north, with keys and a row; nothing has been asked of any server."""
    (tmp_path / "federation.toml").write_text(TEXT)
    assert main(["provision", str(tmp_path / "federation.toml")]) == 0
    extract(tmp_path / "pilot" / "kits" / "north.tar.gz", tmp_path)
    folder = tmp_path / "pilot-north"
    assert main(["site", "init", "--kit", str(folder)]) == 0
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text(json.dumps({"mr": "name[a]", "ref": "text"}) + "\n")
    monkeypatch.setattr(site_start, "start_isolated", started)
    capsys.readouterr()
    return folder


def started(processes, name, command, env, port, secret):
    raise ConfigError("started: " + " ".join(command) + f" poll {env['FEDVEIL_POLL_SECONDS']}")


def start(kit: Path, *more: str) -> int:
    return main(["site", "start", "--kit", str(kit), *more])


def test_everything_comes_from_the_kit(kit, capsys, monkeypatch):
    monkeypatch.chdir(kit)
    assert start(Path()) == 2
    output = capsys.readouterr()
    assert "no answer yet: localhost:9092" in output.out  # a server that is not there yet is waited for
    for word in (
        f"--root-certificates {kit}/ca.crt", "--superlink localhost:9092", "poll 0.2",
        f"--auth-supernode-private-key {kit}/keys/node.key", f"--node-config {kit}/state/north.toml",
    ):  # fmt: skip
        assert word in output.err
    assert tomllib.loads((kit / "state" / "north.toml").read_text()) == {
        "site": "north", "data": f"{kit}/data", "data-set": "north", "state-dir": f"{kit}/state",
        "policy": f"{kit}/site-policy.toml", "signing-key": f"{kit}/keys/signing.key",
        "instruction-keys": f"{kit}/instruction-keys.toml",
    }  # fmt: skip
    assert site_notes.noted_federation(kit / "state", "north") == "pilot"  # for the site's page; Flower is not given it


def test_options_go_before_the_kit_and_are_relative_to_where_one_stands(kit, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.toml").write_text("methods = []\n")
    options = (
        "--superlink", "localhost:1", "--name", "n2", "--policy", "own.toml", "--state-dir", "s", "--data",
        "pilot-north/data/train.jsonl", "--device", "cpu", "--poll-seconds", "3", "--worker-memory-mb", "77",
    )  # fmt: skip
    assert start(kit, *options) == 2
    stderr = capsys.readouterr().err
    assert "--superlink localhost:1" in stderr
    assert "poll 3.0" in stderr
    assert tomllib.loads((tmp_path / "s" / "n2.toml").read_text()) == {
        "site": "n2", "data": f"{kit}/data/train.jsonl", "data-set": "north", "state-dir": f"{tmp_path}/s",
        "policy": f"{tmp_path}/own.toml", "signing-key": f"{kit}/keys/signing.key", "device": "cpu",
        "instruction-keys": f"{kit}/instruction-keys.toml", "worker-memory-mb": 77,
    }  # fmt: skip
    assert start(kit, "--permit-everything", "--state-dir", "s") == 2
    assert "policy" not in tomllib.loads((tmp_path / "s" / "north.toml").read_text())


def test_a_kit_without_keys_or_rows_says_what_is_missing(kit, capsys):
    (kit / "keys" / "signing.key").unlink()
    assert start(kit) == 2
    assert f"{kit}: signing-key: expected a file" in (stderr := capsys.readouterr().err)
    assert "fedveil site init makes it" in stderr
    (kit / "keys" / "signing.key").write_bytes(bytes(32))
    (kit / "keys" / "signing.key").chmod(0o600)
    (kit / "data").rename(kit / "rows")
    assert start(kit) == 2
    assert "put the examples there, or correct node-config.toml" in capsys.readouterr().err
    (kit / "data" / "train").mkdir(parents=True)
    assert start(kit) == 2
    assert f"data: expected examples, found no file in the folder {kit}/data;" in capsys.readouterr().err
    assert not (kit / "state").exists()


def test_instruction_keys_that_cannot_be_used_are_named_before_anything_is_started(kit, capsys):
    file = kit / "instruction-keys.toml"
    whole, small_order = file.read_text(), "01" + "00" * 31
    for text, reason in (
        (whole.replace("keys =", "key ="), "it may contain only federation and keys"),
        (f'federation = "{"ab" * 16}"\nkeys = ["{small_order}"]\n', "a key has small order"),
    ):
        file.write_text(text)
        assert start(kit) == 2
        stderr = capsys.readouterr().err
        assert f"{file}: cannot read the server's instruction keys" in stderr
        assert reason in stderr
    file.unlink()
    assert start(kit) == 2
    stderr = capsys.readouterr().err
    assert f"{kit}: instruction-keys: expected a file, found none at {file}" in stderr
    assert "extract only that file from the kit again" in stderr
    other = kit.parent / "other.toml"
    other.write_text(whole)
    assert start(kit, "--instruction-keys", str(other)) == 2
    assert tomllib.loads((kit / "state" / "north.toml").read_text())["instruction-keys"] == str(other)


def test_a_signing_key_that_was_not_registered_is_named_before_anything_is_started(kit, capsys):
    own, other = kit / "keys" / "signing.key", kit.parent / "other.key"
    other.write_bytes(bytes(range(32)))
    other.chmod(0o600)
    assert start(kit, "--signing-key", str(other)) == 2
    stderr = capsys.readouterr().err
    assert f"{other}: expected the signing key {enrollment.short_key(public_key(own))}, which {kit}/keys/req" in stderr
    assert "found 03a1 07bf f3ce 10be, with which the server would count no replies; restore" in stderr
    # A renewal leaves the earlier keys in use until the operator has registered the new ones.
    assert main(["site", "init", "--kit", str(kit), "--renew", "--renew-signing"]) == 0
    earlier = ("--key", str(kit / "keys" / "node.key.old"), "--signing-key", str(kit / "keys" / "signing.key.old"))
    assert start(kit, *earlier) == 2
    assert "started: " in capsys.readouterr().err
    assert start(kit, *earlier[2:]) == 2
    assert "signing.key.old: expected the signing key" in capsys.readouterr().err
    (kit / "keys" / "request.json").unlink()
    assert start(kit, *earlier[2:]) == 2
    assert "started: " in capsys.readouterr().err


def test_a_site_behind_a_relay_keeps_the_keys_that_it_signs_with(kit, capsys):
    relayed = site_start.resolve_site({}, kit, False, need=("name",))
    assert relayed.node.instruction_keys == str(kit / "instruction-keys.toml")
    assert relayed.node.signing_key == str(kit / "keys" / "signing.key")
    (kit / "keys" / "signing.key").unlink()
    unsigned = site_start.resolve_site({}, kit, False, need=("name",))
    assert unsigned.node.signing_key == ""  # its guard refuses every instruction
    assert unsigned.node.instruction_keys == relayed.node.instruction_keys
    site_start.require_policy(relayed.node)
    assert "requires signed instructions" not in capsys.readouterr().out


def test_an_empty_file_is_no_rows(kit, capsys):
    empty = kit / "empty.jsonl"
    empty.touch()
    assert start(kit, "--data", str(empty)) == 2
    assert f"--data: expected examples, found an empty file at {empty}" in capsys.readouterr().err


def test_a_folder_of_examples_that_cannot_be_read_is_not_called_empty(kit, capsys, monkeypatch, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir()
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: False if str(path) == str(closed) else real(path, mode))
    assert start(kit, "--data", str(closed)) == 2
    assert f"--data: expected examples that this user can read, found {closed}" in capsys.readouterr().err


def test_without_kit_the_missing_options_and_a_kit_at_hand_are_named(kit, capsys, monkeypatch):
    monkeypatch.chdir(kit)
    assert main(["site", "start", "--name", "north"]) == 2
    assert "found no --superlink, --ca, --key; this folder has one: --kit ." in capsys.readouterr().err


@pytest.mark.parametrize(
    "line,reason",
    [
        ('superlink = "nowhere"', "site.toml: superlink: .* found nowhere; unpack the kit again"),
        ('site = "../x"', "site.toml: site: "),
        ("poll-seconds = 0", "site.toml: poll-seconds: "),
        ('more = "x"', "site.toml: more: "),
        ("[", "site.toml: expected TOML, found an error: .* correct that line"),
    ],
)
def test_a_kit_that_was_changed_is_refused_by_key(kit, capsys, line, reason):
    name = line.partition(" ")[0]
    text = (kit / "site.toml").read_text().splitlines()
    (kit / "site.toml").write_text("\n".join([*(row for row in text if not row.startswith(name)), line]))
    assert start(kit) == 2
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(capsys.readouterr().err)


def key_of(kind: str) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1() if "another kind" in kind else ec.SECP384R1())
    if "RSA" in kind:
        key = rsa.generate_private_key(65537, 2048)
    forms = {
        "a SEC1 key": serialization.PrivateFormat.TraditionalOpenSSL,
        "a PKCS#8 key": serialization.PrivateFormat.PKCS8,
    }
    form = forms.get("a PKCS#8 key" if "in PKCS#8" in kind else kind, serialization.PrivateFormat.OpenSSH)
    lock = serialization.BestAvailableEncryption(b"x") if "passphrase" in kind else serialization.NoEncryption()
    return b"hello" if kind == "something else" else key.private_bytes(serialization.Encoding.PEM, form, lock)


@pytest.mark.parametrize(
    "kind,mend",
    [
        ("a SEC1 key", "ssh-keygen -p -N '' -f"),
        ("a PKCS#8 key", "ssh-keygen -p -N '' -f"),
        ("another kind", "choose another"),
        ("another kind, in PKCS#8", "choose another"),
        ("another kind, in PKCS#8 and RSA", "choose another"),
        ("something else", "choose another"),
    ],
)
def test_a_key_that_flower_does_not_take_is_named_by_its_form(kit, capsys, kind, mend):
    (kit / "keys" / "node.key").write_bytes(key_of(kind))
    assert start(kit) == 2
    stderr = capsys.readouterr().err
    assert f"found {kind.partition(', in PKCS#8')[0]}" in stderr
    assert mend in stderr
    assert not (kit / "state").exists()


@pytest.mark.long
def test_a_gpu_that_is_not_there_is_said_before_anything_starts_and_others_are_not_looked_for(kit, capsys, monkeypatch):
    assert start(kit, "--device", "cuda:99") == 2
    stderr = capsys.readouterr().err
    assert 'GPUs that torch finds here, found "cuda:99"; --device auto uses what is available' in stderr
    assert not (kit / "state").exists()
    monkeypatch.setattr(sys, "executable", "/no/python")
    for fits in ("auto", "cpu"):
        site_start.require_device(fits)
    with pytest.raises(ConfigError, match="device: torch cannot count the GPUs, which 'cuda' needs"):
        site_start.require_device("cuda")


def test_a_node_key_that_others_can_read_is_refused(kit, capsys):
    (kit / "keys" / "node.key").chmod(0o644)
    assert start(kit) == 2
    stderr = capsys.readouterr().err
    assert "node.key to be readable by its owner only, found mode 644; chmod 600, and make a new key" in stderr
    assert not (kit / "state").exists()


def test_a_policy_that_does_not_parse_is_named_with_the_place(kit, capsys):
    unknown = "found the unknown key methodz; did you mean methods? known keys: methods, tasks, "
    near = "unknown key train.batch-siz in [permits]; did you mean train.batch-size?"
    broken = (
        ("methods = [\n1 2\n", "line 2"),
        ('methodz = ["a"]\n', unknown),
        ('[permits]\n"train.batch-siz" = 8\n', near),
    )
    for text, reason in broken:
        (kit / "site-policy.toml").write_text(text)
        assert start(kit) == 2
        stderr = capsys.readouterr().err
        assert f"{kit}/site-policy.toml: expected a site policy" in stderr
        assert reason in stderr
        assert "refuses every run" in stderr


def test_a_name_in_the_policy_that_is_not_installed_is_said_and_no_reason_to_refuse(kit, tmp_path, capsys):
    """It may come with a later version; or it is a slip, and then every run is refused."""
    file = tmp_path / "site-policy.toml"
    file.write_text('methods = ["fedrnd", "fedavg"]\n')
    site_start.require_policy(SiteConfig(site="north", policy=str(file)))
    stdout = capsys.readouterr().out
    assert stdout == f"site north: {file}: methods permits fedrnd, which is not installed here; did you mean fedrand?\n"


def test_a_site_that_runs_here_already_is_not_started_again(kit, capsys):
    state = kit / "state"
    with site_lock.hold_site_lock(state, "north", ProcessGroup(state)):
        assert start(kit) == 2
    output = capsys.readouterr()
    assert "site north: already running from" in output.err
    assert output.out.count("\n") == 1  # nobody was asked
    assert "site-policy.toml permits nothing yet (empty: methods, tasks, models, app-digests)" in output.out


@pytest.mark.parametrize("refusals,code", [(2, 0), (99, 2)])
def test_a_site_that_the_server_still_holds_for_online_is_started_again_for_a_while(
    kit, capsys, monkeypatch, refusals, code
):
    clock, starts = [0.0], []

    def held(start, watched):
        starts.append(clock[0])
        if len(starts) <= refusals:
            raise online_watch.StateLockedError("site north: the server has it online already")
        return 0

    monkeypatch.setattr(site_start, "_started", held)
    monkeypatch.setattr(online_watch, "missing_sites", lambda superlink, ca: "")
    monkeypatch.setattr(site_start.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(site_start.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    assert start(kit) == code
    output = capsys.readouterr()
    assert output.out.count("retrying for up to 75 s") == 1
    assert output.err.count("online already") == (code == 2)
    assert starts == [10.0 * turn for turn in range(3 if code == 0 else 9)]


def test_a_server_with_another_ca_or_an_expired_certificate_is_no_server_of_this_kit(kit, capsys):
    ca, key = new_ca("pilot CA", timedelta(days=2))
    write_server(kit, ca, key, ["localhost"], timedelta(days=1))
    with tls_server(kit) as address:
        assert start(kit, "--superlink", address) == 2
    stderr = capsys.readouterr().err
    assert f"--superlink: expected this federation's server, found something else: {address}" in stderr
    assert "check that ca.crt is this federation's" in stderr
    write_certificate(kit / "ca.crt", ca)
    write_server(kit, ca, key, ["localhost"], timedelta(minutes=-4))
    with tls_server(kit) as address:
        assert start(kit, "--superlink", address) == 2
    assert "certificate has expired" in capsys.readouterr().err
    write_server(kit, ca, key, ["localhost"], timedelta(days=1))
    with tls_server(kit) as address:
        assert start(kit, "--superlink", address) == 2
    assert "started: " in capsys.readouterr().err


def test_a_port_without_tls_is_no_fleet_port(kit, capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        assert start(kit, "--superlink", f"127.0.0.1:{listener.getsockname()[1]}") == 2
        thread.join(10)
    assert "does not speak TLS" in capsys.readouterr().err


def test_an_expired_ca_is_said_before_anybody_is_asked(kit, capsys):
    ca, _ = new_ca("pilot CA", timedelta(minutes=-1))
    write_certificate(kit / "ca.crt", ca)
    assert start(kit) == 2
    assert f"{kit}/ca.crt: expected a certificate that is valid now" in (stderr := capsys.readouterr().err)
    assert "expired on" in stderr
    assert "the operator must provision the federation again" in stderr  # no certificate outlives its CA


@pytest.mark.parametrize("where", ["/proc/x", "a-file", "a-file/below"])
def test_a_state_folder_that_cannot_be_is_named(kit, capsys, monkeypatch, where):
    monkeypatch.chdir(kit)
    (kit / "a-file").write_text("mine")
    (kit / "a-file").chmod(0o644)
    assert start(kit, "--state-dir", where) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--state-dir: expected a folder that this user can create and write to" in error
    assert where.removesuffix("/below") in error
    assert ((kit / "a-file").stat().st_mode & 0o777, (kit / "a-file").read_text()) == (0o644, "mine")


@pytest.mark.long
def test_what_waits_for_weeks_does_without_torch(tmp_path):
    """Some hundred MB; the policy's names are looked up by the names of files."""
    (tmp_path / "site-policy.toml").write_text('methods = ["fedavg"]\ntasks = ["text-generation"]\n')
    code = "import sys; from fedveil.console.launch import site as s; "
    code += "from fedveil.client_app.node_config import SiteConfig; "
    code += f"s.require_policy(SiteConfig(site='north', policy={str(tmp_path / 'site-policy.toml')!r})); "
    done = subprocess.run(
        [sys.executable, "-c", f"{code}sys.exit('torch' in sys.modules)"], cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_site_whose_supernode_ended_is_started_again_later_each_time_and_not_for_ever(kit, capsys, monkeypatch):
    clock, starts = [0.0], []

    def ended(start, watched):
        starts.append(clock[0])
        raise online_watch.SiteProcessEndedError("site north: its SuperNode ended with exit code 1", "exit code 1")

    monkeypatch.setattr(site_start, "_started", ended)
    monkeypatch.setattr(online_watch, "missing_sites", lambda superlink, ca: "")
    monkeypatch.setattr(site_start.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(site_start, "Restarts", lambda: restarts.Restarts(lambda: clock[0]))
    monkeypatch.setattr(site_start.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    assert start(kit) == 2
    said = capsys.readouterr()
    assert [after - before for before, after in pairwise(starts)] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert "exit code 1. Restarting in 16 s" in said.out
    assert "exit code 1: 10 times within 10 minutes" in said.err


def test_a_certificate_that_is_over_meanwhile_ends_a_site_that_would_be_started_again(kit, capsys, monkeypatch):
    def ended(start, watched):
        ca, _ = new_ca("pilot CA", timedelta(minutes=-4))
        write_certificate(kit / "ca.crt", ca)
        raise online_watch.SiteProcessEndedError("site north: ended", "x")

    monkeypatch.setattr(site_start, "_started", ended)
    monkeypatch.setattr(online_watch, "missing_sites", lambda superlink, ca: "")
    monkeypatch.setattr(site_start.time, "sleep", lambda seconds: None)
    assert start(kit) == 2
    assert "ca.crt: expected a certificate that is valid now" in capsys.readouterr().err
