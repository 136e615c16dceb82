"""Members of a federation as the dashboard shows them, with an answer of Flower's or without."""

from __future__ import annotations

import re
import time

import pytest

from fedveil.console.dashboard import federations
from fedveil.console.flower.processes import LaunchError
from fedveil.console.main import main
from fedveil.console.provisioning.federation import Members
from tests.console.dashboard.conftest import opened

EVIL = "<script>alert(1)</script>\x1b"


@pytest.fixture
def pilot(tmp_path):
    """Three members: registered, registered, invited."""
    file = tmp_path / "federation.toml"
    file.write_text('name = "pilot"\nserver = ["fl.example.org"]\nsites = ["north", "south", "west"]\n')
    assert main(["provision", str(file)]) == 0
    members = Members(tmp_path / "pilot")
    members.register("north", "key a", node="11")
    members.register("south", "key b", node="22")
    return tmp_path / "pilot"


class Flower:
    """Answers as Flower's command line, for one folder."""

    says: object = {"11": "online", "22": "offline"}
    asked = 0

    def __init__(self, home) -> None:
        assert home.parts[-3:] == ("pilot", "server", "flower")

    def nodes(self) -> dict[str, str]:
        Flower.asked += 1
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


@pytest.fixture
def flower(monkeypatch):
    monkeypatch.setattr(federations, "Flower", Flower)
    monkeypatch.setattr(Flower, "asked", 0)
    monkeypatch.setattr(federations, "_ASK_FLOWER", 1e12)
    return monkeypatch


def rows(text: str) -> dict[str, str]:
    found = re.findall(r'<tr><td data-label="site">([a-z]+)</td>(.*?)</tr>', text)
    return {name: re.sub(r"<[^>]+>", " ", cells) for name, cells in found}


def test_who_is_online_and_why_the_others_are_not(pilot, runs, flower):
    client = opened(runs, pilot)
    text = client.get(f"{client.base}/").text
    assert "Federation pilot" in text
    assert "1 of 3 sites are online." in text
    found = rows(text)
    assert found["north"].split()[:2] == ["online", "registered"]
    assert "offline: has been online with its key" in found["south"]
    assert "has not been registered: no request of its key has come" in found["west"]
    client.get(f"{client.base}/sites")
    client.get(f"{client.base}/")
    assert Flower.asked == 1  # a question costs a CPU-second


def test_where_flower_does_not_answer_that_is_said_and_nobody_is_called_offline(pilot, runs, flower):
    flower.setattr(Flower, "says", LaunchError(f"flwr supernode failed: {EVIL}"))
    client = opened(runs, pilot)
    text = client.get(f"{client.base}/").text
    assert "Flower does not answer: flwr supernode failed: &lt;script&gt;alert(1)&lt;/script&gt;\\x1b" in text
    assert rows(text)["south"].split()[:2] == ["not", "known"]
    assert "Which of 3 sites are online is not known." in text
    assert " of 3 sites are online." not in text.replace("Which of 3", "")


def test_a_page_that_nobody_watched_gives_no_advice_from_an_old_answer(pilot, runs, flower):
    """A site that came since stands in none."""
    client, now = opened(runs, pilot), [1_800_000_000.0]
    flower.setattr(federations.time, "time", lambda: now[0])
    flower.setattr(federations, "_ASK_FLOWER", 30.0)
    flower.setattr(Flower, "says", {})
    assert "fedveil members sync" in rows(client.get(f"{client.base}/").text)["north"]
    now[0] += 1200
    flower.setattr(Flower, "says", {"11": "online"})
    assert rows(client.get(f"{client.base}/").text)["north"].split()[:2] == ["online", "registered"]
    now[0] += 1200
    flower.setattr(Flower, "nodes", lambda self: time.sleep(1) or {"22": "online"})
    flower.setattr(federations, "_ANSWER_FLOWER", 0.05)
    text = client.get(f"{client.base}/").text
    assert re.search(r"As of \d\d:\d\d:\d\d UTC; Flower is being asked\.", text)
    assert rows(text)["south"].split()[:2] == ["not", "known"]
    assert "members sync" not in text


def test_a_registry_that_broke_is_named_and_takes_nothing_else_away(pilot, runs, flower):
    client = opened(runs, pilot)
    (pilot / "registry" / "members.json").write_text("{")
    text = client.get(f"{client.base}/").text
    assert "expected a folder that fedveil provision made" in text
    assert "fedavg" in text


def test_the_control_log_is_among_the_logs(pilot, runs, flower):
    from fedveil.records import audit_log

    audit_log.append(pilot / "server" / "control-log.jsonl", "permitted", {"operator": EVIL, "call": "ListRuns"})
    client = opened(runs, pilot)
    text = client.get(f"{client.base}/logs/control%20of%20pilot").text
    assert "1 lines, each as it was written" in text
    assert "operator &lt;script&gt;" in text
