"""What a federation's operator and its sites do before there is any run: certificates, kits, keys, members."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import stat
import subprocess
import tarfile
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedveil.client_app.policy.site_policy import SitePolicy
from fedveil.client_app.secure_round import read_key
from fedveil.console.doctor.checks import parse_address
from fedveil.console.flower.flwr_cli import FlowerCli
from fedveil.console.flower.instruction_key_files import keys_fingerprint
from fedveil.console.flower.processes import LaunchError
from fedveil.console.main import main
from fedveil.console.provisioning import enrollment, startup_kit
from fedveil.console.provisioning.federation_folder import SiteRegistry, parse_federation
from fedveil.errors import ConfigError
from fedveil.federation.message_signatures.key_files import InstructionKeys
from fedveil.federation.secagg import crypto
from tests.conftest import extract

TEXT = """
name = "pilot"
server = ["fl.example.org", "10.1.0.5"]
sites = ["north", "south"]
fleet-port = 9443
control-port = 8765
key-days = 10
"""


@pytest.fixture
def federation(tmp_path, capsys) -> Path:
    (tmp_path / "federation.toml").write_text(TEXT)
    assert main(["provision", str(tmp_path / "federation.toml")]) == 0
    capsys.readouterr()
    return tmp_path / "pilot"


def unpacked(federation: Path, site: str = "north") -> Path:
    extract(federation / "kits" / f"{site}.tar.gz", federation.parent / "sites")
    return federation.parent / "sites" / f"pilot-{site}"


def enrolled(federation: Path, capsys, site: str = "north", *options: str) -> tuple[Path, str]:
    """The kit at the site, and the fingerprint that it was told."""
    kit = unpacked(federation, site)
    assert main(["site", "init", "--kit", str(kit), *options]) == 0
    return kit, re.findall(r"SHA256:\S+", capsys.readouterr().out)[-1]


def register(federation: Path, kit: Path, fingerprint: str) -> int:
    request = str(kit / "keys" / "request.json")
    return main(["members", "register", str(federation), request, "--fingerprint", fingerprint, "--offline"])


def test_the_server_certificate_is_the_cas_and_names_every_way_to_the_server(federation):
    ca = x509.load_pem_x509_certificate((federation / "ca" / "ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate((federation / "server" / "server.pem").read_bytes())
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "superlink", "localhost"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["10.1.0.5", "127.0.0.1"]
    assert timedelta(364) < server.not_valid_after_utc - datetime.now(UTC) < timedelta(366)
    assert timedelta(1094) < ca.not_valid_after_utc - datetime.now(UTC) < timedelta(1096)


def test_nothing_secret_is_readable_by_others_or_in_a_kit(federation, capsys):
    secrets = [
        federation / "ca" / "ca.key",
        federation / "server" / "server.key",
        federation / "server" / "superexec-secret",
        federation / "server" / "instruct" / "instruction.key",
        federation / "ca" / "instruction-standby.key",
    ]
    kit, _ = enrolled(federation, capsys)
    own = [kit / "keys" / name for name in ("node.key", "superexec-secret", "signing.key")]
    login = [federation / "server" / "flower" / "credentials.yaml", *(federation / "registry").iterdir()]
    for file in [*secrets, *own, *login]:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(federation.stat().st_mode) == 0o700
    for site in ("north", "south"):
        with tarfile.open(federation / "kits" / f"{site}.tar.gz") as archive:
            content = {name: archive.extractfile(name).read() for name in archive.getnames()}
        assert {Path(name).name for name in content} == {
            "compose.yaml", "compose.gpu.yaml", "ca.crt", "site.toml", "node-config.toml", "containers.toml",
            "instruction-keys.toml", "site-policy.toml", "README.md",
            "SHA256SUMS",
        }  # fmt: skip
        whole = b"\n".join(content.values())
        assert b"PRIVATE" not in whole
        for file in [*secrets[:3], *own[:2]]:
            assert file.read_bytes().strip().splitlines()[-1] not in whole
        for file in [*secrets[3:], own[2]]:
            assert file.read_bytes() not in whole
            assert file.read_bytes().hex().encode() not in whole
        other = {"north": b"south", "south": b"north"}[site]
        assert other not in whole
    for file in federation.rglob("*"):  # the operator's side never sees a site's private key
        assert file.is_dir() or not any(key.read_bytes() in file.read_bytes() for key in own)


def test_the_kits_checksums_are_those_that_sha256sum_checks(federation):
    kit = unpacked(federation)
    assert subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=kit, capture_output=True).returncode == 0
    (kit / "site-policy.toml").write_text("")
    assert subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=kit, capture_output=True).returncode == 1
    assert (kit / "README.md").read_text().count("\n") < 60
    assert hashlib.sha256((kit / "ca.crt").read_bytes()).hexdigest() in (kit / "README.md").read_text()


def test_the_kits_compose_file_is_isolated_and_its_policy_permits_nothing(federation):
    kit = unpacked(federation)
    compose = yaml.safe_load((kit / "compose.yaml").read_text())
    services = compose["services"]
    assert not any("ports" in service for service in services.values())
    assert services["clientapp"]["networks"] == ["inside"]
    assert compose["networks"]["inside"] == {"internal": True}
    assert services["clientapp"]["cap_drop"] == ["ALL"]
    for service in services.values():
        assert service["read_only"]
        assert service["user"] == "10001:10001"
        assert service["environment"]["FLWR_TELEMETRY_ENABLED"] == "0"
    assert "--superlink=fl.example.org:9443" in services["supernode"]["command"]
    mounts = {name: [v.rpartition(":ro")[0] or v for v in service["volumes"]] for name, service in services.items()}
    assert not any(v.endswith(":/data") for v in mounts["supernode"])
    assert {v.partition(":")[2] for v in mounts["clientapp"]} == {  # bundled code must not reach the site's key
        "/kit/site-policy.toml", "/kit/instruction-keys.toml", "/secret", "/state", "-./data}:/data",
        "-./models}:/models",
    }  # fmt: skip
    assert services["init"]["network_mode"] == "none"
    import tomllib

    policy = SitePolicy.model_validate(tomllib.loads((kit / "site-policy.toml").read_text()))
    assert (policy.methods, policy.tasks, policy.models, policy.app_digests) == ([], [], [], [])
    assert {"max_broadcast_change", "max_broadcast_drift"} <= policy.model_fields_set
    assert policy.max_broadcast_change <= SitePolicy().max_broadcast_change
    assert policy.max_broadcast_drift <= SitePolicy().max_broadcast_drift


def test_the_servers_compose_file_publishes_the_fleet_port_alone(federation):
    services = yaml.safe_load((federation / "server" / "compose.yaml").read_text())["services"]
    assert {name: service["ports"] for name, service in services.items() if "ports" in service} == {
        "pod": ["9443:9092"]
    }
    assert all(services[name]["network_mode"] == "service:pod" for name in services if name != "pod")
    command = services["superlink"]["command"]
    assert "--host=${FEDVEIL_CONTROL_HOST:-127.0.0.1}" in command  # another with compose.operators.yaml alone
    assert "--fleet-api-address=0.0.0.0:9092" in command
    assert {"--enable-supernode-auth", "--isolation=process", "--disable-runtime-dependency-installation"} <= set(
        command
    )
    assert not any("server.key" in v or v.startswith((".:", "./:")) for v in services["serverapp"]["volumes"])
    # The key that signs instructions is the app process's alone: the SuperLink must not be able to sign.
    seers = [name for name, s in services.items() if any(v.startswith("./instruct:") for v in s.get("volumes", ()))]
    assert seers == ["serverapp"]
    assert not any(v.startswith((".:", "./:", "..:")) for v in services["superlink"]["volumes"])
    signing = {"FEDVEIL_INSTRUCTION_KEY": "/instruct/instruction.key", "FEDVEIL_SIGNERS": "/roster/signers.json"}
    signing |= {"FEDVEIL_BUNDLES": "/instruct/bundles.toml"}
    assert services["serverapp"]["environment"] == services["superlink"]["environment"] | signing
    assert f"..:{federation}" in services["operator"]["volumes"]


def test_the_request_on_stdout_and_the_secret_apart(federation, capsys):
    kit = unpacked(federation)
    secret = kit.parent / "secret"
    assert main(["site", "init", "--kit", str(kit), "--secret", str(secret), "--print"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out) == json.loads((kit / "keys" / "request.json").read_text())
    assert "SHA256:" in output.err
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE((secret.parent / "signing.key").stat().st_mode) == 0o600  # beside it: apps see both
    assert [file.name for file in sorted((kit / "keys").iterdir())] == ["node.key", "node.key.pub", "request.json"]


def test_a_site_is_registered_until_its_last_day_and_the_key_is_p384(federation, capsys):
    kit, fingerprint = enrolled(federation, capsys)
    public = serialization.load_ssh_public_key((kit / "keys" / "node.key.pub").read_bytes())
    assert public.curve.name == "secp384r1"
    assert register(federation, kit, fingerprint) == 0
    entry = SiteRegistry(federation).sites["north"]
    assert entry["state"] == "registered"
    assert timedelta(9) < datetime.fromisoformat(entry["until"]) - datetime.now(UTC) <= timedelta(10)
    assert main(["members", "list", str(federation)]) == 1  # ten days are soon
    stdout = capsys.readouterr().out
    assert re.search(r"north +registered +20\S+ \?  soon", stdout)
    assert re.search(r"south +invited", stdout)


def test_a_key_past_its_day_is_expired_and_never_accepted_again(federation, capsys):
    kit, fingerprint = enrolled(federation, capsys)
    register(federation, kit, fingerprint)
    members = SiteRegistry(federation)
    last = datetime.fromisoformat(members.sites["north"]["until"])
    assert members.expired(last - timedelta(seconds=1)) == []
    assert members.expired(last) == ["north"]
    members.sites["north"]["until"] = "2020-01-01T00:00:00+00:00"
    members.save()
    assert main(["members", "expire", str(federation), "--offline"]) == 0
    assert SiteRegistry(federation).sites["north"]["state"] == "expired"
    assert register(federation, kit, fingerprint) == 2
    assert "expected a new key, found one that was expired" in capsys.readouterr().err
    _, renewed = enrolled(federation, capsys, "north", "--renew")
    assert renewed != fingerprint
    assert register(federation, kit, renewed) == 0


def test_renewal_and_revocation_retire_a_key(federation, capsys):
    kit, first = enrolled(federation, capsys)
    old = (kit / "keys" / "request.json").read_bytes()
    register(federation, kit, first)
    assert register(federation, kit, first) == 2
    assert main(["site", "init", "--kit", str(kit)]) == 2  # a key is not overwritten by accident
    _, second = enrolled(federation, capsys, "north", "--renew")
    assert (kit / "keys" / "node.key.old").is_file()
    assert register(federation, kit, second) == 0
    (kit / "keys" / "request.json").write_bytes(old)
    assert register(federation, kit, first) == 2
    assert "found one that was replaced" in capsys.readouterr().err
    assert main(["members", "revoke", str(federation), "north", "--offline"]) == 0
    assert SiteRegistry(federation).sites["north"]["state"] == "revoked"
    assert main(["members", "revoke", str(federation), "west", "--offline"]) == 2
    assert "site: expected one of ['north', 'south'], found 'west'" in capsys.readouterr().err


def test_a_request_proves_its_key_its_site_and_its_federation(federation, capsys, tmp_path):
    kit, _ = enrolled(federation, capsys)
    request = json.loads((kit / "keys" / "request.json").read_text())
    ca = (federation / "server" / "ca.crt").read_bytes()
    asked = enrollment.check_request(kit / "keys" / "request.json", "pilot", ca)
    assert (asked.site, asked.signing) == ("north", public_signing(kit))
    south, _ = enrolled(federation, capsys, "south")
    other = json.loads((south / "keys" / "request.json").read_text())
    for changes, reason in (
        ({"site": "south"}, "proof: expected a signature by the key itself"),
        ({"key": other["key"]}, "proof: expected a signature by the key itself"),
        ({"proof": other["proof"]}, "proof: expected a signature by the key itself"),
        ({"federation": "other"}, "federation: expected 'pilot', found 'other'"),
        ({"ca": "00"}, "ca: expected"),
        ({"instructions": ""}, "proof: expected a signature by the key itself"),
        ({"instructions": 5}, "expected a request made by fedveil site init"),
        ({"more": "x"}, "expected a request made by fedveil site init"),
        ({"signing": other["signing"]}, "proof: expected a signature by the key itself"),
        ({"signing": request["signing"].upper()}, "signing: expected 64 hex digits"),
        ({"signing": request["signing"][:-2]}, "signing: expected 64 hex digits"),
        ({"signing-proof": other["signing-proof"]}, "signing-proof: expected a signature by the signing key itself"),
        ({"signing-proof": "no base64"}, "signing-proof: expected a signature by the signing key itself"),
        ({"site": "x" * 20_000}, "of at most 16384 bytes"),
        (
            {"key": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAOhB7/zzhC+HXDdGOdLwJln5NYwm6UNXx3chmQSVTG4"},
            "expected a P-384 key",
        ),
    ):
        file = tmp_path / "changed.json"
        file.write_text(json.dumps(request | changes))
        with pytest.raises(ConfigError, match=reason):
            enrollment.check_request(file, "pilot", ca)
    with pytest.raises(ConfigError, match="missing.json: expected the request that the site sent.*; correct the path"):
        enrollment.check_request(tmp_path / "missing.json", "pilot", ca)
    assert register(federation, kit, "SHA256:somebody-else") == 2
    stderr = capsys.readouterr().err
    assert "--fingerprint: expected the fingerprint of the keys in" in stderr
    assert "found a different one: SHA256:somebody-else" in stderr
    assert stderr.count("SHA256:") == 1  # not the request's own, to be copied from here
    assert SiteRegistry(federation).sites["north"]["state"] == "invited"


def public_signing(kit: Path) -> str:
    return crypto.verifying_key(read_key(kit / "keys" / "signing.key")).hex()


def test_who_has_one_of_two_keys_cannot_ask_for_the_other(federation, capsys):
    """A node that vouches for a signing key of another site, with the other's proof of its own request."""
    kit, _ = enrolled(federation, capsys)
    south, _ = enrolled(federation, capsys, "south")
    ca, file = (federation / "server" / "ca.crt").read_bytes(), kit / "keys" / "request.json"
    content = json.loads(file.read_text()) | {"signing": public_signing(south)}
    proofs = {name: content.pop(name) for name in ("proof", "signing-proof")}
    node = serialization.load_ssh_private_key((kit / "keys" / "node.key").read_bytes(), None)
    text = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    proofs["proof"] = base64.b64encode(node.sign(text, ec.ECDSA(hashes.SHA384()))).decode()
    proofs["signing-proof"] = json.loads((south / "keys" / "request.json").read_text())["signing-proof"]
    file.write_text(json.dumps({**content, **proofs}))
    with pytest.raises(ConfigError, match="signing-proof: expected a signature by the signing key itself"):
        enrollment.check_request(file, "pilot", ca)


