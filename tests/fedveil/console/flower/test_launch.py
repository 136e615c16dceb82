import json
import socket
import stat
import tomllib
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedveil.console.flower import instruction_key_files
from fedveil.console.flower.certificates import write_node_key, write_tls
from fedveil.console.flower.local_deployment import LocalDeployment, LocalSite
from fedveil.console.flower.machine import PORTS, format_toml, free_ports
from fedveil.console.flower.processes import LaunchError
from fedveil.federation.message_signatures.key_files import InstructionKeys, SiteSigner, SiteSigners
from fedveil.federation.secagg import crypto


def test_free_ports_are_different_and_free():
    ports = free_ports(8)
    assert len(set(ports)) == 8
    assert set(ports) <= set(PORTS)
    for port in ports:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_taken_port_is_not_offered(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr("fedveil.console.flower.machine.PORTS", range(port, port + 1))
        with pytest.raises(LaunchError, match="ports: expected 1 free"):
            free_ports(1)


def test_node_key_is_p384_in_openssh_format(tmp_path):
    write_node_key(tmp_path / "north")
    key = serialization.load_ssh_private_key((tmp_path / "north").read_bytes(), None)
    public = serialization.load_ssh_public_key((tmp_path / "north.pub").read_bytes())
    assert isinstance(public, ec.EllipticCurvePublicKey)
    assert public.curve.name == "secp384r1"
    assert key.public_key() == public
    assert stat.S_IMODE((tmp_path / "north").stat().st_mode) == 0o600


def test_certificate_is_signed_by_the_ca_and_names_the_loopback(tmp_path):
    write_tls(tmp_path)
    ca = x509.load_pem_x509_certificate((tmp_path / "ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate((tmp_path / "server.pem").read_bytes())
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    assert {file.name for file in tmp_path.iterdir()} == {"ca.crt", "server.pem", "server.key"}
    assert stat.S_IMODE((tmp_path / "server.key").stat().st_mode) == 0o600


def test_toml_carries_every_value_as_it_is():
    values = {"a": 'it\'s "quoted" \\ 100 %', "b": True, "c": 3, "d": 1e-05, "e": "ü\n", "method.params": "rho = 0.5"}
    loaded = tomllib.loads(format_toml(values))
    assert loaded.pop("method") == {"params": "rho = 0.5"}
    assert loaded == {key: value for key, value in values.items() if key != "method.params"}


@pytest.mark.parametrize("name", ["", "a b", "../x", "superlink", "x" * 65])
def test_site_name_is_checked(name):
    with pytest.raises(LaunchError, match="site name: expected"):
        LocalSite(name)


def test_sites_must_differ(tmp_path):
    with pytest.raises(LaunchError, match="with unique names"):
        LocalDeployment([LocalSite("a"), LocalSite("a")], tmp_path)


def test_failed_start_names_the_process_its_log_and_leaves_nothing(tmp_path, monkeypatch):
    script = tmp_path / "bin" / "flower-superlink"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\necho 'the port is taken' >&2\nexit 7\n")
    script.chmod(0o755)
    beside = script.with_name("flower-superexec")
    beside.write_text("#!/bin/sh\nexec sleep 600\n")  # one that ended too might be named instead
    beside.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(script.parent / "python"))
    monkeypatch.setattr("fedveil.console.flower.local_deployment.single_user_environment", lambda env, folder: env)
    federation = LocalDeployment([LocalSite("a")], tmp_path / "work")
    with pytest.raises(LaunchError, match="superlink: ended with exit code 7; its log ends: the port is taken"):
        federation.__enter__()
    assert federation.processes.alive() == []
    assert stat.S_IMODE((tmp_path / "work").stat().st_mode) == 0o700


def test_node_config_is_a_file_that_carries_any_path(tmp_path):
    federation = LocalDeployment(
        [LocalSite("a"), LocalSite("b", Path('/data/it\'s "here"'), (("policy", "p.toml"),))], tmp_path
    )
    federation._prepare()
    config = tomllib.loads(federation._write_node_config("b").read_text())
    assert config == {
        "site": "b",
        "state-dir": str(tmp_path / "sites" / "b"),
        "device": "cpu",
        "partition-id": 1,
        "num-partitions": 2,
        "simulated": True,
        "data": '/data/it\'s "here"',
        "data-set": "b",
        "policy": "p.toml",
        "signing-key": str(tmp_path / "keys" / "b.signing"),
        "instruction-keys": str(tmp_path / "instruction-keys.toml"),
    }
    assert "instruction-keys" not in tomllib.loads(federation._write_node_config("a").read_text())


@pytest.mark.parametrize("guarded", [False, True])
def test_guarded_sites_sign_and_pin_the_servers_key(guarded, tmp_path):
    own = tmp_path / "own.key"
    own.write_bytes(bytes(range(32)))
    own.chmod(0o600)
    sites = [LocalSite("a"), LocalSite("b", None, (("policy", "p.toml"), ("signing-key", str(own))))]
    federation = LocalDeployment(sites, tmp_path / "f", guarded=guarded)
    federation._prepare()
    folder = tmp_path / "f"
    pinned = InstructionKeys.from_file(folder / "instruction-keys.toml")
    signers = SiteSigners.from_json(json.loads(instruction_key_files.signers_file(folder).read_text()))
    assert signers.federation == pinned.federation
    assert signers.required == guarded  # all sites do
    assert set(federation._signing_env()) == {"FEDVEIL_BUNDLES", "FEDVEIL_INSTRUCTION_KEY", "FEDVEIL_SIGNERS"}
    assert pinned.keys[0] == instruction_key_files.public_key(instruction_key_files.current_file(folder))
    assert signers.sites["b"] == SiteSigner("", crypto.verifying_key(own.read_bytes()).hex(), "registered", True)
    assert (signers.sites["a"].signs, bool(signers.sites["a"].signing)) == (guarded, guarded)
    config = tomllib.loads(federation._write_node_config("b").read_text())
    assert config["signing-key"] == str(own)
    if guarded:
        assert signers.sites["a"].signing == instruction_key_files.public_key(folder / "keys" / "a.signing")


def test_the_list_names_the_node_of_each_site_once_all_are_registered(tmp_path):
    federation = LocalDeployment([LocalSite("a"), LocalSite("b")], tmp_path / "f", guarded=True)
    federation._prepare()
    federation.processes.log("register-a").parent.mkdir(exist_ok=True)
    federation.processes.log("register-a").write_text('INFO: x\n{\n  "success": true,\n  "node-id": "12345"\n}\n')
    assert federation._node_number("a") == "12345"
    federation._nodes = {"a": "12345", "b": "6"}
    federation._list_nodes()
    signers = SiteSigners.from_json(json.loads(instruction_key_files.signers_file(tmp_path / "f").read_text()))
    assert {name: site.node for name, site in signers.sites.items()} == {"a": "12345", "b": "6"}
    federation.processes.log("register-b").write_text("{}")
    with pytest.raises(LaunchError, match="its node ID"):
        federation._node_number("b")


def test_guarded_sites_sign_nothing_where_it_is_turned_off(tmp_path):
    federation = LocalDeployment([LocalSite("a")], tmp_path / "f", guarded=True, signed=False)
    federation._prepare()
    assert set(federation._signing_env()) == {"FEDVEIL_BUNDLES"}
    assert not {"signing-key", "instruction-keys"} & set(tomllib.loads(federation._write_node_config("a").read_text()))


def test_a_deployment_that_is_to_be_as_flowers_own_signs_nothing(tmp_path):
    federation = LocalDeployment([LocalSite("a")], tmp_path / "f", own_waits=True, guarded=True)
    federation._prepare()
    assert set(federation._signing_env()) == {"FEDVEIL_BUNDLES"}  # no such file
