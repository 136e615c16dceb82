"""Which connections go through a hospital's proxy, and what is said where one does not."""

from __future__ import annotations

import base64
import os
import re
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil import proxies
from fedveil.console.doctor import checks
from fedveil.console.flower.processes import flower_environment
from fedveil.console.flower.site_process import write_program, write_superlink
from fedveil.console.launch import online_watch
from fedveil.errors import ConfigError
from fedveil.guard import flower
from tests.fedveil.console.tls import tls_server
from tests.recording_proxy import recording_proxy

SPEAKS = flower.installed_release().speaks
NAMES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "no_proxy", "no_grpc_proxy")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@given(st.lists(st.from_regex(r"[a-z0-9.]{1,12}", fullmatch=True), max_size=4), st.booleans())
def test_loopback_is_always_exempt_and_what_was_exempt_stays(entries, upper):
    environ = {"NO_PROXY" if upper else "no_proxy": ", ".join(entries)} if entries else {}
    proxies.exempt_loopback(environ)
    once = dict(environ)
    proxies.exempt_loopback(environ)
    assert environ == once
    assert environ["no_proxy"] == environ["NO_PROXY"]
    assert {*entries, "127.0.0.1", "::1", "localhost"} == set(environ["no_proxy"].split(","))


def test_a_star_stays_alone():
    environ = {"no_proxy": "*"}
    proxies.exempt_loopback(environ)
    assert environ == {"no_proxy": "*", "NO_PROXY": "*"}


@pytest.mark.parametrize(
    ("arguments", "host"),
    [
        (["--runtime-api-address=supernode:9094"], "supernode"),
        (["--runtime-api-address", "supernode:9094", "--insecure"], "supernode"),
        (["--clientappio-api-address=[fd00::1]:9094"], "fd00::1"),
        (["--superlink=fl.example.org:9092"], ""),
        (["--runtime-api-address"], ""),
    ],
)
def test_a_program_reaches_its_own_api_directly(arguments, host):
    environ: dict[str, str] = {}
    proxies.exempt_loopback(environ, ["flower-superexec", *arguments])
    assert environ["no_proxy"].split(",")[3:] == ([host] if host else [])


@pytest.mark.parametrize(
    ("speaks", "environ", "expected"),
    [
        ("gRPC", {}, None),
        ("gRPC", {"https_proxy": "http://p:3128"}, ("https_proxy", "p", 3128, "")),
        ("gRPC", {"http_proxy": "http://p:1", "https_proxy": "http://q:2"}, ("https_proxy", "q", 2, "")),
        ("gRPC", {"http_proxy": "p:1"}, ("http_proxy", "p", 1, "")),
        ("gRPC", {"HTTPS_PROXY": "http://p:1"}, None),
        ("HTTP", {"HTTPS_PROXY": "http://p:1"}, ("HTTPS_PROXY", "p", 1, "")),
        ("HTTP", {"http_proxy": "http://p:1"}, None),
        ("HTTP", {"all_proxy": "http://p"}, ("all_proxy", "p", 80, "")),
        ("gRPC", {"https_proxy": "http://me:a%40b@p:1"}, ("https_proxy", "p", 1, "me:a@b")),
        ("gRPC", {"https_proxy": "http://p:1", "no_proxy": "example.org"}, None),
        ("gRPC", {"https_proxy": "http://p:1", "no_proxy": "other.org"}, ("https_proxy", "p", 1, "")),
    ],
)
def test_the_proxy_for_a_server_is_the_one_that_flower_uses(speaks, environ, expected):
    assert proxies.find_proxy("fl.example.org", speaks, environ) == (expected and proxies.Proxy(*expected))
    assert proxies.find_proxy("127.0.0.1", speaks, environ) is None


@pytest.mark.parametrize("value", ["socks5://p:1", "http://p:99999", "http://", "ftp://secret:secret@p"])
def test_a_value_that_is_no_proxy_is_named_without_its_password(value):
    with pytest.raises(ConfigError, match="https_proxy: Flower cannot use its value") as caught:
        proxies.find_proxy("fl.example.org", "gRPC", {"https_proxy": value})
    assert "secret" not in str(caught.value)


