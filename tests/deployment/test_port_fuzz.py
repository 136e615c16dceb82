"""A hundred thousand calls of a hostile member over the real port: TLS, keys, and Flower's server in its own process.

The test sends the instructions and takes the replies, through a second state on the SuperLink's database, and speaks
for three sites with their keys. The rogue's calls are those of tests/fedveil/guard/fleet/rogue.py; a quarter of
them has damaged bytes. The rates of the port are off: else most calls would be answered before they are looked at.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore import sql_mixin
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.superlink.federation import NoOpFederationManager
from google.protobuf.message import DecodeError

from fedveil.console.flower import local_deployment
from fedveil.console.flower.local_deployment import SUPERLINK, LocalDeployment, LocalSite
from fedveil.console.flower.machine import is_port_open
from fedveil.console.flower.programs import superlink_command
from tests.deployment.test_hostile_member import RESPONSES, Caller
from tests.fedveil.guard.fleet.rogue import NORTH, ROGUE, SITES, SOUTH, AnswerError, Call, Rogue, Server, end_run
from tests.fedveil.guard.fleet.test_rogue import BEAT_SECONDS, Battle
from tests.fedveil.guard.flower.states import STATES
from tools import fuzz

PARTS, CALLS, ROUNDS = 20, 5_000, 5
DAMAGED = 0.25
SUPERLINK_WITHOUT_RATES = """
import sys
sys.path[:0] = {path!r}
from fedveil.guard import fleet_limits
fleet_limits.CALLS_A_MINUTE = dict.fromkeys(fleet_limits.CALLS_A_MINUTE, 10**9)
fleet_limits.ANNOUNCED_BYTES_A_MINUTE = 1 << 50
from fedveil.guard import loopback_ports
loopback_ports.main("flower-superlink")
"""


class ServerAlone(LocalDeployment):
    """A SuperLink with registered sites, without SuperNodes, and without a SuperExec that would take the run."""

    def start_superlink(self) -> None:
        fleet = f"127.0.0.1:{self._fleet_port}"
        command = superlink_command(
            self.folder, self.folder / "registry", self.folder, self._control_port, fleet, True,
            local_deployment.write_secret(self.folder / "superlink.superexec"),
        )  # fmt: skip
        program = self.folder / "superlink.py"
        program.write_text(SUPERLINK_WITHOUT_RATES.format(path=[str(Path(__file__).parents[2])]))
        self.processes.start(SUPERLINK, [sys.executable, str(program), *command[1:]], self._env())
        self._until(lambda: is_port_open(self._control_port) and is_port_open(self._fleet_port), SUPERLINK)

    def start_site(self, name: str) -> None:
        pass

    def online(self, name: str) -> bool:
        return True

    def peak_bytes(self) -> int:
        """The SuperLink's peak of resident memory, by the kernel."""
        status = Path(f"/proc/{self.processes.pid(SUPERLINK)}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024


class PortBattle(Battle):
    """A sequence over the real port."""

    rounds, calls, patience = ROUNDS, CALLS, 3600.0

    def __init__(self, seed: int, federation: ServerAlone, state: Any, callers: list[Caller]) -> None:
        self.rng, self.problems = random.Random(seed), list[str]()
        self.state, self.callers, self.port = state, callers, None
        self.log = federation.folder / "control-log.jsonl"
        self.nodes = [int(federation._nodes[name]) for name in SITES]
        self.run = state.create_run("us/toy", "0.1.0", "0", {}, NOOP_FEDERATION_ID, None, None, TaskType.SERVER_APP)
        self.task = state.get_run_info(run_ids=[self.run])[0].primary_task_id
        assert state.claim_task(self.task)
        assert state.activate_task(self.task)
        self.server = Server(state, self.run, self.nodes)
        self.foreign_sessions = []
        self.statuses, self.damaged = Counter[tuple[str, Any]](), Counter[tuple[str, Any]]()
        self._damage = random.Random(seed)

    def key(self, site: int) -> bytes:
        return public_key_to_bytes(self.callers[site].key.public_key())

    def caller(self, site: int) -> Call:
        return self.callers[site]

    def _rogue(self, round_: int, instruction: str) -> Rogue:
        rogue = super()._rogue(round_, instruction)
        rogue.call = self._fuzzed
        return rogue

    def _fuzzed(self, name: str, request: Any) -> Any:
        if self._damage.random() > DAMAGED:
            return self.callers[ROGUE](name, request)
        try:
            answer = self.callers[ROGUE].send(name, fuzz.mutate_bytes(request.SerializeToString(), self._damage))
        except AnswerError as error:
            self.damaged[name, error.status] += 1
            raise AnswerError(400) from None  # what is told to one who sends no message concerns nobody else
        self.damaged[name, 200] += 1
        try:
            return RESPONSES["".join(word.capitalize() for word in name.split("_"))].FromString(answer)
        except DecodeError:
            self.problems.append(f"{name}: an answer that cannot be read")
            raise AnswerError(400) from None

    def _judge(self, round_: int, ids: list[str], replies: dict[int, Any], rogue: Rogue) -> None:
        super()._judge(round_, ids, replies, rogue)
        self.statuses += rogue.statuses

    def beat(self, end: threading.Event) -> None:
        while not end.wait(BEAT_SECONDS):
            assert self.state.acknowledge_task_heartbeat(self.task)
            for site in (NORTH, SOUTH):
                node = Node(node_id=self.nodes[site])
                request = SendNodeHeartbeatRequest(node=node, heartbeat_interval=30.0)
                try:
                    if not self.callers[site]("send_node_heartbeat", request).success:
                        self.problems.append("the heartbeat of an honest site is not taken")
                except AnswerError as error:
                    if error.status == 503:  # a SuperNode asks again
                        continue
                    self.problems.append(f"the heartbeat of an honest site is told {error}")


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerAlone, Any, list[Caller]]]:
    folder = tmp_path_factory.mktemp("fuzzed") / "federation"
    with ServerAlone([LocalSite(name) for name in SITES], folder, database=True) as server:
        callers = [Caller(server, name) for name in SITES]
        for caller in callers:
            public = public_key_to_bytes(caller.key.public_key())
            caller("activate_node", ActivateNodeRequest(public_key=public, heartbeat_interval=30.0))
        file = str(folder / "superlink.db")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sql_mixin, "run_migrations", lambda engine: None)  # the SuperLink has made the tables
            patch.setattr(sql_mixin, "SQLITE_PRAGMAS", (*sql_mixin.SQLITE_PRAGMAS, ("busy_timeout", "60000")))
            state: Any = STATES[1](file, NoOpFederationManager(), ObjectStoreFactory(file).store())
            state.initialize()
            yield server, state, callers
        state._engine.dispose()


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(PARTS))
def test_calls_of_any_kind_change_nothing_for_others(
    part: int, federation: tuple[ServerAlone, Any, list[Caller]]
) -> None:
    server, state, callers = federation
    began, before = time.monotonic(), server.peak_bytes()
    battle = PortBattle(part, server, state, callers)
    problems = sorted(set(battle.fight()))
    end_run(state, battle.run)
    assert problems == []
    assert server.processes.ended(SUPERLINK) is None
    threads = psutil.Process(server.processes.pid(SUPERLINK)).num_threads()
    peak = server.peak_bytes()
    spool = sum(file.stat().st_size for file in (server.folder / "spool").rglob("*") if file.is_file())
    print(
        f"part {part}: {battle.statuses.total()} calls, {battle.damaged.total()} damaged, "
        f"{time.monotonic() - began:.0f} s, peak {before / 1e6:.0f} -> {peak / 1e6:.0f} MB, {threads} threads, "
        f"spool {spool} bytes\n"
        f"{sorted(battle.statuses.items(), key=str)}\ndamaged: {sorted(battle.damaged.items(), key=str)}"
    )
    assert spool < 1 << 30
    if part:  # the first fills the caches of the process
        assert peak - before < 64 << 20