@pytest.mark.parametrize("sign", [b"", b"\x80"], ids=["the identity", "with a sign that it has not"])
def test_a_signing_key_that_signs_every_text_is_refused(federation, capsys, sign):
    """Whoever has it could deny each of its signatures. One signature of it proves any request."""
    kit, _ = enrolled(federation, capsys)
    ca, file = (federation / "server" / "ca.crt").read_bytes(), kit / "keys" / "request.json"
    identity = bytes([1]) + bytes(31)
    weak = identity[:31] + sign if sign else identity
    content = json.loads(file.read_text()) | {"signing": weak.hex()}
    proofs = {name: content.pop(name) for name in ("proof", "signing-proof")}
    node = serialization.load_ssh_private_key((kit / "keys" / "node.key").read_bytes(), None)
    text = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    proofs["proof"] = base64.b64encode(node.sign(text, ec.ECDSA(hashes.SHA384()))).decode()
    proofs["signing-proof"] = base64.b64encode(identity + bytes(32)).decode()
    file.write_text(json.dumps({**content, **proofs}))
    with pytest.raises(ConfigError, match="signing: expected .* found one of small order"):
        enrollment.check_request(file, "pilot", ca)


def test_the_fingerprint_is_of_both_keys():
    one = enrollment.RegistrationRequest("north", "ecdsa-sha2-nistp384 AAAA", "ab" * 32)
    assert one.fingerprint != enrollment.RegistrationRequest("north", "ecdsa-sha2-nistp384 AAAB", "ab" * 32).fingerprint
    assert one.fingerprint != enrollment.RegistrationRequest("north", "ecdsa-sha2-nistp384 AAAA", "ac" * 32).fingerprint
    assert re.fullmatch(r"SHA256:[A-Za-z0-9+/]{43}", one.fingerprint)


