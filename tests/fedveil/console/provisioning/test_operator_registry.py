"""Operators as the console keeps them, and as the guard then reads them: two programs, one file."""

from __future__ import annotations

import base64
import json
import re
import stat
import time
from argparse import ArgumentParser, Namespace
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
import yaml
from cryptography.hazmat.primitives import serialization
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from fedveil.console.commands.federation import operators
from fedveil.console.main import main
from fedveil.console.provisioning import command_lock
from fedveil.console.provisioning import operator_registry as kept
from fedveil.console.provisioning.federation_folder import SiteRegistry, registry_folder
from fedveil.errors import ConfigError
from fedveil.guard.control_log import ControlLog
from fedveil.guard.operator_access import ROLES
from fedveil.guard.operator_access import OperatorAccessChecker as Port
from fedveil.guard.registry_files import MonotonicClock
from fedveil.guard.site_registry import SiteKeyChecker as Judge
from tests.conftest import extract


@pytest.fixture
def pilot(tmp_path, capsys):
    (tmp_path / "federation.toml").write_text('name = "pilot"\nserver = ["h"]\nsites = ["north"]\nkey-days = 10\n')
    assert main(["provision", str(tmp_path / "federation.toml")]) == 0
    capsys.readouterr()
    return tmp_path / "pilot"


@pytest.fixture
def control(tmp_path):
    return ControlLog(tmp_path / "control.jsonl")


def login(folder) -> list[str]:
    """What `flwr` sends from there, read as Flower reads it."""
    credentials = yaml.safe_load((folder / "server" / "flower" / "credentials.yaml").read_text())
    key = "flower.account-auth.127.0.0.1:8000.oidc-access-token"
    return [base64.b64decode(credentials[key], validate=True).decode()]


def test_who_provisions_is_the_first_operator(pilot, control):
    assert Port(registry_folder(pilot), control).operator(login(pilot)) == ("owner", "admin", "")


def test_both_ends_know_the_same_roles():
    assert set(kept.ROLES) == set(ROLES)


def test_an_operator_is_let_in_logs_in_elsewhere_and_is_shut_out(pilot, control, tmp_path, capsys):
    token, elsewhere = tmp_path / "anna.token", tmp_path / "laptop" / "pilot"
    assert main(["operators", "add", str(pilot), "anna", "--role", "submit", "--out", str(token)]) == 0
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    stdout = capsys.readouterr().out
    assert token.read_text() not in stdout
    given = ["--token", str(token), "--ca", str(pilot / "ca" / "ca.crt")]
    assert main(["operators", "login", str(elsewhere), *given]) == 0
    assert stat.S_IMODE((elsewhere / "server" / "flower" / "credentials.yaml").stat().st_mode) == 0o600
    port = Port(registry_folder(pilot), control)
    assert port.operator(login(elsewhere)) == ("anna", "submit", "")
    assert token.read_text() not in (registry_folder(pilot) / "operators.json").read_text()
    capsys.readouterr()
    assert main(["operators", "list", str(pilot)]) == 0
    assert re.search(r"anna +submit +active until \d{4}", capsys.readouterr().out)
    assert main(["operators", "revoke", str(pilot), "anna"]) == 0
    assert f"fedveil members renew-instruction-key {pilot}" in capsys.readouterr().out  # which its runs could read
    assert port.operator(login(elsewhere))[2] == "this operator's token is revoked"


