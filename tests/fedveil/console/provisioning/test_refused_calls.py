"""Refused calls of a site, from the control log's end to the screens."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from fedveil.console.commands.runs import status
from fedveil.console.provisioning.federation_folder import registry_folder
from fedveil.console.provisioning.refused_calls import CONTROL_LOG, RefusedCalls, read_refused_calls
from fedveil.guard import fleet_limits
from fedveil.guard.control_log import ControlLog
from fedveil.guard.fleet.refusal import RefusalReason
from fedveil.guard.fleet.refusal_log import FleetRefusalLog

REASON = next(iter(RefusalReason))


def refuse(folder, site: str, times: int) -> None:
    """As the SuperLink writes it."""
    log = FleetRefusalLog(ControlLog(folder / CONTROL_LOG), monotonic=iter(range(0, 600 * times, 1)).__next__)
    for _ in range(times):
        log.record_refusal(site, 49, "push_messages", REASON, "x")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "server").mkdir()
    return tmp_path


def test_a_federation_without_a_log_has_none(folder):
    assert read_refused_calls(folder) == {}


def test_what_the_superlink_writes_is_counted_by_site(folder):
    refuse(folder, "north", 1)
    calls = read_refused_calls(folder)
    assert set(calls) == {"north"}
    assert (calls["north"].count, calls["north"].is_rogue) == (1, False)
    assert REASON.value in str(calls["north"])
    refuse(folder, "east", fleet_limits.ROGUE_REFUSALS_A_MINUTE)
    assert read_refused_calls(folder)["east"].is_rogue
    assert not read_refused_calls(folder)["north"].is_rogue


def test_after_a_day_it_is_over(folder):
    refuse(folder, "north", 1)
    later = datetime.now(UTC) + timedelta(hours=23.9)
    assert set(read_refused_calls(folder, later)) == {"north"}
    assert read_refused_calls(folder, later + timedelta(hours=0.2)) == {}


def test_only_the_end_of_a_long_log_is_read_and_no_line_stops_it(folder):
    now = datetime.now(UTC).isoformat()
    good = {"event": "fleet-refused", "site": "north", "time": now, "reason": "\x1b[31mred", "count": 3}
    strange = ['{"event": "fleet-refused"', "[" * 5000, "[]", "\udcff", json.dumps({**good, "time": "soon"})]
    strange += [json.dumps({**good, "count": count}) for count in (True, -1, 1e9, "3", 10**12, None)]
    with (folder / CONTROL_LOG).open("w", errors="surrogateescape") as log:
        log.write(json.dumps({**good, "site": "old"}) + "\n")
        log.write((json.dumps({"event": "asked", "x": "y" * 1000}) + "\n") * 5000)
        log.write("\n".join([*strange, json.dumps(good), json.dumps({**good, "count": 4})]) + "\n")
    ((site, calls),) = read_refused_calls(folder).items()
    assert (site, calls.count) == ("north", 7)
    assert "\x1b" not in str(calls)


def test_status_shows_a_rogue_beside_its_state_and_does_not_exit_with_0(folder, monkeypatch):
    entry = {"state": "registered", "node": "1"}
    monkeypatch.setattr(
        status, "SiteRegistry", lambda at: type("Registry", (), {"sites": {"east": entry, "north": entry}})
    )
    monkeypatch.setattr(status, "absent_members", lambda at: {})
    registry_folder(folder).mkdir(parents=True, exist_ok=True)
    assert [(site["is_online"], site["note"], site["is_rogue"]) for site in status.list_sites(folder)] == [
        (True, "", False)
    ] * 2
    refuse(folder, "north", 1)
    east, north = status.list_sites(folder)
    assert status._is_well(north)
    assert "1 call refused in the last 24 h, most recently at " in north["note"]
    refuse(folder, "north", fleet_limits.ROGUE_REFUSALS_A_MINUTE)
    east, north = status.list_sites(folder)
    assert not status._is_well(north)
    assert "ROGUE: 20 within a minute; fedveil members revoke shuts it out" in north["note"]
    assert (north["is_rogue"], east["refused_calls"]) == (True, 0)
    assert "refused" not in east["note"]


def test_a_number_of_calls_reads_as_english():
    assert str(RefusedCalls(1)) == "1 call refused in the last 24 h"
    assert str(RefusedCalls(1234)) == "1,234 calls refused in the last 24 h"
