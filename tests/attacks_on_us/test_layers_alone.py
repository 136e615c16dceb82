"""Which layer alone stops which attack of a registered site: each attack with one layer on, and with none.

    port          the checks before Flower's fleet functions (fedveil/guard/fleet)
    reception     the ServerApp's own reading of replies (fedveil/server_app/reception.py)
    signatures    instructions that the site verifies, and replies that the ServerApp verifies

`OUTCOMES` is the table of docs/threat-model.md. One test runs each cell, another compares the page. An attack that
harms nothing with all layers off would prove nothing, so its row is refused.
"""

from __future__ import annotations

import importlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.error import FlowerError
from flwr.supercore.run import InvalidRunStatusException

from fedveil.errors import PolicyError, WireError
from fedveil.federation.message_signatures.digests import digest_content
from fedveil.federation.message_signatures.key_files import InstructionKeys, SiteSigner, SiteSigners
from fedveil.guard import fleet_limits as limits
from fedveil.guard.control_log import ControlLog
from fedveil.guard.fleet import port as fleet_port
from fedveil.guard.fleet.refusal_log import FleetRefusalLog
from fedveil.guard.fleet.spool import ReplySpool
from fedveil.guard.instruction_check import VerifiedInstruction, verify_instruction
from fedveil.server_app.message_signing import MessageSigner, SignerFile
from fedveil.server_app.reception import ArrivedReply, Reception, RefusedReply
from tests.conftest import ROOT
from tests.fedveil.guard.conftest import clean_database  # noqa: F401
from tests.fedveil.guard.fleet.conftest import ORIGINALS, RELEASE
from tests.fedveil.guard.fleet.replies import (
    Reply,
    exchange_object,
    json_body,
    make_reply,
    metadata,
    object_bytes,
    object_id,
    split,
    upload,
)
from tests.fedveil.guard.fleet.rogue import end_run
from tests.server_app.superlink import FleetSite, Instruction, RuntimePort
from tests.server_app.test_message_signing import order_of, public, slices_of, statement

NORTH, SOUTH, ROGUE = "north", "south", "rogue"
SITES = (NORTH, SOUTH, ROGUE)
KEYS = {site: bytes([number]) * 32 for number, site in enumerate(SITES, start=1)}
INSTRUCTION_KEY, APP, FEDERATION, HEAD = bytes([9]) * 32, "5f" * 32, "0a" * 16, f"4:{'cd' * 32}"
SECONDS, MAX_BYTES = 10.0, 4_000_000
LAYERS = ("port", "reception", "signatures")
PAGE = ROOT / "docs" / "threat-model.md"
_REFUSALS = (FlowerError, InvalidRunStatusException, ValueError)  # what Flower answers a site's call with


@dataclass
class Damage:
    """What an attack did. `harm` names it; an empty list is an attack that was stopped."""

    harm: list[str] = field(default_factory=list)
    read_bytes: int = 0


class TrustingServer:
    """A ServerApp that takes replies as Flower's grid gives them, and a message without an instruction for the reply
    that it is waiting for: FedVeil before it had a reception."""

    def __init__(self, grid: Any, signer: MessageSigner | None, damage: Damage) -> None:
        self._grid, self._signer, self._damage = grid, signer, damage
        self._asked: dict[str, tuple[str, int, Any]] = {}
        self._waiting: dict[str, str] = {}
        self.counted: dict[str, bytes] = {}

    def ask(self, messages: dict[str, Message]) -> None:
        signed = {site: self._signer and self._signer.sign(site, message, {}) for site, message in messages.items()}
        nodes = {site: message.metadata.dst_node_id for site, message in messages.items()}
        ids = self._grid.push_messages(list(messages.values()))
        self._waiting = dict(zip(messages, ids, strict=True))
        self._asked = {site: (id_, nodes[site], signed[site]) for site, id_ in self._waiting.items()}
        self.counted = {}

    def poll(self) -> None:
        for site, id_ in list(self._waiting.items()):
            for message in self._grid.pull_messages([id_]):
                self._book(site, message)

    def _book(self, asked_for: str, message: Message) -> None:
        answers = message.metadata.reply_to_message_id
        site = next((name for name, (id_, _, _) in self._asked.items() if id_ == answers), asked_for)
        if not message.has_content():  # an error: this site has no upload
            self._waiting.pop(site, None)
            return
        records = message.content
        data = b"".join(records.array_records["fedveil"][key].data for key in sorted(records.array_records["fedveil"]))
        self._damage.read_bytes = max(self._damage.read_bytes, len(data))
        if self._signer is not None:
            _, node, asked = self._asked[site]
            signature = records.config_records.get("signature")
            head = str(records.config_records["log"]["head"])
            try:
                self._signer.verify(site, node, asked, bytearray(data), head, signature and dict(signature))
            except WireError:
                return
        self.counted[site] = data
        del self._waiting[site]

    def close(self) -> None:
        """Do nothing: replies that come later stay with Flower."""