def test_of_two_operator_commands_at_once_the_second_waits_and_undoes_nothing(pilot, control, monkeypatch, capsys):
    monkeypatch.setattr(command_lock, "_WAIT_SECONDS", 0.1)
    add = [str(pilot), "anna", "--role", "read", "--out", str(pilot / "anna.token")]
    parser = ArgumentParser()
    operators.add_arguments(parser)
    args = parser.parse_args(["add", *add])
    with ThreadPoolExecutor() as pool:
        with kept.OperatorRegistry.locked(registry_folder(pilot)) as registry:
            other = pool.submit(args.run, args)
            deadline = time.monotonic() + 20
            while "operators: waiting for another fedveil operators command" not in capsys.readouterr().err:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            assert not other.done()
            registry.revoke("owner")
        assert other.result(20) == 0
    entries = kept.OperatorRegistry(registry_folder(pilot)).entries
    assert {name: entry["state"] for name, entry in entries.items()} == {"owner": "revoked", "anna": "active"}
    assert Port(registry_folder(pilot), control).operator(login(pilot))[2] == "this operator's token is revoked"


@pytest.mark.parametrize(
    "command", [["add", "ben", "--role", "read", "--out", "OUT"], ["revoke", "owner", "--last-admin"]]
)
def test_every_command_that_changes_the_operators_locks_them_and_not_the_sites(pilot, monkeypatch, tmp_path, command):
    locked = []
    monkeypatch.setattr(command_lock, "_lock", lambda descriptor, file, name: locked.append((file.name, name)))
    action, *rest = [str(tmp_path / "token") if word == "OUT" else word for word in command]
    assert main(["operators", action, str(pilot), *rest]) == 0
    assert main(["operators", "list", str(pilot)]) in (0, 1)
    assert locked == [(".operators.lock", "operators")]


def test_the_last_admin_is_revoked_only_on_purpose(pilot, capsys):
    registry = kept.OperatorRegistry(registry_folder(pilot))
    registry.add("ben", "admin", 1, False, datetime.now(UTC) - timedelta(days=2))  # its token has expired
    registry.add("eva", "submit", 9, False)
    before = (registry_folder(pilot) / "operators.json").read_bytes()
    assert main(["operators", "revoke", str(pilot), "owner"]) == 2
    assert "owner is the last operator with the admin role; add another first" in capsys.readouterr().err
    assert (registry_folder(pilot) / "operators.json").read_bytes() == before
    assert main(["operators", "revoke", str(pilot), "eva"]) == 0
    assert main(["operators", "revoke", str(pilot), "owner", "--last-admin"]) == 0
    kept.OperatorRegistry(registry_folder(pilot)).add("ann", "admin", 9, False)
    kept.OperatorRegistry(registry_folder(pilot)).add("tom", "admin", 9, False)
    assert main(["operators", "revoke", str(pilot), "ann"]) == 0


def test_an_operator_who_may_start_no_run_leaves_the_instruction_key_alone(pilot, tmp_path, capsys):
    for name, role in (("ben", "read"), ("eva", "submit")):
        kept.OperatorRegistry(registry_folder(pilot)).add(name, role, 1, False)
    assert main(["operators", "revoke", str(pilot), "ben"]) == 0
    (registry_folder(pilot) / "members.json").write_text("{")
    assert main(["operators", "revoke", str(pilot), "eva"]) == 0
    assert "renew-instruction-key" not in capsys.readouterr().out


def test_a_last_day_that_is_over_is_listed(pilot, capsys):
    kept.OperatorRegistry(registry_folder(pilot)).add(
        "ben", "read", 1, False, now=datetime.now(UTC) - timedelta(days=2)
    )
    assert main(["operators", "list", str(pilot)]) == 1
    assert "EXPIRED" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words,reason",
    [
        (("owner", "read", 5, False), "NAME: expected an unused name"),
        (("a b", "read", 5, False), "NAME: expected letters"),
        (("../x", "read", 5, False), "NAME: expected letters"),
        (("ben", "root", 5, False), "--role: expected one of"),
        (("ben", "read", 0, False), "--days: expected 1 to 3650"),
    ],
)
def test_a_wrong_operator_is_refused(words, reason, pilot):
    before = (registry_folder(pilot) / "operators.json").read_bytes()
    with pytest.raises(ConfigError, match=reason):
        kept.OperatorRegistry(registry_folder(pilot)).add(*words)
    assert (registry_folder(pilot) / "operators.json").read_bytes() == before


