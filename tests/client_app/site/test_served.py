"""A server that asks for rounds as it likes, and a site that counts them."""

from __future__ import annotations

import json

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedveil import strategies
from fedveil.client_app import app as client
from fedveil.client_app.site import policy as policies
from fedveil.client_app.site.served import Served
from fedveil.client_app.turn import Turns
from fedveil.contract.address import Address
from fedveil.contract.method import RoundContext, State, fields_of
from fedveil.errors import PolicyError, StateError, TaskError
from fedveil.federation.exchange import Exchange
from fedveil.rng import initial
from fedveil.wire import header, slices
from fedveil.wire.envelope import describe
from tests.server_app.grid import LocalGrid, use_toy_task

METHOD = strategies.create("fedper", "layers = 1")


@pytest.fixture
def ask(monkeypatch, tmp_path):
    """The reply of a site of FedPer to any round, under a policy: variant of the upload, or the reason."""
    task = use_toy_task(monkeypatch)
    exchange = Exchange(METHOD, "fedper", task.spec)
    server = METHOD.init(task.spec, task.initial(initial(0, "w")), initial(0, "m"))
    grid = LocalGrid(
        client.app, ["north"], tmp_path / "state", {"method.name": "fedper", "method.fields": "layers = 1"}
    )

    def go(round_: int, policy: str = "", shift: float = 0.0, last: str = "") -> str:
        (tmp_path / "policy.toml").write_text(f'{policy}\nmethods = ["fedper"]\n[permits]\n"method.fields.layers" = 1')
        grid.node_config = {"north": {"policy": str(tmp_path / "policy.toml")}} if policy else {}
        moved = State({name: tensor + shift for name, tensor in server.tensors.items()}, server.scalars)
        down = exchange.broadcast(moved, RoundContext(round_, "north", True, bytes(32), address=Address("r")))
        record = ArrayRecord({slices.name(0): Array("uint8", (len(down),), slices.STYPE, down)})
        order = {"round": round_, "is-new": True, "site": "north", "run": "r", "method": "fedper"}
        order |= {"fields": json.dumps(fields_of(METHOD)), "log": "", "last": last}
        content = RecordDict({"fedveil": record, "order": ConfigRecord(order)})
        reply = grid.replies[grid._push(Message(content, 1000, "train"))]
        if reply.has_error():
            return reply.error.reason
        found = reply.content.array_records["fedveil"]
        upload = b"".join(found[name].data for name in slices.in_order(list(found)))
        variant = describe(upload)["variant"]
        turns.append(header.of_slices([upload])["turn"])
        uploads.append((variant, str(header.of_slices([upload])["fields"])))
        return variant

    go.uploads = uploads = []
    go.turns = turns = []
    return go


def test_a_site_serves_the_last_two_rounds_no_older_one_and_none_beyond_the_run(ask):
    assert ask(1) == "top"
    for round_ in (0, -5, -1, 5, 10**9):
        assert ask(round_).startswith("PolicyError: round: expected")
    assert [ask(3), ask(1), ask(4)] == ["top"] * 3
    for round_ in (1, 2):
        assert ask(round_).startswith("PolicyError: round: expected 3 or a later one")


def test_a_round_is_repeated_as_often_as_the_site_permits(ask):
    assert [ask(0)[:11] for _ in range(5)] == ["all", "all", "all", "PolicyError", "PolicyError"]
    assert "at most 3 times" in ask(0)
    assert ask(0, "max-repeats = 4") == "all"
    assert ask(0, "max-repeats = 4").startswith("PolicyError: round: this site serves one at most 4 times")
    assert ask(1, "max-repeats = 1") == "top"
    assert ask(1, "max-repeats = 1").startswith("PolicyError")


def test_a_private_layer_leaves_a_site_once_whatever_round_the_server_names(ask):
    """A repeated round 0 gives the same fields. After later rounds the lower layers have learned what stays here."""
    assert [ask(round_) for round_ in (0, 1, 0)] == ["all", "top", "all"]
    assert len({fields for variant, fields in ask.uploads if variant == "all"}) == 1
    another = ask(0, shift=1.0)
    assert another.startswith("PolicyError: round: expected the message that this site was sent for round 0 before")
    assert [ask(2)] + [ask(round_)[:11] for round_ in (-1, 0)] == ["top", "PolicyError", "PolicyError"]


def test_a_round_is_repeated_from_the_state_that_it_began_with(ask):
    """Else a server gets one upload from each of the states that a site keeps, from one message."""
    assert ask(0) == "all"
    assert ask(1, last=ask.turns[0]) == "top"
    assert (
        ask(1) == "PolicyError: round: expected the message that this site was sent for round 1 before, and the "
        "same last turn, found another; start a new run"
    )
    assert ask(1, last=ask.turns[0]) == "top"


def test_a_damaged_count_serves_nobody(ask, tmp_path):
    ask(0)
    file = tmp_path / "state" / "r" / "north" / "served.json"
    file.write_text("{")
    assert ask(1) == "StateError at the site; its log has the text"
    with pytest.raises(StateError, match="restore it"):
        Served(file.parent).check(1, 5, 3)
    assert file.read_text() == "{"


def test_a_turn_that_ended_before_it_took_in_the_message_is_no_serving(ask, monkeypatch):
    """Whoever mends a column is served; a turn that began with the message counts, whatever ended it."""
    with monkeypatch.context() as broken:
        broken.setattr(Turns, "_prepared", refuses)
        assert [ask(0)[:9] for _ in range(5)] == ["TaskError"] * 5
    assert ask(0) == "all"
    with monkeypatch.context() as broken:
        broken.setattr(policies, "check_rows", refuses)
        assert [ask(1)[:9] for _ in range(3)] == ["TaskError"] * 3
    assert ask(1).startswith("PolicyError: round: this site serves one at most 3 times")


def test_a_serving_whose_message_was_taken_in_is_not_given_back(tmp_path):
    served = Served.of(tmp_path, "r", "s")
    served.give_back(0)
    served.count(0, 2, 1)
    served.give_back(0)
    served.count(0, 2, 1)
    served.require_same(0, "m")
    served.give_back(0)
    with pytest.raises(PolicyError):
        served.count(0, 2, 1)


def refuses(*_: object) -> None:
    raise TaskError("no such column")


def test_a_serving_is_counted_before_the_turn(tmp_path):
    served = Served.of(tmp_path, "r", "s")
    served.check(0, 2, 1)
    served.check(0, 2, 1)
    served.count(0, 2, 1)
    with pytest.raises(PolicyError):
        served.count(0, 2, 1)
    Served.of(tmp_path, "another", "s").count(0, 2, 1)
    Served.of(tmp_path, "r", "t").count(0, 2, 1)