class ReceivingServer:
    """FedVeil's reception. Each round is a reception of its own, as in an attempt."""

    def __init__(self, grid: Any, signer: MessageSigner | None, damage: Damage) -> None:
        self._grid, self._signer, self._damage = grid, signer, damage
        self._reception: Reception | None = None
        self.counted: dict[str, bytes] = {}

    def ask(self, messages: dict[str, Message]) -> None:
        self.close()
        self._reception = Reception.from_grid(self._grid, None, lambda about: None, self._signer)
        self.counted = {}
        self._reception.ask(messages, MAX_BYTES)

    def poll(self) -> None:
        assert self._reception is not None
        for outcome in self._reception.poll_replies():
            if isinstance(outcome, ArrivedReply):
                self.counted[outcome.site] = bytes(outcome.data)
                self._damage.read_bytes = max(self._damage.read_bytes, len(outcome.data))
            elif isinstance(outcome, RefusedReply):
                self._damage.read_bytes = max(self._damage.read_bytes, outcome.received_bytes)

    def close(self) -> None:
        if self._reception is not None:
            self._reception.close()
            self._reception = None


class Run:
    """Rounds of two honest sites beside the rogue, over a SuperLink in this process."""

    def __init__(
        self, attack: Attack, layers: set[str], folder: Path, database: Path, patch: pytest.MonkeyPatch
    ) -> None:
        self.attack, self.layers, self.folder, self.damage = attack, layers, folder, Damage()
        self.link = RuntimePort(ClientApp(), SITES, folder, database, attack.state)
        self.port = self._install_port(patch) if "port" in layers else None
        self.signer = self._make_signer() if "signatures" in layers else None
        server = ReceivingServer if "reception" in layers else TrustingServer
        self.server = server(self.link.grid, self.signer, self.damage)
        self.waiting: dict[str, list[Instruction]] = {site: [] for site in SITES}
        self.instructed: set[str] = set()
        self.sent_early: dict[str, bytes] = {}
        for site in SITES:
            self.link.hostile[site] = self._receive

    def _install_port(self, patch: pytest.MonkeyPatch) -> fleet_port.FleetPort:
        module: Any = importlib.import_module(fleet_port.FLEET_MODULES[RELEASE.speaks])
        for name, function in ORIGINALS.items():
            patch.setattr(module, name, function)  # put back afterwards
        log = FleetRefusalLog(ControlLog(self.folder / "log" / "control-log.jsonl"))
        port = fleet_port.FleetPort(log, lambda key: key.decode(), ReplySpool(self.folder / "spool"), sweeps=False)
        fleet_port.install_fleet_port(RELEASE, port)
        return port

    def _make_signer(self) -> MessageSigner:
        sites = {
            name: SiteSigner(str(self.link.sites[name].node_id), public(KEYS[name]), "registered", True)
            for name in SITES
        }
        (self.folder / "signers.json").write_bytes(SiteSigners(FEDERATION, True, sites).to_bytes())
        pinned = InstructionKeys(FEDERATION, (public(INSTRUCTION_KEY),))
        (self.folder / "instruction-keys.toml").write_text(pinned.to_toml())
        for site, private in KEYS.items():
            (self.folder / f"{site}.key").write_bytes(private)
            (self.folder / f"{site}.key").chmod(0o600)
        return MessageSigner(INSTRUCTION_KEY, SignerFile(self.folder / "signers.json"), self.link.run, APP, {})

    def end_hand_over(self) -> None:
        """Stop the port's thread for good."""
        if self.port is not None:
            self.port._hand_over.step = threading.Event().wait

    def judge(self) -> list[str]:
        """Run the rounds and return the harm."""
        try:
            for round_ in range(self.attack.rounds):
                self._play(round_)
            self.server.close()
            self.attack.at_end(self)
        except Exception as error:
            self.damage.harm.append(f"the run ends: {type(error).__name__}")
            return self.damage.harm
        end_run(self.link.state, self.link.run)
        if self.port is not None:
            self.port.sweep()
        self.attack.judge(self)
        return self.damage.harm

    def _play(self, round_: int) -> None:
        messages = {
            site: Message(
                RecordDict({
                    "fedveil": slices_of(statement(bytes([round_]) * 500)), "order": order_of(site=site, round=round_),
                    "config": ConfigRecord({"lr": 1.0}),
                }),
                self.link.sites[site].node_id, "train", ttl=900.0,
            )
            for site in SITES
        }  # fmt: skip
        self.server.ask(messages)
        self.instructed = {str(message.metadata.message_id) for message in messages.values()}
        self.server.poll()  # each site has its instruction, and the rogue acts before the others answer
        sent, self.sent_early = self.sent_early, {}
        for site in (NORTH, SOUTH):
            for instruction in self.waiting[site]:
                sent[site] = f"{site} in round {round_}".encode() * 20
                self.answer(site, instruction, sent[site])
            self.waiting[site].clear()
        self._poll_until(lambda: set(sent) <= set(self.server.counted))
        self._poll_until(self._is_settled)
        self.server.poll()
        for instruction in self.waiting[ROGUE]:
            self.attack.late(self, self.link.sites[ROGUE], instruction)
        self.waiting[ROGUE].clear()
        for site in (NORTH, SOUTH):
            if site not in sent:
                self.damage.harm.append(f"{site} did not get its instruction")
            elif self.server.counted.get(site) != sent[site]:
                self.damage.harm.append(f"another upload, or none, counts for {site}")

    def _is_settled(self) -> bool:
        return self.port is None or self.port._hand_over.is_idle()

    def wait_for_hand_over(self) -> None:
        """Wait until Flower has what the port has taken."""
        end = time.monotonic() + SECONDS
        while not self._is_settled():
            assert time.monotonic() < end
            time.sleep(0.005)

    def _poll_until(self, is_done: Callable[[], bool]) -> None:
        end = time.monotonic() + SECONDS
        while True:
            self.server.poll()
            if is_done() or time.monotonic() > end:
                return
            time.sleep(0.01)

    def _receive(self, site: FleetSite, instruction: Instruction) -> None:
        """Keep an instruction, or refuse it at a site that verifies."""
        if self.signer is not None and site.name != ROGUE:
            try:
                self._verified(site.name, instruction)
            except (PolicyError, WireError):
                return
        if instruction.row.message_id not in self.instructed and site.name != ROGUE:
            self.damage.harm.append(f"{site.name} follows an instruction that the server did not send")
            return
        self.waiting[site.name].append(instruction)
        if site.name == ROGUE:
            self.attack.early(self, site, instruction)

    def _verified(self, site: str, instruction: Instruction) -> VerifiedInstruction:
        files = SimpleNamespace(
            site=site, instruction_keys=str(self.folder / "instruction-keys.toml"),
            signing_key=str(self.folder / f"{site}.key"),
        )  # fmt: skip
        context = self.link.sites[site].context
        verified = verify_instruction(instruction.message, context, self.link.run, APP, files, True)
        assert verified is not None
        return verified

    def content(self, site: str, instruction: Instruction, data: bytes, counts: int = 1) -> RecordDict:
        """The content of a reply. Where signatures are on, its site signs it: the rogue has a signing key too."""
        content = upload(data)
        content["log"] = ConfigRecord({"head": HEAD})
        if self.signer is not None:
            signature = self._verified(site, instruction).sign_reply(digest_content([data] * counts), HEAD)
            content["signature"] = ConfigRecord(signature)
        return content

    def answer(self, site: str, instruction: Instruction, data: bytes) -> None:
        fleet_site = self.link.sites[site]
        content = self.content(site, instruction, data)
        fleet_site.send(make_reply(content, metadata(instruction.row, fleet_site.node_id)))