@pytest.mark.parametrize("name,place", [("anna", "file/token"), ("owner", "token"), ("anna", "/proc/x")])
def test_who_gets_no_token_is_not_let_in_and_leaves_no_file(name, place, pilot, tmp_path, capsys):
    (tmp_path / "file").write_text("a file, and no folder")
    before, out = (registry_folder(pilot) / "operators.json").read_bytes(), tmp_path / place
    assert main(["operators", "add", str(pilot), name, "--role", "submit", "--out", str(out)]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert (registry_folder(pilot) / "operators.json").read_bytes() == before
    assert not (tmp_path / "token").exists()


def test_an_interrupted_add_leaves_no_empty_token(pilot, tmp_path, monkeypatch):
    def interrupted(*_args: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(kept.OperatorRegistry, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        operators._add(Namespace(folder=pilot, name="anna", role="submit", days=1, out=tmp_path / "t", renew=False))
    assert not (tmp_path / "t").exists()


def test_nobody_is_revoked_in_place_of_another(pilot, capsys):
    assert main(["operators", "revoke", str(pilot), "nobody"]) == 2
    assert "NAME: expected one of ['owner']" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "two words", "x" * 300, "\u00e9"])
def test_a_file_that_is_no_token_makes_no_login(text, pilot, tmp_path):
    (tmp_path / "t").write_text(text)
    given = ["--token", str(tmp_path / "t"), "--ca", str(pilot / "ca" / "ca.crt")]
    assert main(["operators", "login", str(tmp_path / "new"), *given]) == 2
    assert not (tmp_path / "new").exists()


def test_the_guard_judges_what_the_operator_registered(pilot, control, tmp_path, capsys):
    """Its expiry date, a key that was replaced, one that was revoked; members expire is not run."""
    extract(pilot / "kits" / "north.tar.gz", tmp_path)
    kit, keys, judge = tmp_path / "pilot-north", [], Judge(registry_folder(pilot), control)

    def refused(key: bytes) -> str:
        return (judge.refusal(key, True) or ("", ""))[1]

    for more in ([], ["--renew"]):
        assert main(["site", "init", "--kit", str(kit), *more]) == 0
        public = serialization.load_ssh_public_key((kit / "keys" / "node.key.pub").read_bytes())
        keys.append(public_key_to_bytes(public))
        request = str(kit / "keys" / "request.json")
        assert main(["members", "register", str(pilot), request, "--fingerprint", "-", "--offline"]) == 0
    assert "replaced" in refused(keys[0])
    assert refused(keys[1]) == ""
    control.clock = MonotonicClock(datetime.fromisoformat(SiteRegistry(pilot).sites["north"]["until"]))
    assert "expired on" in refused(keys[1])
    assert SiteRegistry(pilot).sites["north"]["state"] == "registered"
    assert main(["members", "revoke", str(pilot), "north", "--offline"]) == 0
    assert "revoked" in refused(keys[1])


def test_a_folder_of_an_older_version_says_how_to_move(pilot, capsys):
    (registry_folder(pilot) / "members.json").rename(pilot / "members.json")
    assert main(["members", "list", str(pilot)]) == 2
    assert "move its members.json into registry/" in capsys.readouterr().err


def test_the_registry_is_read_by_the_superlink_alone(pilot):
    services = yaml.safe_load((pilot / "server" / "compose.yaml").read_text())["services"]
    assert "../registry:/registry:ro" in services["superlink"]["volumes"]
    assert "--fedveil-registry=/registry" in services["superlink"]["command"]
    assert not any("registry" in str(volume) for volume in services["serverapp"]["volumes"])
    published = yaml.safe_load((pilot / "server" / "compose.operators.yaml").read_text())["services"]["pod"]["ports"]
    assert published == ["127.0.0.1:8000:8000"]
    assert json.loads((registry_folder(pilot) / "operators.json").read_text())["operators"].keys() == {"owner"}
