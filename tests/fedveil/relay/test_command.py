"""`fedveil relay`: keys for both ends, and what is said before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedveil.console.main import main
from fedveil.errors import ConfigError
from fedveil.relay import launch as relay_start
from fedveil.relay.endpoint_config import EndpointConfig
from fedveil.relay.keys import read_public
from fedveil.relay.launch import _Told
from fedveil.relay.message_log import MessageLog
from fedveil.relay.status_events import StatusEvents
from tests.conftest import extract

TEXT = 'name = "pilot"\nserver = ["localhost"]\nsites = ["north"]\n'


@pytest.fixture
def kits(tmp_path, monkeypatch, capsys) -> dict[str, Path]:
    """The kit of site north as it lies at the server and at the site, with keys of both ends; nothing is started."""
    (tmp_path / "federation.toml").write_text(TEXT)
    assert main(["provision", str(tmp_path / "federation.toml")]) == 0
    kits = {}
    for end in ("server", "site"):
        extract(tmp_path / "pilot" / "kits" / "north.tar.gz", tmp_path / end)
        kits[end] = tmp_path / end / "pilot-north"
        assert main(["relay", "init", "--kit", str(kits[end])]) == 0
        for part in ("orders", "replies", "data"):
            (kits[end] / part).mkdir()
    assert main(["site", "init", "--kit", str(kits["server"])]) == 0
    (kits["site"] / "data" / "train.jsonl").write_text(json.dumps({"mr": "name[a]", "ref": "text"}) + "\n")
    for end, other in (("server", "site"), ("site", "server")):
        (kits[end] / "keys" / "peer.pub").write_bytes((kits[other] / "keys" / "relay.pub").read_bytes())
    monkeypatch.setattr(relay_start, "start_isolated", _isolated)
    monkeypatch.setattr(relay_start.ProcessGroup, "start", _started)
    capsys.readouterr()
    return kits


def _isolated(processes, name, command, env, port, secret):
    raise ConfigError(f"started: {' '.join(command)} PATH {env['PATH']}")


def _started(self, name, command, env, **more):
    raise ConfigError(f"started: {' '.join(command)} PATH {env['PATH']}")


def relay(action: str, kit: Path, *more: str) -> int:
    return main(["relay", action, "--kit", str(kit), str(kit / "orders"), str(kit / "replies"), *more])


def program(said: str) -> str:
    """The text of the SuperNode's program that a command line names first."""
    folder = Path(said.partition(" PATH ")[2].split(":")[0])
    return (folder / "flower-supernode").read_text()


def test_init_makes_an_ends_keys_and_says_what_to_do_with_them(tmp_path, capsys):
    assert main(["relay", "init", "--out", str(tmp_path / "keys")]) == 0
    stdout = capsys.readouterr().out
    assert "keys/peer.pub in its kit" in stdout
    assert "SHA256:" in stdout.splitlines()[-1]
    assert main(["relay", "init", "--out", str(tmp_path / "keys")]) == 2
    assert "a key already exists" in capsys.readouterr().err
    assert main(["relay", "init"]) == 2
    assert "fedveil relay init --kit ." in capsys.readouterr().err


def test_the_sites_end_asks_no_address_and_has_its_guard(kits, capsys):
    assert relay("import", kits["site"]) == 2
    stderr = capsys.readouterr().err
    assert "--insecure --superlink 127.0.0.1:1 " in stderr  # never asked: its connection is the folders
    text = program(stderr)
    assert "fedveil.relay.site_endpoint import main" in text
    settings = EndpointConfig.of_text(eval(text.splitlines()[-1].removeprefix("main")))
    assert (settings.orders, settings.replies) == (kits["site"] / "orders", kits["site"] / "replies")
    assert settings.state == kits["site"] / "state"
    guard = kits["site"] / "state" / "guard" / "flwr-clientapp"
    assert "require_policy=True" in guard.read_text()


def test_the_servers_end_is_the_site_to_the_server_and_starts_no_superexec(kits, capsys):
    assert relay("export", kits["server"]) == 2
    stderr = capsys.readouterr().err
    for word in ("--superlink localhost:9092", f"--auth-supernode-private-key {kits['server']}/keys/node.key"):
        assert word in stderr
    assert "fedveil.relay.server_endpoint import main" in program(stderr)


def test_an_end_names_the_other_by_the_fingerprint_that_init_printed_there(kits):
    public = read_public(kits["server"] / "keys" / "relay.pub")
    assert relay_start.peer_of(_settings(kits["site"])) == public.fingerprint
    assert relay_start.peer_of(_settings(kits["server"])) != public.fingerprint