def attempt(site: FleetSite, reply: Reply) -> bool:
    """Send a forged reply. Return whether the port took it."""
    try:
        site.send(reply)
    except _REFUSALS:
        return False
    return True


class Attack:
    """One item of the list. A subclass acts before the others answer, after them, or at the end of the run.

    Attributes:
        title: the row's first cell.
        state: Flower's kind of state; one in memory is quicker.
        rounds: how many the run has.
    """

    title: str
    state, rounds = "dictionaries", 1

    def early(self, run: Run, rogue: FleetSite, instruction: Instruction) -> None:
        """Act before the other sites answer."""

    def late(self, run: Run, rogue: FleetSite, instruction: Instruction) -> None:
        """Act after them, while Flower still takes a reply."""

    def at_end(self, run: Run) -> None:
        """Act after the ServerApp has closed its last round."""

    def judge(self, run: Run) -> None:
        """Add harm that is not in what counts."""


class SpeakForAll(Attack):
    title = "an upload in every site's name, as a message that answers no instruction"

    def early(self, run: Run, rogue: FleetSite, instruction: Instruction) -> None:
        content = run.content(ROGUE, instruction, b"the whole model")
        reply = make_reply(content, metadata(instruction.row, rogue.node_id))
        attempt(rogue, unsolicited(with_inner(reply, reply_to_message_id="", src_node_id=SUPERLINK_NODE_ID)))


