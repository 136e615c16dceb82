"""Members of a federation as the dashboard shows them, with an answer of Flower's or without."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from fedveil.console.flower.processes import LaunchError
from fedveil.console.main import main
from fedveil.console.provisioning.federation_folder import SiteRegistry
from fedveil.console.web import federations
from fedveil.console.web.apps import run_folders
from fedveil.errors import ConfigError
from fedveil.records import audit_log
from tests.fedveil.console.conftest import write_run
from tests.fedveil.console.provisioning.test_refused_calls import refuse
from tests.fedveil.console.web.conftest import log_of, opened
from tests.fedveil.console.web.test_pages import every_page, is_whole

EVIL = "<script>alert(1)</script>\x1b"


@pytest.fixture
def pilot(tmp_path):
    """Three members: registered, registered, invited."""
    return provisioned(tmp_path, "pilot", north="11", south="22")


def provisioned(parent, name: str, **nodes: str):
    """A federation of north, south and west in PARENT/NAME; `nodes`: of those that are registered."""
    parent.mkdir(exist_ok=True)
    file = parent / "federation.toml"
    file.write_text(f'name = "{name}"\nserver = ["fl.example.org"]\nsites = ["north", "south", "west"]\n')
    assert main(["provision", str(file)]) == 0
    for site, node in nodes.items():
        SiteRegistry(parent / name).register(site, f"key of {site}", node=node)
    return parent / name


class Flower:
    """Answers as Flower's command line, for one folder."""

    says: object = {"11": "online", "22": "offline"}
    unfinished: object = {}
    asked = 0

    def __init__(self, home) -> None:
        assert home.parts[-2:] == ("server", "flower")
        self.federation = home.parts[-3]

    def nodes(self) -> dict[str, str]:
        Flower.asked += 1
        if isinstance(self.says, Exception):
            raise self.says
        return self.says

    def unfinished_runs(self) -> dict[str, str]:
        return self.unfinished


@pytest.fixture
def flower(monkeypatch):
    monkeypatch.setattr(federations, "FlowerCli", Flower)
    monkeypatch.setattr(Flower, "asked", 0)
    monkeypatch.setattr(federations, "_ASK_FLOWER", 1e12)
    return monkeypatch


def rows(text: str) -> dict[str, str]:
    table_rows = re.findall(r'<tr><td data-label="site">([a-z]+)</td>(.*?)</tr>', text)
    return {name: re.sub(r"<[^>]+>", " ", cells) for name, cells in table_rows}


def test_who_is_online_and_why_the_others_are_not(pilot, runs, flower):
    client = opened(runs, pilot)
    text = client.get(f"{client.base}/").text
    assert "Federation pilot" in text
    assert "1 of 3 sites are online." in text
    cells_by_site = rows(text)
    assert cells_by_site["north"].split()[:2] == ["online", "registered"]
    assert "offline: was online with this key before" in cells_by_site["south"]
    assert "not registered yet: the operator has not registered a request from this site" in cells_by_site["west"]
    client.get(f"{client.base}/sites")
    client.get(f"{client.base}/")
    assert Flower.asked == 1  # a question costs a CPU-second


def test_a_site_whose_calls_were_refused_is_shown_as_such(pilot, runs, flower):
    client = opened(runs, pilot)
    assert "refused" not in rows(client.get(f"{client.base}/").text)["north"]
    refuse(pilot, "north", 20)
    cells_by_site = rows(client.get(f"{client.base}/").text)
    assert "20 within a minute; fedveil members revoke shuts it out" in cells_by_site["north"]
    assert "refused" not in cells_by_site["south"]


def test_where_flower_does_not_answer_that_is_said_and_nobody_is_called_offline(pilot, runs, flower):
    flower.setattr(Flower, "says", LaunchError(f"flwr supernode failed: {EVIL}"))
    client = opened(runs, pilot)
    text = client.get(f"{client.base}/").text
    assert "Flower does not answer: flwr supernode failed: &lt;script&gt;alert(1)&lt;/script&gt;\\x1b" in text
    assert rows(text)["south"].split()[:2] == ["not", "known"]
    assert "Which of 3 sites are online is unknown." in text
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
    assert re.search(r"As of \d\d:\d\d:\d\d UTC; asking Flower\.", text)
    assert rows(text)["south"].split()[:2] == ["being", "asked"]
    assert "members sync" not in text


