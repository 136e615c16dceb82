"""A rogue member against the fleet port: 30 sequences of calls in the long suite, 1,000 in the slow one.

While it acts, the server's run with two honest sites ends bit for bit as without it. Without the guard the same
sequences find the faults that it is for.
"""

from __future__ import annotations

import importlib
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from flwr.supercore.error import FlowerError
from flwr.supercore.error.catalog import API_ERROR_MAP
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.run import InvalidRunStatusException

from fedveil.guard.control_log import ControlLog
from fedveil.guard.fleet import port as fleet_port
from fedveil.guard.fleet.refusal_log import FleetRefusalLog
from fedveil.guard.fleet.spool import ReplySpool
from fedveil.guard.flower import link_states
from fedveil.records import audit_log
from tests.fedveil.guard.fleet.conftest import ORIGINALS, RELEASE, make_superlink
from tests.fedveil.guard.fleet.replies import upload
from tests.fedveil.guard.fleet.rogue import (
    NORTH,
    PATIENCE_SECONDS,
    ROGUE,
    SITES,
    SOUTH,
    AnswerError,
    Call,
    Rogue,
    Server,
    answer_honestly,
    end_run,
    is_bearable,
)

ROUNDS = 2
CALLS = 200
BEAT_SECONDS = 5.0
KEYS = {bytes([number]): name for number, name in enumerate(SITES)}


