"""The Runs page: what comes first, what needs a person, the list, and what 200 runs cost."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fedveil.console.web import attention, run_summaries, runs_page, safe_files
from fedveil.console.web.background import BackgroundQueries
from fedveil.console.web.components import LogVerdict
from fedveil.console.web.pages import PageNotFound
from fedveil.console.web.report.html import Html
from fedveil.console.web.run_summaries import RunSummaries, RunSummary
from fedveil.console.web.runs_page import RunsQuery
from fedveil.console.web.safe_files import RunLocation
from tests.fedveil.console.conftest import write_run
from tests.fedveil.console.web.conftest import EVIL, opened
from tests.fedveil.console.web.test_federations import flower, pilot  # noqa: F401  # fixtures
from tests.fedveil.console.web.test_pages import goes_on, is_whole

DAY = 86_400.0


def summary(name: str = "first", **changes) -> RunSummary:
    place = RunLocation(name, Path("/runs", name), changes.pop("changed", 0.0))
    about = {"method": "fedavg", "protection": "none", "state": "completed", "sites_left": "", "rounds_done": 2,
             "rounds": 5, "loss": 1.0, "sites": 3, "upload_bytes": 10, "started": "",
             "lasted": 5.0, "reason": ""}  # fmt: skip
    return RunSummary(place, **(about | changes))


def home(client, query: str = "") -> str:
    return client.get(f"{client.base}/{query}").text


def test_the_run_in_progress_comes_first_then_what_needs_a_person_then_the_list(runs):
    goes_on(runs, "goes-on", waiting=["west"], accepted=3, failed=0)
    text = home(opened(runs))
    is_whole(text)
    at = [text.index(part) for part in ("<h1>Runs</h1>", "Round 4 of 5: 3 of 4 have answered, waiting for west",
                                        'id="needs"', "failed after 3 of 5 rounds", 'id="all"', "<table>")]  # fmt: skip
    assert at == sorted(at)
    assert "About 17 s left, at the pace of the last 3 rounds" not in text  # 41 s of the round are over: more than 11.5
    assert "About 12 s left, at the pace of the last 3 rounds; scoring on the server comes on top." in text


@pytest.mark.parametrize(
    ("changes", "since", "words"),
    [
        ({"pace": (10.0, 20.0, 90.0)}, 95.0, "About 55 s left, at the pace of the last 3 rounds"),
        ({"pace": (20.0,)}, 0.0, "About 40 s left, at the pace of the last round"),
        ({"pace": ()}, 95.0, "not known before its first round has ended"),
        ({"pace": (20.0,)}, float("nan"), "About 60 s left"),
        ({"pace": (20.0,)}, "<b>", "About 60 s left"),
    ],
)  # fmt: skip
def test_how_long_a_run_still_takes_is_told_from_its_last_rounds(changes, since, words):
    run = summary(state="running", rounds_done=2, rounds=5, **changes)
    progress = {"phase": "round", "since": since}
    text = runs_page.describe_time_left(run, progress, now=100.0)
    assert words.replace("60 s", "1 min 0 s") in text


def test_nothing_is_told_of_a_run_without_a_number_of_rounds():
    assert runs_page.describe_time_left(summary(rounds=None, pace=(1.0,)), {}) == ""


def test_a_failure_needs_a_person_for_a_week_and_a_stopped_run_does_not():
    link = lambda run: Html(run.place.name)  # noqa: E731
    runs = [
        summary("new", state="failed", changed=100 * DAY, reason="too few sites"),
        summary("old", state="died", changed=92 * DAY),
        summary("told", state="stopped", changed=100 * DAY),
        summary("short", state="running", sites_left="2 of 3 sites since round 2"),
        summary("whole"),
    ]
    needs = attention.run_needs(runs, [("torn", "expected JSON")], link, now=100 * DAY)
    assert [(str(need.what), need.why) for need in needs] == [
        ("new", "failed after 2 of 5 rounds: too few sites"),
        ("short", "goes on with 2 of 3 sites since round 2; its page says why the others are missing"),
        ("torn", "cannot be read: expected JSON"),
    ]


def test_many_needs_of_a_kind_are_counted_and_not_listed():
    runs = [summary(f"run-{i}", state="failed") for i in range(40)]
    needs = attention.run_needs(runs, [], lambda run: Html(run.place.name), now=0.0)
    assert len(needs) == 11
    assert (needs[-1].what, needs[-1].why) == ("30 more runs", "see the list below")


def test_a_changed_log_needs_a_person_and_one_under_check_does_not():
    verdicts = [("runs", LogVerdict("line 3 was changed", "alert")), ("demo", LogVerdict("checking", "wait"))]
    needs = attention.log_needs(verdicts, Html)
    assert [(need.what, need.why) for need in needs] == [("runs", "line 3 was changed")]


@pytest.mark.parametrize(
    ("days", "words"),
    [(31, None), (29, "ends in 29 days"), (1, "ends tomorrow"), (0, "ends today"), (-2, "ended on")],
)
def test_a_key_near_its_end_needs_a_person(pilot, flower, days, words):  # noqa: F811
    file = pilot / "registry" / "members.json"
    content = json.loads(file.read_text())
    until = datetime.now(UTC) + timedelta(days=days, hours=1)
    content["sites"]["north"]["until"] = until.isoformat(timespec="seconds")
    file.write_text(json.dumps(content))
    text = home(opened(None, pilot))
    north = re.search(r"<li[^>]*><b>Site north</b> (.*?)</li>", text)
    assert (north is None) == (words is None)
    if north:
        assert f"its key {words}" in north[1]
        assert "fedveil site init --renew" in north[1]


def test_a_site_that_is_away_needs_a_person_and_one_that_is_not_asked_yet_does_not(pilot, flower):  # noqa: F811
    text = home(opened(None, pilot))
    assert "<b>Site south</b> offline: was online with this key before" in text
    assert "<b>Site west</b> not registered yet" in text
    assert "<b>Site north</b>" not in text
    file = pilot / "registry" / "members.json"
    content = json.loads(file.read_text())
    content["sites"]["south"]["state"] = "revoked"
    file.write_text(json.dumps(content))
    assert "<b>Site south</b>" not in home(opened(None, pilot))  # its operator shut it out


def test_what_was_not_checked_is_not_called_well(pilot, flower, monkeypatch):  # noqa: F811
    monkeypatch.setattr("fedveil.console.web.federations._ANSWER_FLOWER", 0.0)
    monkeypatch.setattr("tests.fedveil.console.web.test_federations.Flower.nodes", lambda self: time.sleep(2))
    file = pilot / "registry" / "members.json"
    content = json.loads(file.read_text())
    del content["sites"]["west"]
    file.write_text(json.dumps(content))
    text = home(opened(None, pilot))
    assert "Still being checked: 2 sites." in text
    assert "0 of 2 sites and their keys" in text
    assert 'class="good">Nothing' not in text


def test_where_nothing_is_wrong_the_page_says_what_was_checked(tmp_path):
    write_run(tmp_path / "runs", "fedavg")
    text = home(opened(tmp_path / "runs"))
    assert 'class="good">Nothing that was checked needs you. Checked: runs of the last 7 days.' in text
    assert "No run is in progress." in text


def test_runs_are_filtered_and_sorted():
    runs = [
        summary("c", loss=3.0, upload_bytes=1, changed=3.0, method="fedrand"),
        summary("b", loss=None, upload_bytes=3, changed=2.0, state="died", lasted=None),
        summary("a", loss=1.0, upload_bytes=2, changed=1.0, lasted=99.0, protection="epsilon 3 at delta 1e-05"),
    ]
    names = lambda asked: "".join(run.place.name for run in runs_page.select_runs(runs, asked))  # noqa: E731
    assert names(RunsQuery()) == "cba"
    assert [names(RunsQuery(order=order)) for order in ("oldest", "name", "loss", "bytes", "lasted")] == [
        "abc", "abc", "acb", "bac", "acb",
    ]  # fmt: skip
    assert names(RunsQuery(text="FEDRAND")) == "c"
    assert names(RunsQuery(text="epsilon 3")) == "a"
    assert names(RunsQuery(state="failed")) == "b"
    assert names(RunsQuery(text="nowhere")) == ""


@pytest.mark.parametrize(
    "query", ["state=gone", "sort=x", "page=0", "page=x", "page=1e3", "page=99999", "page=2", "&".join(["run=a"] * 101),
              "text=" + "a" * 12_000],
)  # fmt: skip
def test_an_address_that_no_page_offers_is_refused(runs, query):
    client = opened(runs)
    answer = client.get(f"{client.base}/?{query}")
    assert answer.status_code == 404
    assert "Page not found" in answer.text


def test_the_filter_s_text_is_text(runs):
    client = opened(runs)
    text = home(client, '?text="><script>alert(1)</script>%1b')
    is_whole(text)
    assert "<script>alert" not in text
    assert "No run matches." in text
    assert 'value="&quot;&gt;&lt;script&gt;' in text


def test_a_page_has_fifty_runs_and_links_to_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(runs_page, "PER_PAGE", 2)
    for i in range(5):
        run = write_run(tmp_path / f"group-{i}", "fedavg")
        os.utime(run / "status.json", (i, i))
        os.utime(run / "config.json", (i, i))
    client = opened(tmp_path)
    listed = lambda text: re.findall(r'<td data-label="run"><a href="[^"]*">([^<]*)</a>', text)  # noqa: E731
    first, last = home(client), home(client, "?page=3&sort=oldest")
    assert listed(first) == ["group-4:fedavg", "group-3:fedavg"]
    assert "Runs 1 to 2 of 5." in first
    assert listed(last) == ["group-4:fedavg"]
    assert "Next page" not in last
    assert f'href="{client.base}/?sort=oldest&amp;page=2">Previous page' in last


def test_a_run_with_any_name_can_be_ticked(hostile):
    client = opened(hostile)
    box = re.search(r'<input type="checkbox" name="run" value="([^"]*)">', home(client))
    assert box
    assert re.fullmatch(r"[A-Za-z0-9%._~-]+", box[1])
    answer = client.get(f"{client.base}/compare", params={"run": [box[1], box[1]]})
    assert "No run is named" not in answer.text
    assert "A comparison needs at least two runs." in answer.text
    assert EVIL not in answer.text


def test_a_name_that_is_no_utf_8_does_not_take_the_page_away(tmp_path):
    run = write_run(tmp_path, "fedavg")
    run.rename(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff"))
    client = opened(tmp_path)
    answer = client.get(f"{client.base}/")
    assert answer.status_code == 200
    assert "a\\udcff" in answer.text


@pytest.fixture
def many(tmp_path) -> dict[str, RunLocation]:
    for i in range(5):
        write_run(tmp_path / f"group-{i}", "fedavg", rounds=1)
    return safe_files.find_runs({"": tmp_path})


@pytest.fixture
def loads(monkeypatch) -> list[str]:
    """The names of the runs that were read."""
    names, find = [], safe_files.find_run
    monkeypatch.setattr(safe_files, "find_run", lambda place: names.append(place.key) or find(place))
    return names


def test_only_a_run_that_changed_is_read_again(many, loads):
    kept = RunSummaries(BackgroundQueries())
    places = list(many.values())
    assert [run.place.key for run in kept.read(places).runs] == [place.key for place in places]
    assert len(loads) == 5
    kept.read(places)
    assert len(loads) == 5
    with (places[2].folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 1, "resumed": true}\n')
    kept.read(places)
    assert loads[5:] == [places[2].key]


def test_what_is_not_listed_any_more_is_forgotten(many):
    kept = RunSummaries(BackgroundQueries())
    kept.read(list(many.values()))
    kept.read(list(many.values())[:2])
    assert len(kept._kept) == 2


def test_beyond_its_time_the_page_does_not_wait_and_the_rest_is_read_in_the_background(many, loads, monkeypatch):
    monkeypatch.setattr(run_summaries, "_BUDGET_SECONDS", -1.0)
    kept, go_on, find = RunSummaries(BackgroundQueries()), threading.Event(), safe_files.find_run
    monkeypatch.setattr(safe_files, "find_run", lambda place: go_on.wait(30) and find(place))
    first = kept.read(list(many.values()))
    assert (len(first.runs), len(first.unread)) == (0, 5)
    go_on.set()
    deadline = time.monotonic() + 30
    while kept.read(list(many.values())).unread:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert sorted(loads) == sorted(many)


def test_a_process_that_dies_without_a_write_is_seen(tmp_path):
    run = write_run(tmp_path, "fedavg", state="running")
    kept, places = RunSummaries(BackgroundQueries()), list(safe_files.find_runs({"": tmp_path}).values())
    assert kept.read(places).runs[0].state == "running"
    (run / "lock").write_text("{}")
    os.truncate(run / "lock", 0)
    (run / "lock").write_text(json.dumps({"inode": (run / "lock").stat().st_ino}))
    (seen,) = kept.read(places).runs
    assert seen.state == "died"
    assert seen.is_failure
    assert "ended without a message" in seen.reason


def test_a_filter_raises_for_what_it_does_not_know():
    with pytest.raises(PageNotFound, match="state: expected one of running"):
        RunsQuery.from_query({"state": ["<b>"]})
