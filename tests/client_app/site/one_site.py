"""A server of one site that may send anything, and the site's whole turn."""

from __future__ import annotations

import json

from fedveil import rng, strategies, tasks
from fedveil.client_app import turn
from fedveil.client_app.site import permits
from fedveil.client_app.site.assignment import Assignment
from fedveil.client_app.site.received import Received, Reference
from fedveil.config import parse
from fedveil.contract.address import Address
from fedveil.contract.method import RoundContext, fields_of
from fedveil.federation.exchange import Exchange


class Server:
    """A server, and the state folder of its site."""

    def __init__(self, at, text: str = "", rows=None, **config):
        flat = {"method.name": "fedavg", "task.max-tokens": 32, "train.batch-size": 4, "train.max-steps": 1, **config}
        parsed = parse(flat)
        self.at, self.flat, self.name = at, flat, parsed.method.name
        (at / "policy.toml").write_text(f"{text}\n{permits.needed(parsed)}")
        rows = rows or [{"mr": f"name[Aromi {i}]", "ref": f"Aromi {i} is a pub."} for i in range(8)]
        (at / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        method = strategies.create(self.name, parsed.method.fields)
        self.task = tasks.load(parsed, method.adapter, "cpu")
        self.exchange = Exchange(method, self.name, self.task.spec)
        self.initial = self.task.initial(rng.initial(parsed.run.seed, "weights"))
        self.turns = turn.Turns()
        self.looked = 0

    def send(self, weights, round_: int = 0) -> bytes:
        ctx = RoundContext(round_, "s", round_ == 0, bytes(32), address=Address("r"))
        method = self.exchange.method
        state = method.init(self.task.spec, weights, rng.initial(0, "m"))
        asked = self.asked(round_)
        (self.at / "r" / "s" / "served.json").unlink(missing_ok=True)  # another message for a round: test_served.py
        taken = self.turns.take(lambda: self.exchange.broadcast(state, ctx), asked, self._count)
        return b"".join(taken.parts)

    def asked(self, round_: int = 0) -> Assignment:
        """What the site is asked in a round."""
        order = {"round": round_, "is-new": round_ == 0, "site": "s", "run": "r", "method": self.name}
        order |= {"fields": json.dumps(fields_of(self.exchange.method))}
        node = {
            "state-dir": str(self.at),
            "data": str(self.at),
            "policy": str(self.at / "policy.toml"),
            "device": "cpu",
        }
        return Assignment.of(order, self.flat, node)

    def _count(self, step) -> None:
        self.looked += 1

    @property
    def kept(self) -> Reference | None:
        return Received.of(self.at, "r", "s").load()