class EndTheRun(Attack):
    title = "a message that answers no instruction and that cannot be read"

    def early(self, run: Run, rogue: FleetSite, instruction: Instruction) -> None:
        reply = make_reply(RecordDict({"x": ConfigRecord({"n": 1})}), metadata(instruction.row, rogue.node_id))
        attempt(rogue, unsolicited(with_body(reply, "Message", b"\xff" * 5)))


class InstructAnotherSite(Attack):
    title = "an instruction to another site"

    def early(self, run: Run, rogue: FleetSite, instruction: Instruction) -> None:
        about = metadata(instruction.row, rogue.node_id)
        forged = make_reply(RecordDict(instruction.message.content), about)
        to_south = forged.request.messages_list[0].metadata
        to_south.dst_node_id = run.link.sites[SOUTH].node_id
        attempt(rogue, unsolicited(forged, to_south.dst_node_id))


class FloodWithObjects(Attack):
    title = "a reply that announces more objects than any reply has"
    COUNT = limits.MAX_TREE_NODES + 1

    def late(self, run: Run, rogue: FleetSite, instruction: Instruction) -> None:
        self.last = instruction

    def at_end(self, run: Run) -> None:
        rogue = run.link.sites[ROGUE]
        reply = make_reply(upload(b"x"), metadata(self.last.row, rogue.node_id))
        tree = reply.request.message_object_trees[0]
        tree.children[0].children.extend(ObjectTree(object_id=f"{number:064x}") for number in range(self.COUNT))
        before = len(run.link.state.object_store)
        try:
            rogue.call("push_messages", reply.request)
        except _REFUSALS:
            return
        if len(run.link.state.object_store) - before >= self.COUNT:
            run.damage.harm.append(f"Flower keeps {self.COUNT} objects of one reply")