def test_a_signing_key_outlives_node_keys_and_is_replaced_where_that_is_asked_for(federation, capsys):
    kit, first = enrolled(federation, capsys)
    signing = public_signing(kit)
    register(federation, kit, first)
    _, second = enrolled(federation, capsys, "north", "--renew")
    assert (public_signing(kit), second != first) == (signing, True)
    assert register(federation, kit, second) == 0
    assert "its signing key is new" not in capsys.readouterr().out
    _, third = enrolled(federation, capsys, "north", "--renew-signing")
    assert public_signing(kit) != signing
    assert (kit / "keys" / "signing.key.old").stat().st_size == 32
    assert register(federation, kit, third) == 0
    assert "its signing key is new: run fedveil members roster" in capsys.readouterr().out
    assert SiteRegistry(federation).signing_keys == {"north": public_signing(kit)}
    (kit / "keys" / "signing.key.old").replace(kit / "keys" / "signing.key")  # an old one is not taken back
    _, fourth = enrolled(federation, capsys, "north", "--renew")
    assert register(federation, kit, fourth) == 2
    assert "signing: expected a new key, found one that was replaced" in capsys.readouterr().err


def test_a_signing_key_of_a_revoked_site_and_of_another_site_is_refused(federation, capsys):
    kit, fingerprint = enrolled(federation, capsys)
    register(federation, kit, fingerprint)
    south = unpacked(federation, "south")
    (south / "keys").mkdir()
    (south / "keys" / "signing.key").write_bytes((kit / "keys" / "signing.key").read_bytes())
    (south / "keys" / "signing.key").chmod(0o600)
    _, copied = enrolled(federation, capsys, "south")
    assert register(federation, south, copied) == 2
    assert "south: signing: expected its own key, found the key of north" in capsys.readouterr().err
    assert main(["members", "revoke", str(federation), "north", "--offline"]) == 0
    _, again = enrolled(federation, capsys, "north", "--renew")
    assert register(federation, kit, again) == 2
    assert "signing: expected a new key, found one that was revoked" in capsys.readouterr().err


