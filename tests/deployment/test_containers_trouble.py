"""Hosts of their own: a server from its compose file, sites from their kits, and all that may go wrong with a site."""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from fedveil.client_app.policy import run_config_rules
from fedveil.config import parse
from fedveil.console.commands.federation import app
from fedveil.console.flower.machine import free_ports
from fedveil.console.main import main
from tests.conftest import ROOT, extract
from tests.deployment.engine import IMAGE, Compose, docker, remove_leftovers, require_image, until

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1500)]

SOUND = ("north", "south")
SITES = (*SOUND, "killed", "cut", "forbids", "other-app", "wrong-key", "expired")
SETTINGS = {
    "method.name": "fedrand",
    "run.rounds": 3,
    "run.name": "trouble",
    "train.max-steps": 2,
    "train.batch-size": 4,
    "evaluate.every": 10,
    "evaluate.eval-examples": 2,
    "evaluate.generate": "never",
    "cohort.sites": 6,
    "cohort.min-sites": 3,  # two alone do not end it: it waits for the one that was cut off
    "cohort.wait-seconds": 200.0,
    "cohort.deadline-seconds": 200.0,
}


class Hosts:
    """A federation whose every member is a compose project of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.token = folder, secrets.token_hex(3)
        self.gateway = json.loads(docker("network", "inspect", "bridge").stdout)[0]["IPAM"]["Config"][0]["Gateway"]
        (port,) = free_ports(1)
        (folder / "federation.toml").write_text(
            f'name = "p{self.token}"\nserver = ["{self.gateway}"]\nfleet-port = {port}\nimage = "{IMAGE}"\n'
            f"sites = {json.dumps(SITES)}\n"
        )
        assert main(["provision", str(folder / "federation.toml")]) == 0
        self.made = folder / f"p{self.token}"
        self.sites: dict[str, Compose] = {}
        self.server = Compose(f"t{self.token}-server", self.made / "server" / "compose.yaml", self.env)

    @property
    def env(self) -> dict[str, str]:
        return {"FEDVEIL_DATA": str(ROOT / "data" / "e2e"), "FEDVEIL_MODELS": str(self.folder / "models")}

    def start_server(self) -> None:
        (self.folder / "models").mkdir()
        subprocess.run(["chown", "-R", "10001:10001", str(self.made)], check=True)
        self.server("up", "-d", "--wait", timeout=300)

    def operator(self, *command: str, check: bool = True) -> str:
        done = self.server("run", "--rm", "-T", "operator", *command, check=check, timeout=900)
        return done.stdout + done.stderr

    def unpack(self, site: str) -> Compose:
        extract(self.made / "kits" / f"{site}.tar.gz", self.folder / "hosts")
        kit = self.folder / "hosts" / f"p{self.token}-{site}"
        self.sites[site] = Compose(f"t{self.token}-{site}", kit / "compose.yaml", self.env)
        return self.sites[site]

    def kit(self, site: str) -> Path:
        return self.folder / "hosts" / f"p{self.token}-{site}"

    def enrol(self, site: str) -> None:
        """What the site and the operator do."""
        compose = self.unpack(site)
        done = compose("run", "--rm", "-T", "init")
        (self.made / f"{site}.json").write_text(done.stdout)
        *_, fingerprint = re.findall(r"SHA256:\S+", done.stderr)
        self.operator(
            "fedveil",
            "members",
            "register",
            str(self.made),
            str(self.made / f"{site}.json"),
            "--fingerprint",
            fingerprint,
        )

    def permit(self, site: str, methods: str = '["fedrand"]', digest: str = "") -> None:
        digest = digest or app.bundle_digest(ROOT)
        text = (self.kit(site) / "site-policy.toml").read_text()
        text = text.replace("methods = []", f"methods = {methods}").replace("tasks = []", 'tasks = ["text-generation"]')
        text = text.replace("models = []", 'models = ["tiny"]').replace(
            "app-digests = []", f'app-digests = ["{digest}"]'
        )
        text = text.replace("min-examples = 100", "min-examples = 2").replace("min-batch = 4", "min-batch = 1")
        (self.kit(site) / "site-policy.toml").write_text(
            f"{text}\n{run_config_rules.permits_for_run(parse(SETTINGS))}\n"
        )

    def online(self, *sites: str) -> bool:
        output = self.operator(
            "fedveil", "status", str(self.made / "none"), "--federation", str(self.made), check=False
        )
        return all(re.search(rf"^{site} +registered +online", output, re.MULTILINE) for site in sites)

    def down(self) -> None:
        for compose in [*self.sites.values(), self.server]:
            compose.down()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[Hosts]:
    require_image()
    remove_leftovers()
    folder = tmp_path_factory.mktemp("hosts")
    for part in (folder, *folder.parents):  # user 10001 must get to the kits
        if part.owner() == folder.owner() and part != Path("/tmp"):
            part.chmod(part.stat().st_mode | 0o055)
        if part.name.startswith("pytest-of"):
            break
    hosts = Hosts(folder)
    try:
        hosts.start_server()
        yield hosts
    finally:
        hosts.down()


def test_a_fresh_machine_is_online_after_three_commands(hosts):
    began = time.monotonic()
    compose = hosts.unpack("north")
    # 1. sha256sum -c SHA256SUMS
    subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=hosts.kit("north"), check=True)
    done = compose("run", "--rm", "-T", "init")  # 2. docker compose run --rm -T init >request.json
    (hosts.made / "north.json").write_text(done.stdout)
    *_, fingerprint = re.findall(r"SHA256:\S+", done.stderr)
    hosts.operator(
        "fedveil", "members", "register", str(hosts.made), str(hosts.made / "north.json"), "--fingerprint", fingerprint
    )
    hosts.permit("north")
    compose("up", "-d", "--wait", timeout=300)  # 3. docker compose up -d --wait
    until(lambda: hosts.online("north"), 120, "north online")
    print(f"kit to online: {time.monotonic() - began:.0f} s")
    doctor = compose("run", "--rm", "-T", "doctor", check=False).stdout
    assert re.search(r"^ok +fleet port", doctor, re.MULTILINE), doctor
    assert re.search(r"^ok +entry point", doctor, re.MULTILINE)
    assert re.search(r"^ok +control port", doctor, re.MULTILINE)
    assert not re.search(r"^fail", doctor, re.MULTILINE), doctor


def expired_ca(hosts: Hosts) -> bytes:
    """The federation's own CA as it looks after its expiry date."""
    ca = x509.load_pem_x509_certificate((hosts.made / "ca" / "ca.crt").read_bytes())
    key = serialization.load_pem_private_key((hosts.made / "ca" / "ca.key").read_bytes(), None)
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(ca.subject).issuer_name(ca.subject).public_key(key.public_key())
    builder = (
        builder.serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(9))
        .not_valid_after(now - timedelta(2))
    )
    for extension in ca.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def test_a_run_ends_as_the_quorum_allows_and_says_why_for_each(hosts):
    for site in SITES:
        if site != "north":
            hosts.enrol(site)
            hosts.permit(site)
    policy = hosts.kit("forbids") / "site-policy.toml"
    policy.write_text(policy.read_text().replace('methods = ["fedrand"]', 'methods = ["fedavg"]'))
    policy = hosts.kit("other-app") / "site-policy.toml"
    policy.write_text(policy.read_text().replace(app.bundle_digest(ROOT), "0" * 64))
    hosts.sites["wrong-key"]("run", "--rm", "-T", "init", "--renew")  # and nobody was told
    (hosts.kit("expired") / "ca.crt").write_bytes(expired_ca(hosts))
    for site in SITES[:6]:
        hosts.sites[site]("up", "-d", timeout=200)
    for site in SITES[6:]:
        hosts.sites[site]("up", "-d", "supernode")  # up of the whole would wait for its health, in vain
    until(lambda: hosts.online(*SITES[:6]), 240, "six sites online")

    settings = [f"--set={key}={json.dumps(value)}" for key, value in SETTINGS.items()]
    command = ["docker", "compose", "-p", hosts.server.project, "-f", str(hosts.made / "server" / "compose.yaml"),
               "run", "--rm", "-T", "operator", "fedveil", "submit", "--federation", str(hosts.made),
               *settings]  # fmt: skip
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    sent = "for l in open('/runs/trouble/disclosure.jsonl'): print(__import__('json').loads(l).get('site'))"

    def asked() -> bool:
        result = hosts.server("exec", "-T", "serverapp", "python", "-c", sent, check=False)
        return {"killed", "cut"} <= set(result.stdout.split())

    def noted(site: str, event: str) -> bool:
        log = hosts.sites[site]("exec", "-T", "clientapp", "cat", "/state/audit-log.jsonl", check=False).stdout
        return event in [json.loads(line)["event"] for line in log.splitlines()]

    until(asked, 200, "the first messages are out")
    hosts.sites["killed"]("kill")
    network = f"t{hosts.token}-cut_outside"
    until(lambda: noted("cut", "admitted"), 400, "the site has its message", 0.1)  # nine sites start at once
    docker("network", "disconnect", network, hosts.sites["cut"].container("supernode"))
    until(lambda: noted("cut", "sent"), 300, "the site has its answer, and no way to send it")
    docker("network", "connect", network, hosts.sites["cut"].container("supernode"))
    output, _ = run.communicate(timeout=900)
    print(output)
    assert run.returncode == 0, output + hosts.server.logs("serverapp")[-3000:]
    lines = hosts.server("exec", "-T", "serverapp", "cat", "/runs/trouble/metrics.jsonl").stdout.splitlines()
    attempts = [row for row in map(json.loads, lines) if row["round"] >= 0]
    failed: dict[str, str] = {}
    for row in attempts:
        failed |= row["failed"]
    assert attempts[-1]["round"] == 2
    assert set(SOUND) <= set(attempts[-1]["accepted"])
    assert "cut" in attempts[-1]["accepted"]  # cut off and back
    assert "killed" not in attempts[-1]["accepted"]
    assert failed["forbids"].startswith("PolicyError: method.name: this site permits")
    assert failed["other-app"].startswith("PolicyError: app digest: this site permits")
    assert failed["killed"]
    report = hosts.operator(
        "fedveil", "report", "/runs/trouble", "--out", "/runs/report.html", "--federation", str(hosts.made)
    )
    assert "report.html" in report
    page = hosts.server("exec", "-T", "serverapp", "cat", "/runs/report.html").stdout
    for site in ("forbids", "other-app", "killed", "wrong-key", "expired"):
        assert site in page
    assert page.count("never online with its registered key") == 2
    assert "this site permits" in page
    doctor = hosts.sites["expired"]("run", "--rm", "-T", "doctor", check=False).stdout
    assert re.search(r"^fail +certificate ca.crt +expired on", doctor, re.MULTILINE), doctor
    assert "fedveil: this key is not registered" in hosts.sites["wrong-key"].logs("supernode")


def test_a_changed_line_of_a_sites_audit_log_is_found(hosts, tmp_path):
    copy = tmp_path / "audit-log.jsonl"
    whole = hosts.sites["north"]("exec", "-T", "clientapp", "cat", "/state/audit-log.jsonl").stdout.encode()
    copy.write_bytes(whole)
    assert main(["log", "verify", str(copy)]) == 0
    position = 0
    for line in whole.splitlines(keepends=True):
        changed = bytearray(whole)
        changed[position + len(line) // 2] ^= 1
        copy.write_bytes(bytes(changed))
        assert main(["log", "verify", str(copy)]) == 2
        position += len(line)
    assert position > 0