class Battle:
    """One sequence. `problems` is what an operator would have to bear."""

    rounds, calls, patience = ROUNDS, CALLS, 3 * PATIENCE_SECONDS

    def __init__(self, seed: int, folder: Path, clean: Path, patch: pytest.MonkeyPatch, guarded: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.rng, self.problems = random.Random(seed), list[str]()
        self.kind = "SQL" if seed % 2 else "dictionaries"
        superlink = make_superlink(self.kind, folder, clean)
        self.state, self.run = superlink.state, superlink.run
        for message_id in superlink.sent:  # of the helper's, which this test does not need
            self.state.delete_messages({message_id})
            self.state.object_store.delete(message_id)
        self.nodes = [*superlink.nodes, self.state.create_node("us", "us", bytes([ROGUE]), 30.0)]
        self.state.activate_node(self.nodes[ROGUE], 30.0)
        module: Any = importlib.import_module(fleet_port.FLEET_MODULES[RELEASE.speaks])
        for name, function in ORIGINALS.items():
            patch.setattr(module, name, function)
        self.log = folder / "log" / "control-log.jsonl"
        self.port: fleet_port.FleetPort | None = None
        if guarded:
            refusals = FleetRefusalLog(ControlLog(self.log))
            self.port = fleet_port.FleetPort(
                refusals, lambda key: KEYS.get(key, ""), ReplySpool(folder / "spool"), sweeps=False
            )
            fleet_port.install_fleet_port(RELEASE, self.port)
        self.functions = {name: getattr(module, name) for name in fleet_port.FLEET_CALLS}
        self.server = Server(self.state, self.run, self.nodes)
        self.foreign_sessions: list[str] = []

    def end_hand_over(self) -> None:
        """Stop the thread of this battle's port for good: hundreds that wake up would slow the later battles down."""
        if self.port is not None:
            self.port._hand_over.step = threading.Event().wait

    def caller(self, site: int) -> Call:
        """Return the function by which a site calls."""
        return self.call

    def key(self, site: int) -> bytes:
        """Return the public key of a site."""
        return bytes([site])

    def call(self, name: str, request: Any) -> Any:
        more: dict[str, Any] = {"store": self.state.object_store} if name in fleet_port._WITH_STORE else {}
        if name in ("register_node", "unregister_node") and RELEASE.speaks == "HTTP":
            more["enable_supernode_auth"] = True
        if self.port is None and name in ("register_node", "unregister_node"):
            raise AnswerError(412)  # Flower's servicer, which is not in this test
        try:
            return self.functions[name](request=request, state=self.state, **more)
        except FlowerError as error:
            raise AnswerError(API_ERROR_MAP[error.code].http_status_code) from error
        except InvalidRunStatusException:
            raise AnswerError(403) from None
        except Exception as error:
            if isinstance(error, ValueError) and name in fleet_port._VALUE_ERRORS:
                raise AnswerError(412) from error
            raise AnswerError(type(error).__name__) from error

    def beat(self, end: threading.Event) -> None:
        """Send what Flower waits for: on a busy machine a sequence outlasts the minute after which a task is dead."""
        task = self.state.get_run_info(run_ids=[self.run])[0].primary_task_id
        while not end.wait(BEAT_SECONDS):
            assert self.state.acknowledge_task_heartbeat(task)
            for site in (NORTH, SOUTH):
                assert self.state.acknowledge_node_heartbeat(self.nodes[site], 30.0)

    def fight(self) -> list[str]:
        """Run the rounds beside the rogue; returns the problems."""
        end = threading.Event()
        beats = threading.Thread(target=self.beat, args=(end,))
        beats.start()
        try:
            self._fight()
        finally:
            end.set()
            beats.join(60)
        if self.port is not None:
            self._tidy_up()
        return self.problems

    def _fight(self) -> None:
        began = time.monotonic()
        takes_part = self.rng.random() < 0.5
        for round_ in range(self.rounds):
            ids = [self.server.send(round_, site) for site in range(3)]
            rogue = self._rogue(round_, ids[ROGUE])
            if takes_part and round_ == 0:
                self._honestly(round_, ROGUE, ids[ROGUE], [])
            replies: dict[int, Any] = {}
            threads = [
                threading.Thread(target=self._honest, args=(round_, site, ids[site], replies))
                for site in (NORTH, SOUTH)
            ]
            threads.append(threading.Thread(target=rogue.act, args=(self.calls // self.rounds,)))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(self.patience)
                if thread.is_alive():
                    self.problems.append("a call does not end")
                    return
            self._judge(round_, ids, replies, rogue)
        self.problems += self.server.problems
        if self.port is not None and time.monotonic() - began > 2 * PATIENCE_SECONDS:
            self.problems.append("it took too long")

    def _rogue(self, round_: int, instruction: str) -> Rogue:
        row = link_states.find_instruction(self.state, instruction)
        assert row is not None
        trees = {
            site: [
                node.object_id
                for node in iterate_object_tree(self.state.object_store.get_object_tree(self.server.sent[round_, site]))
            ]
            for site in range(3)
        }
        rogue = Rogue(
            self.rng, self.caller(ROGUE), self.nodes[ROGUE], self.run, self.key(ROGUE), row, trees[ROGUE],
            [*trees[NORTH], *trees[SOUTH]],
        )  # fmt: skip
        rogue.foreign_nodes, rogue.foreign_sessions = self.nodes[:2], self.foreign_sessions
        return rogue

    def _honest(self, round_: int, site: int, instruction: str, replies: dict[int, Any]) -> None:
        try:
            replies[site] = self._honestly(round_, site, instruction, self.foreign_sessions)
        except (AnswerError, AssertionError) as error:
            self.problems.append(f"an honest site is told {error}")

    def _honestly(self, round_: int, site: int, instruction: str, sessions: list[str]) -> Any:
        secret = upload(f"secret of {SITES[site]} in round {round_} ".encode() * 50, b"\0" * 700)
        return answer_honestly(self.caller(site), self.nodes[site], self.run, instruction, secret, sessions)

    def _judge(self, round_: int, ids: list[str], replies: dict[int, Any], rogue: Rogue) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        taken: dict[int, dict[str, bytes] | None] = {}
        while time.monotonic() < end:
            taken = {site: self.server.take(ids[site]) for site in (NORTH, SOUTH)}
            if all(taken.values()):
                break
            time.sleep(0.02)
        for site in (NORTH, SOUTH):
            if replies.get(site) is None or taken[site] != replies[site].objects:
                self.problems.append("the reply of an honest site did not come as it was sent")
        if self.port is not None:
            until = time.monotonic() + PATIENCE_SECONDS
            while not self.port._hand_over.is_idle() and time.monotonic() < until:
                time.sleep(0.01)
        own = self.server.take(ids[ROGUE])
        if own is not None:
            self.server.judge_reply(ids[ROGUE], own)
        for (name, status), _ in rogue.statuses.items():
            if not is_bearable(status):
                self.problems.append(f"{name} ends with {status}")
        came = b"".join(rogue.answers)
        for site in (NORTH, SOUTH):
            if f"secret of {SITES[site]}".encode() in came:
                self.problems.append("the rogue has got what another site sent")
        if self.port is not None and 403 in {status for _, status in rogue.statuses}:
            lines = audit_log.read_log(self.log)
            if not any(line.get("site") == "rogue" for line in lines):
                self.problems.append("the rogue is not in the control log")
            if any(line.get("site") in ("north", "south") for line in lines):
                self.problems.append("an honest site is in the control log")

    def _tidy_up(self) -> None:
        assert self.port is not None
        end_run(self.state, self.run)
        self.port.sweep()
        left = [path for path in self.port._staging._spool.folder.rglob("*") if path.is_file()]
        if left or self.port._staging.open_replies():
            self.problems.append("the spool is not empty")
        if len(self.state.object_store) or self.state.num_message_ins() or self.state.num_message_res():
            self.problems.append("objects or messages of the ended run are left")


def fight(seeds: range, folder: Path, clean: Path, guarded: bool = True) -> dict[int, list[str]]:
    found = {}
    for seed in seeds:
        with pytest.MonkeyPatch.context() as patch:
            battle = Battle(seed, folder / str(seed), clean, patch, guarded)
            try:
                found[seed] = sorted(set(battle.fight()))
            finally:
                battle.end_hand_over()
                if engine := getattr(battle.state, "_engine", None):
                    engine.dispose()
    return {seed: problems for seed, problems in found.items() if problems}


@pytest.mark.long
def test_two_sequences_change_nothing(tmp_path: Path, clean_database: Path) -> None:
    assert fight(range(2), tmp_path, clean_database) == {}


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_thirty_sequences_change_nothing(tmp_path: Path, clean_database: Path) -> None:
    assert fight(range(2, 32), tmp_path, clean_database) == {}


@pytest.mark.slow
@pytest.mark.timeout(20_000)
@pytest.mark.parametrize("hundred", range(10))
def test_a_thousand_sequences_change_nothing(hundred: int, tmp_path: Path, clean_database: Path) -> None:
    first = 1000 + 100 * hundred
    assert fight(range(first, first + 100), tmp_path, clean_database) == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_the_guard_the_sequences_find_the_faults(tmp_path: Path, clean_database: Path) -> None:
    problems = {text for found in fight(range(8), tmp_path, clean_database, guarded=False).values() for text in found}
    expected = (
        "handed to the ServerApp", "an honest site is told an instruction that the server did not send",
        "a reply cannot be read", "ends with KeyError",
    )  # fmt: skip
    for text in expected:
        assert any(text in problem for problem in problems), (text, problems)