@pytest.mark.parametrize("size,mode,why", [(31, 0o600, "found 31"), (33, 0o600, "found more"), (32, 0o640, "mode 640")])
def test_a_signing_key_that_cannot_be_used_is_said_before_a_node_key_is_replaced(size, mode, why, federation, capsys):
    kit, _ = enrolled(federation, capsys)
    before = (kit / "keys" / "node.key").read_bytes()
    (kit / "keys" / "signing.key").write_bytes(bytes(size))
    (kit / "keys" / "signing.key").chmod(mode)
    assert main(["site", "init", "--kit", str(kit), "--renew"]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: signing-key: ")
    assert why in stderr
    assert (kit / "keys" / "node.key").read_bytes() == before


def test_two_sites_cannot_have_one_key(federation, capsys):
    kit, fingerprint = enrolled(federation, capsys)
    register(federation, kit, fingerprint)
    public = (kit / "keys" / "node.key.pub").read_text().strip()
    with pytest.raises(ConfigError, match="south: expected its own, unregistered key, found the key of north"):
        SiteRegistry(federation).register("south", public)


def test_the_server_gets_a_new_certificate_from_the_same_ca(federation, capsys, tmp_path):
    before = (federation / "server" / "server.pem").read_bytes()
    (federation / "ca" / "ca.key").rename(tmp_path / "away.key")
    assert main(["members", "renew-server", str(federation)]) == 2
    assert (
        main(["members", "renew-server", str(federation), "--ca-key", str(federation / "server" / "server.key")]) == 2
    )
    assert "expected the key of" in capsys.readouterr().err
    assert (federation / "server" / "server.pem").read_bytes() == before
    assert main(["members", "renew-server", str(federation), "--ca-key", str(tmp_path / "away.key")]) == 0
    renewed = x509.load_pem_x509_certificate((federation / "server" / "server.pem").read_bytes())
    renewed.verify_directly_issued_by(x509.load_pem_x509_certificate((federation / "ca" / "ca.crt").read_bytes()))
    key = serialization.load_pem_private_key((federation / "server" / "server.key").read_bytes(), None)
    assert key.public_key() == renewed.public_key()


@pytest.mark.parametrize("action,lost", [("list", "server/server.pem"), ("renew-server", "ca/ca.crt")])
def test_a_lost_certificate_is_named(federation, action, lost, capsys):
    (federation / lost).write_text("torn")
    assert main(["members", action, str(federation)]) == 2
    assert f"{lost}: expected a certificate made by fedveil provision" in capsys.readouterr().err
    (federation / lost).unlink()
    assert main(["members", action, str(federation)]) == 2


def test_what_a_missing_federation_is_told_is_one(tmp_path):
    with pytest.raises(ConfigError) as error:
        parse_federation(tmp_path / "federation.toml")
    least = str(error.value).partition("; minimum: ")[2].removesuffix(", one per line")
    lines = least.replace(", server", "\nserver").replace(", sites", "\nsites")
    (tmp_path / "federation.toml").write_text(lines)
    assert parse_federation(tmp_path / "federation.toml").sites == ["north", "south"]


@pytest.mark.parametrize(
    ("host", "superlink"),
    [
        ("fl.example.org", "fl.example.org:9092"),
        ("192.0.2.7", "192.0.2.7:9092"),
        ("2001:db8::1", "[2001:db8::1]:9092"),
        ("[2001:DB8:0::1]", "[2001:db8::1]:9092"),
        ("::1", "[::1]:9092"),
    ],
)
def test_a_server_is_written_with_its_port_as_its_kind_of_address_has_it(tmp_path, host, superlink):
    """With a byte order mark, as Windows' editors write one."""
    file = tmp_path / "federation.toml"
    file.write_text(f'name = "p"\nserver = ["{host}"]\nsites = ["a"]\n', "utf-8-sig")
    federation = parse_federation(file)
    assert federation.superlink == superlink
    assert parse_address(superlink) == (federation.server[0], 9092)


@pytest.mark.parametrize(
    "text,reason",
    [
        ('name = "p"\nserver = []\nsites = ["a"]', "server: List should have at least 1"),
        ('name = "../p"\nserver = ["h"]\nsites = ["a"]', "name: String should match"),
        ('name = "p"\nserver = ["h"]\nsites = ["a", "A"]', "sites: .*expected unique site names"),
        ('name = "p"\nserver = ["h x"]\nsites = ["a"]', "server.0: expected a host name or address, such as"),
        (
            'name = "p"\nserver = ["h:9092"]\nsites = ["a"]',
            "server.0: expected .* without a port, .* is set by fleet-port",
        ),
        ('name = "p"\nserver = ["[::1]:9092"]\nsites = ["a"]', "server.0: expected .* without a port"),
        ('name = "p"\nserver = ["fe80::1%eth0x"]\nsites = ["a"]', "server.0: expected .* without a port"),
        ('name = "p"\nserver = ["h"]\nsites = ["a"]\nport = 1', "port: Extra inputs .* known keys:"),
        ('name = "p"\nserver = ["h"]\nsites = ["a"]\nimage = "x; rm -rf"', "image: String should match"),
        ("name = p", "expected TOML, found an error: Invalid value .at line 1"),
    ],
)
def test_a_bad_federation_is_refused_and_leaves_nothing(text, reason, tmp_path):
    file = tmp_path / "federation.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        parse_federation(file)
    assert main(["provision", str(file)]) == 2
    assert [f.name for f in tmp_path.iterdir()] == ["federation.toml"]


def test_a_folder_that_is_there_is_left_alone(federation, capsys):
    before = (federation / "registry" / "members.json").read_bytes()
    assert main(["provision", str(federation.parent / "federation.toml")]) == 2
    assert "expected a folder that does not exist yet" in capsys.readouterr().err
    assert (federation / "registry" / "members.json").read_bytes() == before
    assert main(["members", "list", str(federation.parent)]) == 2


def test_the_control_port_is_where_the_operators_commands_ask(federation):
    home = federation / "server" / "flower"
    assert 'address = "127.0.0.1:8765"' in (home / "config.toml").read_text()
    assert "flower.account-auth.127.0.0.1:8765.authn-type" in (home / "credentials.yaml").read_text()


def test_a_site_is_added_with_its_kit_and_registered_like_the_others(federation, capsys):
    assert main(["members", "add", str(federation), "west"]) == 0
    assert f"fedveil members register {federation} request.json --fingerprint SHA256:..." in capsys.readouterr().out
    assert SiteRegistry(federation).federation.sites == ["north", "south", "west"]
    kit, fingerprint = enrolled(federation, capsys, "west")
    assert (kit / "ca.crt").read_bytes() == (federation / "ca" / "ca.crt").read_bytes()
    assert register(federation, kit, fingerprint) == 0
    assert {s: e["state"] for s, e in SiteRegistry(federation).sites.items()} == {
        "north": "invited", "south": "invited", "west": "registered",
    }  # fmt: skip


@pytest.mark.parametrize(
    "name,reason",
    [
        ("NORTH", "SITE: expected an unused name, found north; its kit is .*kits/north.tar.gz"),
        ("../x", "SITE: expected letters, digits, .* found '../x'; choose another"),
        ("superlink", 'SITE: expected .* not "superlink"'),
    ],
)
def test_a_name_that_no_site_may_have_adds_nothing(federation, capsys, name, reason):
    before = (federation / "registry" / "members.json").read_bytes()
    assert main(["members", "add", str(federation), name]) == 2
    assert re.search(reason, capsys.readouterr().err)
    assert (federation / "registry" / "members.json").read_bytes() == before
    assert sorted(file.name for file in (federation / "kits").iterdir()) == ["north.tar.gz", "south.tar.gz"]


def test_provision_and_members_name_the_command_that_adds_a_site(federation, capsys):
    assert main(["provision", str(federation.parent / "federation.toml")]) == 2
    assert f"fedveil members add {federation} SITE" in capsys.readouterr().err
    assert main(["members", "revoke", str(federation), "east", "--offline"]) == 2
    assert f"fedveil members add {federation} NAME" in capsys.readouterr().err


def test_two_ports_of_a_server_are_two_numbers(tmp_path):
    (tmp_path / "federation.toml").write_text(TEXT.replace("8765", "9443"))
    with pytest.raises(ConfigError, match="expected different ports for fleet-port and control-port"):
        parse_federation(tmp_path / "federation.toml")


def test_a_bare_hosts_kit_names_places_in_itself_and_doctor_is_right_there(federation, capsys):
    kit, _ = enrolled(federation, capsys)
    assert not re.search(r'"/', (kit / "node-config.toml").read_text() + (kit / "site.toml").read_text())
    (kit / "data").mkdir()
    (kit / "data" / "train.jsonl").write_text((json.dumps({"mr": "name[a]", "ref": "text"}) + "\n") * 100)
    main(["doctor", "--kit", str(kit)])
    lines_by_check = {line[6:28].strip(): line for line in capsys.readouterr().out.splitlines()}
    for name in ("key", "signing key", "data", "key file", "audit log", "roster"):
        assert lines_by_check[name].startswith("ok"), lines_by_check[name]
    assert lines_by_check["policy"].startswith("warn")
    assert ":8765 does not answer" in lines_by_check["control port"]
    main(["doctor", "--kit", str(kit), "--node-config", str(kit / "containers.toml")])
    assert 'there is no folder or file of rows at "/data"' in capsys.readouterr().out


def without_instructions(kit: Path, **changes: str) -> None:
    """Sign the site's request again, as a release without instruction keys made it, or with `changes`."""
    file = kit / "keys" / "request.json"
    content = json.loads(file.read_text())
    for name in ("proof", "signing-proof", "instructions"):
        content.pop(name, None)
    content |= changes
    text = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    node = serialization.load_ssh_private_key((kit / "keys" / "node.key").read_bytes(), None)
    proofs = {
        "proof": node.sign(text, ec.ECDSA(hashes.SHA384())),
        "signing-proof": crypto.sign_bytes(read_key(kit / "keys" / "signing.key"), text),
    }
    encoded = {name: base64.b64encode(proof).decode() for name, proof in proofs.items()}
    file.write_text(json.dumps({**content, **encoded}))


def test_a_kit_whose_instruction_keys_were_changed_on_the_way_is_found_by_both_ends(federation, capsys):
    kit = unpacked(federation)
    pinned, members = InstructionKeys.from_file(kit / "instruction-keys.toml"), SiteRegistry(federation)
    expected = keys_fingerprint(members.federation_id, members.instruction_keys)
    others = tuple(crypto.verifying_key(bytes([i]) * 32).hex() for i in (1, 2))
    for changed in (InstructionKeys(pinned.federation, others), InstructionKeys("ff" * 16, pinned.keys)):
        (kit / "instruction-keys.toml").write_text(changed.to_toml())
        assert main(["site", "init", "--kit", str(kit), "--renew"]) == 0
        output = capsys.readouterr().out
        assert expected not in output
        assert keys_fingerprint(changed.federation, changed.keys) in output
        assert register(federation, kit, "-") == 2
        assert "instructions: expected the SHA-256 of the server's instruction keys" in capsys.readouterr().err
    assert SiteRegistry(federation).sites["north"]["state"] == "invited"
    (kit / "instruction-keys.toml").write_text("# the same, written otherwise\n" + pinned.to_toml())
    assert main(["site", "init", "--kit", str(kit), "--renew"]) == 0
    assert f"by phone: {expected}\n" in capsys.readouterr().out
    assert register(federation, kit, "-") == 0


def test_a_request_without_instruction_keys_is_taken_only_from_a_site_that_does_not_sign(federation, capsys):
    kit, fingerprint = enrolled(federation, capsys)
    for changes in ({}, {"instructions": ""}):
        without_instructions(kit, **changes)
        assert register(federation, kit, fingerprint) == 2
        assert "north: instructions: expected the SHA-256" in capsys.readouterr().err
    members = SiteRegistry(federation)
    members.sites["north"] = {"state": "invited"}
    members.save()
    without_instructions(kit)
    assert register(federation, kit, fingerprint) == 2  # signatures are required
    members.federation = members.federation.model_copy(update={"signatures": "optional"})
    members.save()
    without_instructions(kit, instructions="ab" * 32)
    assert register(federation, kit, fingerprint) == 2
    without_instructions(kit)
    assert register(federation, kit, fingerprint) == 0
    (kit / "instruction-keys.toml").unlink()
    assert main(["site", "init", "--kit", str(kit), "--renew"]) == 0
    assert "instruction keys" not in capsys.readouterr().out
    assert json.loads((kit / "keys" / "request.json").read_text())["instructions"] == ""
    assert register(federation, kit, "-") == 0


def test_a_site_with_the_keys_of_before_a_renewal_registers_after_it_has_the_new_ones(federation, capsys):
    kit, fingerprint = enrolled(federation, capsys)
    assert main(["members", "renew-instruction-key", str(federation)]) == 0
    assert register(federation, kit, fingerprint) == 2
    assert "or is older than the keys" in capsys.readouterr().err
    kit, fingerprint = enrolled(federation, capsys, "north", "--renew")
    assert register(federation, kit, fingerprint) == 0


def names_of(certificate: Path) -> list[str]:
    """The names in a certificate, as a client compares them."""
    found = x509.load_pem_x509_certificate(certificate.read_bytes()).extensions
    names = found.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def test_a_renamed_server_has_a_certificate_for_both_names_and_kits_with_the_new_one(federation, capsys):
    old = json.loads((federation / "registry" / "members.json").read_text())["federation"]["server"]
    capsys.readouterr()
    assert main(["server", "rename", str(federation), "new.example.org", "10.9.8.7"]) == 0
    said = capsys.readouterr().out
    assert "kits rewritten with new.example.org:" in said
    assert "*/site.toml" in said
    about = json.loads((federation / "registry" / "members.json").read_text())["federation"]
    assert about["server"] == ["new.example.org", "10.9.8.7", *old]
    assert {"new.example.org", "10.9.8.7", *old} <= set(names_of(federation / "server" / "server.pem"))
    kit = sorted((federation / "kits").iterdir())[0]
    assert startup_kit.address_in_kit(kit) == f"new.example.org:{about['fleet-port']}"
    assert main(["members", "address", str(federation)]) == 0
    assert f"its kit {kit} has this address" in capsys.readouterr().out
    assert main(["server", "rename", str(federation), "last.example.org", "--only"]) == 0
    assert "new.example.org" not in names_of(federation / "server" / "server.pem")
    kit.write_bytes(b"no archive")
    assert main(["members", "address", str(federation)]) == 0
    assert f"has no address; rewrite it: fedveil members kit {federation}" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["https://x.org", "x.org:9092", "-x", "x y"])