def _settings(kit: Path) -> EndpointConfig:
    given = {"orders": kit / "orders", "replies": kit / "replies", "most-mb": 1}
    return relay_start.endpoint_settings(given, kit, kit / "state")


@pytest.mark.long
@pytest.mark.parametrize("end,action", [("server", "export"), ("site", "import")])
@pytest.mark.parametrize(
    "break_,said",
    [
        (lambda kit: (kit / "keys" / "relay.key").unlink(), "make one with fedveil relay init"),
        (lambda kit: (kit / "keys" / "peer.pub").unlink(), "cannot read the other end's relay.pub"),
        (lambda kit: (kit / "keys" / "peer.pub").write_text("nobody"), "copy the other end's relay.pub again"),
        (
            lambda kit: (kit / "keys" / "peer.pub").write_bytes((kit / "keys" / "relay.pub").read_bytes()),
            "is this end's own",
        ),
        (lambda kit: (kit / "keys" / "relay.key").chmod(0o644), "readable only by its owner"),
    ],
    ids=["no key", "no peer", "another peer", "its own peer", "a key for all"],
)
def test_keys_that_do_not_serve_are_said_before_anything_starts(kits, end, action, break_, said, capsys):
    break_(kits[end])
    assert relay(action, kits[end]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "started:" not in err


@pytest.mark.parametrize("end,action,folder", [("server", "export", "replies"), ("site", "import", "orders")])
def test_the_folder_that_letters_come_by_must_be_there(kits, end, action, folder, capsys):
    (kits[end] / folder).rmdir()
    assert relay(action, kits[end]) == 2
    assert f"{folder.upper()}: the folder for exchanged files does not exist" in capsys.readouterr().err
    one = str(kits[end])
    assert main(["relay", action, "--kit", one, one, one]) == 2
    assert "is also the folder for ORDERS" in capsys.readouterr().err
    assert relay(action, kits[end], "--most-mb", "5000") == 2
    assert "--most-mb: expected 1 to 1900, found 5000" in capsys.readouterr().err


def test_a_wait_that_a_supernode_cannot_have_is_said(kits, capsys):
    assert relay("export", kits["server"], "--poll-seconds", "0") == 2
    assert "--poll-seconds: expected 0.02 to 60, found 0.0" in capsys.readouterr().err


def test_one_import_at_a_time(kits, capsys):
    book = MessageLog.open(kits["site"] / "state")
    assert relay("import", kits["site"]) == 2
    assert "another relay for this site is running" in capsys.readouterr().err
    book.release()


def test_a_site_needs_a_policy_here_too_and_no_signing_key(kits, capsys):
    (kits["site"] / "site-policy.toml").unlink()
    assert relay("import", kits["site"]) == 2
    assert "site-policy.toml" in capsys.readouterr().err
    assert relay("import", kits["site"], "--permit-everything") == 2
    assert "started:" in capsys.readouterr().err


def test_a_node_key_of_another_kind_is_said_at_the_servers_end(kits, capsys):
    (kits["server"] / "keys" / "node.key").write_bytes((kits["server"] / "keys" / "relay.pub").read_bytes())
    assert relay("export", kits["server"]) == 2
    assert "node.key" in capsys.readouterr().err


def test_without_a_kit_every_missing_option_is_named(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    assert main(["relay", "export", str(tmp_path / "a"), str(tmp_path / "b"), "--name", "north"]) == 2
    assert "missing: --superlink, --ca, --key" in capsys.readouterr().err
    assert main(["relay", "import", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "expected the unpacked start-up kit, or --name, found no --name" in capsys.readouterr().err


def test_what_an_end_says_is_printed_counted_and_shown_as_text(tmp_path, capsys):
    status_reporter, events = _Told("north", tmp_path / "said.jsonl"), StatusEvents(tmp_path / "said.jsonl")
    events.say("refused", "a\x1b[2Jb")
    events.say("answered", "order: answered")
    status_reporter.tell()
    assert (status_reporter.answered, status_reporter.bad, status_reporter.idle) == (1, 1, False)
    events.say("idle")
    status_reporter.tell()
    status_reporter.tell()
    assert (status_reporter.answered, status_reporter.bad, status_reporter.idle) == (1, 1, True)
    out = capsys.readouterr().out
    assert out.count("site north:") == 2
    assert "\x1b" not in out