class OtherRoot(Attack):
    title = "a reply whose root is no Message"

    def early(self, run: Run, rogue: FleetSite, instruction: Instruction) -> None:
        reply = make_reply(upload(b"x"), metadata(instruction.row, rogue.node_id))
        content = ConfigRecord({"a": 1}).deflate()
        reply.request.message_object_trees[0].CopyFrom(ObjectTree(object_id=object_id(content)))
        reply.request.messages_list[0].metadata.message_id = object_id(content)
        attempt(rogue, Reply(reply.request, {object_id(content): content}))


class GrowingArray(Attack):
    title = "an Array that names one chunk many times"
    TIMES, PART = 200, b"x" * 100_000

    def early(self, run: Run, rogue: FleetSite, instruction: Instruction) -> None:
        content = run.content(ROGUE, instruction, self.PART, counts=self.TIMES)
        reply = make_reply(content, metadata(instruction.row, rogue.node_id))
        body = json.loads(split(reply.objects[reply.of_type("Array")])[2])
        body |= {"shape": [len(self.PART) * self.TIMES], "arraychunk_ids": [0] * self.TIMES}
        attempt(rogue, with_body(reply, "Array", json_body(body)))

    def judge(self, run: Run) -> None:
        if run.damage.read_bytes > 2 * len(self.PART):
            run.damage.harm.append(f"{len(self.PART)} bytes become {run.damage.read_bytes}")


class SquattedObject(Attack):
    title = "a reply that announces an object of the server's next message with another child"
    state, rounds = "SQL", 2  # a state in memory keeps the children of whoever announces first

    def late(self, run: Run, rogue: FleetSite, instruction: Instruction) -> None:
        reply = make_reply(upload(b"x"), metadata(instruction.row, rogue.node_id))
        next_one = instruction.message.content.config_records["config"].object_id  # equal settings in every round
        missing = ObjectTree(object_id=f"{1:064x}")
        squatted = ObjectTree(object_id=next_one, children=[missing])
        reply.request.message_object_trees[0].children[0].children.append(squatted)
        try:
            rogue.call("push_messages", reply.request)
        except _REFUSALS:
            return


class Leftovers(Attack):
    title = "objects that stay after the run has ended"

    def late(self, run: Run, rogue: FleetSite, instruction: Instruction) -> None:
        self.last = instruction

    def at_end(self, run: Run) -> None:
        rogue = run.link.sites[ROGUE]
        attempt(rogue, make_reply(upload(b"too late" * 100), metadata(self.last.row, rogue.node_id)))
        run.wait_for_hand_over()

    def judge(self, run: Run) -> None:
        if count := len(run.link.state.object_store):
            run.damage.harm.append(f"{count} objects stay")


class OtherMetadata(Attack):
    title = "a reply whose object names another site and instruction than its announcement"

    def early(self, run: Run, rogue: FleetSite, instruction: Instruction) -> None:
        content = run.content(ROGUE, instruction, b"the model of another site")
        reply = make_reply(content, metadata(instruction.row, rogue.node_id))
        (north,) = run.waiting[NORTH]
        named = {"reply_to_message_id": north.row.message_id, "src_node_id": run.link.sites[NORTH].node_id}
        attempt(rogue, with_inner(reply, **named))


class StoredAlready(Attack):
    title = "learning whether another site has sent given bytes"

    def early(self, run: Run, rogue: FleetSite, instruction: Instruction) -> None:
        (north,) = run.waiting[NORTH]
        guess = b"what north sends"
        run.answer(NORTH, north, guess)
        run.sent_early[NORTH] = guess
        run.waiting[NORTH].clear()
        run.wait_for_hand_over()
        reply = make_reply(upload(guess), metadata(instruction.row, rogue.node_id))
        reply.request.node.node_id = rogue.node_id
        answer = rogue.call("push_messages", reply.request)
        if set(reply.objects) != set(answer.objects_to_push):
            run.damage.harm.append("the rogue learns that these bytes were stored before")
        attempt(rogue, reply)  # whole, so that no reader waits for the rest