def test_a_name_that_is_none_changes_nothing(name, federation, capsys):
    files = {file: file.read_bytes() for file in federation.rglob("*") if file.is_file() and file.name != ".lock"}
    assert main(["server", "rename", str(federation), "--", name]) == 2
    assert "NAME: expected host names" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in files} == files


def test_without_the_cas_key_a_rename_changes_nothing(federation, capsys):
    (federation / "ca" / "ca.key").unlink()
    before = (federation / "registry" / "members.json").read_bytes()
    assert main(["server", "rename", str(federation), "new.example.org"]) == 2
    assert "--ca-key: expected the CA's private key" in capsys.readouterr().err
    assert (federation / "registry" / "members.json").read_bytes() == before


def test_a_moved_folder_is_reached_by_its_own_certificate(federation):
    moved = federation.parent / "elsewhere" / "pilot"
    moved.parent.mkdir()
    federation.rename(moved)
    config = moved / "server" / "flower" / "config.toml"
    assert str(federation / "server" / "ca.crt") in config.read_text()
    for _ in range(2):
        FlowerCli(moved / "server" / "flower")
        connection = tomllib.loads(config.read_text())["superlink"]["fedveil"]
        assert connection["root-certificates"] == str(moved / "server" / "ca.crt")
    config.write_text("[superlink]\n")
    with pytest.raises(LaunchError, match="expected a connection to this folder's server"):
        FlowerCli(moved / "server" / "flower")
