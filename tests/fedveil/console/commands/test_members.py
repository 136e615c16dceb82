from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fedveil.console.commands.federation import members
from fedveil.console.flower.flwr_cli import FlowerCli, ServerUnreachableError
from fedveil.console.flower.machine import free_ports
from fedveil.console.main import main
from tests.conftest import extract


@pytest.mark.long
def test_registering_with_a_server_that_is_not_there_says_how_to_start_it(tmp_path, capsys, monkeypatch):
    """Flower's own answer, for a port at which nothing listens."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fedveil").mkdir()  # as beside a clone: Flower would take our connection's name for this app's path
    (tmp_path / "fedveil" / "pyproject.toml").touch()
    text = 'name = "pilot"\nserver = ["localhost"]\nsites = ["north"]\ncontrol-port = {}\n'
    (tmp_path / "federation.toml").write_text(text.format(free_ports(1)[0]))
    assert main(["provision", "federation.toml"]) == 0
    extract(tmp_path / "pilot" / "kits" / "north.tar.gz", tmp_path)
    assert main(["site", "init", "--kit", "pilot-north"]) == 0
    register = ["members", "register", "pilot", "pilot-north/keys/request.json", "--fingerprint", "-"]
    capsys.readouterr()
    assert main(register) == 2
    stderr = capsys.readouterr().err
    assert "fedveil server start pilot" in stderr
    assert "--offline" in stderr
    with pytest.raises(ServerUnreachableError, match="tunnel"):
        FlowerCli(Path("pilot/server/flower")).nodes()
    assert main(["status", "--federation", "pilot"]) == 2
    output = capsys.readouterr()
    assert "no runs in" in output.out  # the runs, though nobody answers for the sites
    assert "control port" in output.err
    assert main([*register, "--offline"]) == 0
    capsys.readouterr()
    assert main([*register, "--offline"]) == 2
    assert "found the site's registered key; there is nothing to do" in capsys.readouterr().err


class Registry:
    """A federation of one member in each state; `ends` are the days left of the registered one."""

    def __init__(self, folder: Path, ends: float) -> None:
        until = (datetime.now(UTC) + timedelta(days=ends, hours=1)).isoformat()
        self.sites = {
            "north": {"state": "registered", "until": until, "node": "7"},
            "east": {"state": "invited"},
            "south": {"state": "revoked", "until": until, "node": "8"},
        }

    def write_signers(self) -> None:
        """Write nothing."""


@pytest.fixture
def listed(tmp_path, monkeypatch):
    """`members list` for a registry whose registered key ends in so many days; absent: why members are not online."""

    def run(*options: str, ends: float = 100, absent: dict[str, str] | Exception | None = None) -> int:
        def absent_members(folder: Path) -> dict[str, str]:
            if isinstance(absent, Exception):
                raise absent
            return absent or {}

        certificate = type("Certificate", (), {"not_valid_after_utc": datetime.now(UTC) + timedelta(days=400)})
        monkeypatch.setattr(members, "SiteRegistry", lambda folder: Registry(folder, ends))
        monkeypatch.setattr(members, "read_certificate", lambda file: certificate)
        monkeypatch.setattr(members, "absent_members", absent_members)
        return main(["members", "list", str(tmp_path), *options])

    return run


def test_the_list_says_who_is_online_and_why_others_are_not(listed, capsys):
    assert listed(absent={"north": "offline: was online before", "east": "not registered yet"}) == 0
    stdout = capsys.readouterr().out
    assert re.search(r"^east +invited +- +offline +not registered yet$", stdout, re.MULTILINE)
    assert re.search(r"^north +registered +20\d\d-\d\d-\d\d offline  offline: was online before$", stdout, re.MULTILINE)
    assert re.search(r"^south +revoked +- +online$", stdout, re.MULTILINE)
    assert re.search(r"^server\.pem +20\d\d-\d\d-\d\d$", stdout, re.MULTILINE)


@pytest.mark.parametrize(("ends", "code", "word"), [(31, 0, ""), (29, 1, "soon"), (-2, 1, "EXPIRED")])
def test_a_date_that_is_near_or_past_is_named_and_the_exit_code_is_1(listed, capsys, ends, code, word):
    assert listed(ends=ends) == code
    assert (word in capsys.readouterr().out) or not word
    assert listed("--json", ends=ends) == code
    found = json.loads(capsys.readouterr().out)
    assert found["is_soon"] is bool(code)
    assert {member["name"]: member["days_left"] for member in found["members"]} == {
        "north": ends, "east": None, "south": ends,
    }  # fmt: skip


def test_the_json_has_the_fields_of_the_help_and_no_others(listed, capsys):
    assert listed("--json", absent={"east": "not registered yet"}) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["format", "is_soon", "certificates", "members"]
    assert found["format"] == 1
    fields = ["name", "state", "until", "days_left", "is_online", "note"]
    assert [list(member) for member in found["members"]] == [fields] * 3
    assert [list(one) for one in found["certificates"]] == [["name", "until", "days_left"]] * 2
    assert [member["is_online"] for member in found["members"]] == [False, True, True]
    assert datetime.fromisoformat(found["members"][1]["until"]).tzinfo == UTC
    for name in (*fields, *found):
        assert re.search(rf"\b{name}\b", members.__doc__), name


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_server_that_does_not_answer_leaves_that_open(listed, capsys, options):
    assert listed(*options, absent=ServerUnreachableError("nobody there")) == 0
    output = capsys.readouterr()
    assert output.err == "who is online is not known: nobody there\n"
    if options:
        assert {member["is_online"] for member in json.loads(output.out)["members"]} == {None}
    else:
        assert re.search(r"^north +registered +20\d\d-\d\d-\d\d \?$", output.out, re.MULTILINE)


def test_offline_asks_no_server(listed, capsys):
    assert listed("--offline", "--json", absent=AssertionError("asked")) == 0
    output = capsys.readouterr()
    assert (output.err, {one["is_online"] for one in json.loads(output.out)["members"]}) == ("", {None})