def test_a_registry_that_broke_is_named_and_takes_nothing_else_away(pilot, runs, flower):
    client = opened(runs, pilot)
    (pilot / "registry" / "members.json").write_text("{")
    text = client.get(f"{client.base}/").text
    assert "expected the registry made by fedveil provision, found a damaged one" in text
    assert "fedavg" in text


def test_the_control_log_is_among_the_logs(pilot, runs, flower):
    audit_log.append_entry(pilot / "server" / "control-log.jsonl", "permitted", {"operator": EVIL, "call": "ListRuns"})
    client = opened(runs, pilot)
    text = client.get(f"{client.base}/logs/control%20of%20pilot").text
    assert "1 lines, all unchanged" in text
    assert "operator &lt;script&gt;" in text


@pytest.fixture
def two(pilot, tmp_path, flower):
    """Two federations whose sites have the same names, with a run each; in the second south alone is online."""
    trial = provisioned(tmp_path / "elsewhere", "trial", north="11", south="22")
    write_run(pilot / "runs", "fedrand", site_names=("north", "south", "west", "east"))
    write_run(trial / "runs", "fedavg", rounds=2, site_names=("north", "south", "west", "east"))
    write_run(trial / "runs" / "demo", "fedrand", rounds=1, site_names=("north", "south", "west", "east"))
    for run in (pilot / "runs" / "fedrand", trial / "runs" / "fedavg", trial / "runs" / "demo" / "fedrand"):
        log_of(run)
    seen = {"pilot": {"11": "online", "22": "offline"}, "trial": {"11": "offline", "22": "online"}}
    flower.setattr(Flower, "nodes", lambda self: seen[self.federation])
    return pilot, trial


def cells(row: str) -> list[str]:
    return [re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]


@pytest.mark.long
def test_two_federations_have_their_runs_and_their_sites_apart(two):
    client = opened(None, *two)
    pages = every_page(client)
    below = [path.removeprefix(client.base) for path in pages]
    runs = ["pilot%3Afedrand", "trial%3Afedavg", "trial%3Ademo%3Afedrand"]
    logs = ["pilot%3Aruns", "trial%3Aruns", "trial%3Ademo"]
    expected = [
        "/",
        "/?state=completed",
        "/compare",
        "/sites",
        "/logs",
        *(f"/logs/{log}" for log in logs),
        *(f"/runs/{run}" for run in runs),
    ]
    assert sorted(below) == sorted([*expected, *(f"/runs/{run}/report" for run in runs)])
    for text in pages.values():
        is_whole(text)
    home = pages[f"{client.base}/"]
    listed = [cells(row)[1:3] for row in re.findall(r'<tr><td data-label="compare">.*?</tr>', home)]
    assert sorted(listed) == [["pilot", "fedrand"], ["trial", "demo:fedrand"], ["trial", "fedavg"]]
    assert home.index("Federation pilot") < home.index("Federation trial")
    rows_ = [cells(row) for row in re.findall(r"<tr>(<td.*?)</tr>", pages[f"{client.base}/sites"])]
    site_rows = {(row[0], row[1]): (row[2], row[4], row[5]) for row in rows_}
    assert len(site_rows) == 8
    assert site_rows["pilot", "north"] == ("online", "1", "3")
    assert site_rows["trial", "north"] == ("not online", "2", "3")
    assert site_rows["trial", "south"][0] == "online"
    assert site_rows["pilot", "east"][0] == "not known"
    last = {(row[0], row[1]): row[3] for row in rows_}
    assert last["pilot", "north"] == shown_time(two[0] / "runs" / audit_log.NAME, "north")
    assert last["trial", "north"] == shown_time(two[1] / "runs" / "demo" / audit_log.NAME, "north")


def shown_time(log, site: str) -> str:
    when = max(line["time"] for line in audit_log.read_log(log) if line["event"] == "accepted" and line["site"] == site)
    return f"{when[:10]} {when[11:19]}"