def with_body(reply: Reply, type_: str, body: bytes) -> Reply:
    """The reply with another body of its first object of a type."""
    old = reply.of_type(type_)
    return exchange_object(reply, old, object_bytes(type_, split(reply.objects[old])[1], body))


def with_inner(reply: Reply, **fields: object) -> Reply:
    """The reply whose Message object has other metadata than it announces."""
    inner = ProtoMessage.FromString(split(reply.objects[reply.root])[2])
    for name, value in fields.items():
        setattr(inner.metadata, name, value)
    return with_body(reply, "Message", inner.SerializeToString(deterministic=True))


def unsolicited(reply: Reply, node_id: int = SUPERLINK_NODE_ID) -> Reply:
    """The reply announced as a message of the server that answers nothing, to a node."""
    about = reply.request.messages_list[0].metadata
    about.reply_to_message_id, about.src_node_id, about.dst_node_id = "", SUPERLINK_NODE_ID, node_id
    return reply


STOPS, FAILS = "stops", "-"
# The cells: the port alone, the reception alone, signatures alone. With no layer each attack does harm.
OUTCOMES: dict[type[Attack], tuple[str, str, str]] = {
    SpeakForAll: (STOPS, STOPS, STOPS),
    EndTheRun: (STOPS, STOPS, FAILS),
    InstructAnotherSite: (STOPS, FAILS, STOPS),
    FloodWithObjects: (STOPS, FAILS, FAILS),
    OtherRoot: (STOPS, STOPS, FAILS),
    GrowingArray: (STOPS, STOPS, FAILS),
    SquattedObject: (STOPS, STOPS, FAILS),
    Leftovers: (STOPS, FAILS, FAILS),
    OtherMetadata: (STOPS, STOPS, STOPS),
    StoredAlready: (STOPS, FAILS, FAILS),
}


def table() -> str:
    """The table of the page."""
    head = ["| attack by a registered site | fleet port | ServerApp | signatures |", "|---|---|---|---|"]
    return "\n".join([*head, *(f"| {attack.title} | {' | '.join(cells)} |" for attack, cells in OUTCOMES.items())])


def test_the_page_has_the_table_of_these_tests():
    assert table() in PAGE.read_text()


def run_attack(attack: Attack, layers: set[str], folder: Path, database: Path) -> list[str]:
    """Return the harm of an attack with these layers on. Nothing of them stays for the next run."""
    with pytest.MonkeyPatch.context() as patch:
        run = Run(attack, layers, folder, database, patch)
        try:
            return run.judge()
        finally:
            run.end_hand_over()
            if engine := getattr(run.link.state, "_engine", None):
                engine.dispose()


@pytest.mark.long
@pytest.mark.parametrize("layers", [(), *((layer,) for layer in LAYERS), LAYERS], ids="+".join)
def test_without_an_attack_no_layer_harms_the_run(layers, tmp_path, clean_database):  # noqa: F811
    assert run_attack(Attack(), set(layers), tmp_path, clean_database) == []


@pytest.mark.long
@pytest.mark.parametrize("attack", OUTCOMES, ids=lambda attack: attack.__name__)
def test_each_layer_alone_stops_what_the_table_says(attack, tmp_path, clean_database):  # noqa: F811
    harm = {}
    for layers in ((), *((layer,) for layer in LAYERS), LAYERS):
        folder = tmp_path / "-".join(["on", *layers])
        folder.mkdir()
        harm[layers] = run_attack(attack(), set(layers), folder, clean_database)
    assert harm[()], "this attack does nothing"
    assert harm[LAYERS] == []
    assert tuple(FAILS if harm[layer,] else STOPS for layer in LAYERS) == OUTCOMES[attack], harm