def test_every_process_that_is_started_gets_loopback_exempted(monkeypatch, tmp_path):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert "127.0.0.1" in flower_environment(tmp_path)["no_proxy"].split(",")
    write_superlink(tmp_path / "server")
    write_program(tmp_path / "site" / "flower-supernode", "guard.supernode", "")
    for script in (*(tmp_path / "server").glob("flower-*"), tmp_path / "site" / "flower-supernode"):
        if b"python" in script.read_bytes().split(b"\n")[0]:
            assert "proxies.exempt_loopback(os.environ, sys.argv)\nmain(" in script.read_text()


@pytest.mark.long
def test_a_written_program_exempts_loopback_before_it_calls_anything(tmp_path):
    """In a container the variables come from the engine, not from a command of ours."""
    script = write_program(tmp_path / "program", "guard.superexec", "print(os.environ['no_proxy']) or sys.exit(3)")
    command = [script, "--runtime-api-address=supernode:9094"]
    done = subprocess.run(command, env={**os.environ, "http_proxy": "http://x"}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "127.0.0.1,::1,localhost,supernode\n")


VARIABLE = "https_proxy"


@pytest.fixture
def certificates(tmp_path):
    from fedveil.console.main import main

    (tmp_path / "federation.toml").write_text('name = "p"\nserver = ["fl.hospital.invalid"]\nsites = ["north"]\n')
    assert main(["provision", str(tmp_path / "federation.toml")]) == 0
    return tmp_path / "p" / "server"


def test_the_fleet_port_is_checked_through_the_proxy(certificates, monkeypatch):
    with recording_proxy() as (url, heads), tls_server(certificates) as address:
        monkeypatch.setenv(VARIABLE, url.replace("http://", "http://me:pass@"))
        server = f"fl.hospital.invalid:{address.rpartition(':')[2]}"
        result = checks.check_fleet_port(server, certificates / "ca.crt")
    assert (result.verdict, "through the proxy 127.0.0.1:" in result.text) == ("ok", True), result.text
    assert heads[0].startswith(f"CONNECT {server} HTTP/1.1\r\n".encode())
    assert base64.b64encode(b"me:pass") in heads[0]
    assert "pass" not in result.text
    assert checks.check_proxy(server).text.startswith("fl.hospital.invalid is reached through 127.0.0.1:")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", "refused a connection to .*403 Forbidden; ask its administrator"),
        (b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", "407 Proxy Authentication Required"),
        (b"nonsense\r\n\r\n", "refused a connection to .*: nonsense"),
    ],
)
def test_a_proxy_that_refuses_is_named_and_no_firewall(answer, words, certificates, monkeypatch):
    with recording_proxy(answer) as (url, _):
        monkeypatch.setenv(VARIABLE, url)
        result = checks.run_check(
            "fleet port", lambda: checks.check_fleet_port("fl.hospital.invalid:9092", certificates / "ca.crt")
        )
        text = online_watch.missing_sites("fl.hospital.invalid:9092", certificates / "ca.crt")
    assert result.verdict == "fail"
    assert re.search(words, result.text)
    assert "firewall must" not in result.text
    assert "the proxy 127.0.0.1:" in text


def test_a_proxy_that_is_not_there_is_named(certificates, monkeypatch):
    monkeypatch.setenv(VARIABLE, "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"the proxy 127\.0\.0\.1:9 \(https_proxy\) does not answer"):
        checks.check_fleet_port("fl.hospital.invalid:9092", certificates / "ca.crt")


@pytest.mark.skipif(SPEAKS != "gRPC", reason="HTTP reads upper case too")
def test_a_variable_in_upper_case_is_said_not_to_be_read(monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    result = checks.check_proxy("fl.example.org:9092")
    assert (result.verdict, "does not read HTTPS_PROXY" in result.text) == ("warn", True)