def test_one_federation_needs_no_column_and_keeps_its_addresses(two):
    for client in (opened(None, two[1]), opened(two[1] / "runs", two[1])):
        home = client.get(f"{client.base}/").text
        assert 'data-label="federation"' not in home
        assert f'href="{client.base}/runs/fedavg"' in home
        sites = client.get(f"{client.base}/sites").text
        assert rows(sites)["south"].split()[0] == "online"


def test_of_a_folder_that_is_given_nobody_knows_which_of_two_federations_it_is(two, runs):
    client = opened(runs, *two)
    assert re.search(r'<td data-label="federation">not known</td><td data-label="run"><a href="[^"]*/runs/fedavg"',
                     client.get(f"{client.base}/").text)  # fmt: skip
    assert 'completed">online' not in client.get(f"{client.base}/sites").text
    client = opened(two[1] / "runs", *two)
    assert (
        f'<td data-label="federation">trial</td><td data-label="run"><a href="{client.base}/runs/trial%3Afedavg"'
        in (client.get(f"{client.base}/").text)
    )


def test_two_federations_of_one_name_are_called_apart_and_one_twice_is_one(pilot, tmp_path):
    other = provisioned(tmp_path / "elsewhere", "pilot")
    third = provisioned(tmp_path / "third", "pilot")
    assert federations.name_federations([pilot, other, third, pilot]) == {
        "pilot": pilot,
        "pilot 2": other,
        "pilot 3": third,
    }
    with pytest.raises(ConfigError, match="expected a folder made by fedveil provision"):
        federations.name_federations([tmp_path])


def test_runs_that_come_later_are_looked_for_where_they_will_be(pilot, tmp_path):
    other = provisioned(tmp_path / "elsewhere", "trial")
    names = {"pilot": pilot, "trial": other}
    assert run_folders(None, {"pilot": pilot}) == {"": pilot / "runs"}  # and no other folder's ./runs
    assert run_folders(None, names) == {"pilot": pilot / "runs", "trial": other / "runs"}
    (other / "runs").mkdir()
    assert run_folders(None, names) == {"pilot": pilot / "runs", "trial": other / "runs"}
    assert run_folders(None, {}) == {"": Path("runs")}


def test_a_dashboard_that_was_opened_first_shows_the_first_run(pilot, flower, tmp_path, monkeypatch):
    write_run(tmp_path / "elsewhere" / "runs", "fedavg")
    monkeypatch.chdir(tmp_path / "elsewhere")
    client = opened(None, pilot)
    assert "No runs yet." in client.get(f"{client.base}/").text
    write_run(pilot / "runs", "fedrand")
    text = client.get(f"{client.base}/").text
    assert ">fedrand</a>" in text
    assert ">fedavg</a>" not in text


def test_a_run_that_flower_has_and_that_has_no_folder_yet_is_starting(pilot, flower):
    flower.setattr(Flower, "unfinished", {"271": "pending", "828": "running"})
    run = write_run(pilot / "runs", "fedrand", state="running")
    (run / "flower-run").write_text("828\n")
    client = opened(None, pilot)
    text = client.get(f"{client.base}/").text
    assert re.search(
        r'number 271 <span class="tag plain">starting</span>.*?Flower lists it as pending', text, re.DOTALL
    )
    assert "number 828" not in text
    (run / "flower-run").write_text("271\n")
    text = client.get(f"{client.base}/").text
    assert "number 271" not in text
    assert "number 828" in text


def test_a_site_under_check_is_gray_and_not_red(pilot, flower, monkeypatch):
    """An answer that is old while the next one is asked for says nothing of a site that came since."""
    monkeypatch.setattr(federations, "_ANSWER_FLOWER", 0.0)
    monkeypatch.setattr(Flower, "nodes", lambda self: time.sleep(2))
    client = opened(None, pilot)
    text = client.get(f"{client.base}/").text
    assert '<span class="tag plain">being asked</span>' in text
    assert '<span class="tag failed">' not in rows_html(text, "north")


def rows_html(text: str, site: str) -> str:
    found = re.search(rf'<tr><td data-label="site">{site}</td>.*?</tr>', text)
    assert found
    return found[0]
