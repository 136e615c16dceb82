"""The points of core/faults, and the statements about their outcomes. core/faults itself makes the runs."""

from __future__ import annotations

import subprocess
import threading
import time

import pytest

from fedveil_bench.core import faults, killer
from fedveil_bench.core.faults import _Bench, _compared, _kept, _outcome
from fedveil_bench.core.killer import SITES, VICTIMS, KillPoint, ProcessKiller, draw_kill_point
from fedveil_bench.provenance import measured_commit

CASES = ["dp", "fedrand"]
WHOLE = {
    "weights": "a", "private states": {"north": [b"x"]}, "uploads": {"0 north": [["w", "dense", [2], 8, "ab"]]},
    "rounds": {0: ["north", "south"]}, "charged": {}, "orders": {"north": 3, "south": 3},
}  # fmt: skip


def test_points_repeat_and_every_kind_of_death_is_among_them():
    points = [draw_kill_point(n, CASES) for n in range(200)]
    assert points == [draw_kill_point(n, CASES) for n in range(200)]
    assert {point.victim for point in points} == set(VICTIMS)
    assert {point.site for point in points} == set(SITES)
    assert {point.event for point in points} == {"sent", "checkpoint", "recorded", "counted", "kept", "charged"}
    assert all(point.case == "dp" for point in points if point.event == "charged")
    assert len(set(points)) == 200


@pytest.mark.parametrize("key,other", [("weights", "b"), ("private states", {}), ("uploads", {}), ("rounds", {})])
def test_whatever_differs_is_named(key, other):
    assert _compared(WHOLE, WHOLE) == "equal"
    assert _compared(WHOLE, WHOLE | {key: other}) == f"different {key}"


@pytest.mark.parametrize(
    "charged,turns,end",
    [(6, 3, "equal"), (8, 4, "equal"), (8, 3, "different"), (4, 3, "different"), (7, 9, "different")],
)
def test_a_private_run_charges_each_turn_that_was_asked_for_and_no_other(charged, turns, end):
    """Two steps a turn, three rounds. Weights differ, for the noise is the system's."""
    whole = WHOLE | {"charged": {"north": 6}}
    found = whole | {"weights": "b", "charged": {"north": charged}, "orders": {"north": turns}}
    assert _compared(whole, found).split()[0] == end


def test_the_turn_that_a_killed_worker_began_is_charged_and_so_is_its_repetition():
    """The server does not know of it: the client process hands the same message to a second worker."""
    whole = WHOLE | {"charged": {"north": 6}}
    found = whole | {"charged": {"north": 8}}
    assert _compared(whole, found, "north") == "equal"
    assert _compared(whole, found, "south").startswith("different ledger")
    assert _compared(whole, whole | {"charged": {"north": 10}}, "north").startswith("different ledger")


class Federation:
    """What was started, and which sites' SuperNodes have ended."""

    def __init__(self):
        self.did, self.codes, self.processes = [], {}, self

    def kill(self, name):
        self.did.append(f"kill {name}")

    kill_site = kill

    def start_site(self, site):
        self.did.append(f"start {site}")

    def start_superlink(self):
        self.did.append("start superlink")

    def ended(self, site):
        return self.codes.get(site)


def test_a_site_is_started_again_as_often_as_its_supernode_is_sent_away_also_in_the_next_run(tmp_path, monkeypatch):
    federation = Federation()
    bench = _Bench(federation, tmp_path, tmp_path, {})
    found = ProcessKiller(KillPoint(0, "fedrand", "site", "north", "kept", 1, 0.0), list, lambda: iter(()))
    bench._restored(found)
    assert federation.did == []  # nothing has ended yet
    federation.codes = {"north": 49}
    bench._restored(found)
    bench._restored(found)  # not at once
    assert federation.did == ["kill north", "start north"]
    monkeypatch.setattr(faults, "_PAUSE_SECONDS", -1.0)
    bench._restored(None)  # an undisturbed run
    assert federation.did == ["kill north", "start north"] * 2


def test_the_superlink_is_started_again_once(tmp_path):
    federation = Federation()
    bench = _Bench(federation, tmp_path, tmp_path, {})
    found = ProcessKiller(KillPoint(0, "fedrand", "superlink", "north", "kept", 1, 0.0), list, lambda: iter(()))
    bench._restored(found)
    assert federation.did == []
    found.killed = True
    bench._restored(found)
    bench._restored(found)
    assert federation.did == ["kill superlink", "start superlink"]


def test_the_killer_kills_what_it_is_shown_once_the_event_is_seen_as_often_as_asked(tmp_path):
    point = KillPoint(0, "fedrand", "worker", "north", "kept", 2, 0.0)
    looked = threading.Event()
    with subprocess.Popen(["sleep", "60"]) as victim:
        found = ProcessKiller(point, lambda: looked.set() or [victim.pid], lambda: tmp_path.glob("turn-*"))
        found.start()
        assert looked.wait(60)  # files that exist before do not count
        (tmp_path / "turn-0").touch()  # at once: of a file that grows each size is an event
        time.sleep(0.2)
        assert victim.poll() is None
        (tmp_path / "turn-1").touch()
        assert victim.wait(10) == -9
    found.over()
    assert found.killed


def test_a_run_that_ends_before_the_event_is_left_alone(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as bystander:
        found = ProcessKiller(
            KillPoint(0, "fedrand", "site", "north", "kept", 1, 0.0), lambda: [bystander.pid], lambda: iter(())
        )
        found.start()
        found.over()
        assert bystander.poll() is None
        bystander.kill()
    assert not found.killed


def test_pieces_add_up_and_those_that_differed_at_another_commit_are_run_again(tmp_path):
    line = '{"number": %d, "case": "dp", "victim": "site", "end": "%s", "killed": true, "resumed": 0, "commit": "%s"}\n'
    file = tmp_path / "x.pieces.jsonl"
    file.write_text(
        line % (0, "equal", measured_commit())
        + line % (1, "different weights", measured_commit())
        + line % (2, "equal", "0")
        + line % (3, "different weights", "0")
    )
    found = _kept(file)
    assert sorted(found) == [0, 1, 2]
    outcome = _outcome(list(found.values()))
    assert outcome.verdicts == [
        "2 of 3 points ended as the undisturbed run does; in 3 a process was killed.",
        f"By commit: 2 of {measured_commit()}, 1 of 0.",
        "point 1 (dp, site): different weights",
    ]
    assert outcome.rows[0]["metrics"]["different"]["mean"] == 1
    assert killer.ROUNDS == 3
