"""A server of one site that may send anything, and the site's whole turn."""

from __future__ import annotations

import json

from fedveil import rng, strategies, tasks
from fedveil.client_app import client_session
from fedveil.client_app.guards.broadcast_guard import BroadcastReference, BroadcastReferenceStore
from fedveil.client_app.instruction import ClientAssignment
from fedveil.client_app.policy import run_config_rules
from fedveil.config import parse
from fedveil.contract.message_address import MessageAddress
from fedveil.contract.method import RoundContext, hyperparameters_of
from fedveil.federation.exchange import MessageExchange
from fedveil.records.atomic_files import read_checksummed, write_checksummed


class Server:
    """A server, and the state folder of its site."""

    def __init__(self, at, text: str = "", rows=None, **config):
        flat = {"method.name": "fedavg", "task.max-tokens": 32, "train.batch-size": 4, "train.max-steps": 1, **config}
        parsed = parse(flat)
        self.at, self.flat, self.name = at, flat, parsed.method.name
        (at / "policy.toml").write_text(f"{text}\n{run_config_rules.permits_for_run(parsed)}")
        rows = rows or [{"mr": f"name[Aromi {i}]", "ref": f"Aromi {i} is a pub."} for i in range(8)]
        (at / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        method = strategies.create_method(self.name, parsed.method.params)
        self.task = tasks.load_task(parsed, method.adapter, "cpu")
        self.exchange = MessageExchange(method, self.name, self.task.spec)
        self.initial = self.task.initial(rng.initial_stream(parsed.run.seed, "weights"))
        self.turns = client_session.ClientSession()
        self.looked, self.notes = 0, ()

    def send(self, weights, round_: int = 0) -> bytes:
        ctx = RoundContext(round_, "s", round_ == 0, bytes(32), address=MessageAddress("r"))
        method = self.exchange.method
        state = method.init(self.task.spec, weights, rng.initial_stream(0, "m"))
        asked = self.asked(round_)
        if (
            served := self.at / "r" / "s" / "served.json"
        ).exists():  # another message for a round: test_replay_guard.py
            served.write_bytes(write_checksummed(read_checksummed(served.read_bytes()) | {"rounds": [], "of": 0}))
        taken = self.turns.run_round(lambda: self.exchange.broadcast(state, ctx), asked, self._count)
        self.notes = taken.notes
        return b"".join(taken.parts)

    def asked(self, round_: int = 0) -> ClientAssignment:
        """What the site is asked in a round."""
        order = {"round": round_, "is-new": round_ == 0, "site": "s", "run": "r", "method": self.name}
        order |= {"fields": json.dumps(hyperparameters_of(self.exchange.method))}
        node = {
            "site": "s",
            "state-dir": str(self.at),
            "data": str(self.at),
            "policy": str(self.at / "policy.toml"),
            "device": "cpu",
        }
        return ClientAssignment.from_instruction(order, self.flat, node)

    def _count(self, step) -> None:
        self.looked += 1

    @property
    def kept(self) -> BroadcastReference | None:
        return BroadcastReferenceStore.open(self.at, "r", "s").load()
