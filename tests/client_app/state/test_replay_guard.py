"""A server that asks for rounds as it likes, and a site that counts them."""

from __future__ import annotations

import json

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedveil import strategies
from fedveil.client_app import app as client
from fedveil.client_app.client_session import ClientSession
from fedveil.client_app.policy import decisions
from fedveil.client_app.state.replay_guard import ReplayGuard
from fedveil.contract.message_address import MessageAddress
from fedveil.contract.method import FederatedState, RoundContext, hyperparameters_of
from fedveil.errors import PolicyError, StateError, TaskError
from fedveil.federation.exchange import MessageExchange
from fedveil.rng import initial_stream
from fedveil.wire import chunking, header
from fedveil.wire.envelope import describe_message
from tests.server_app.grid import LocalGrid, use_toy_task

METHOD = strategies.create_method("fedper", "layers = 1")


@pytest.fixture
def ask(monkeypatch, tmp_path):
    """The reply of a site of FedPer to any round, under a policy: variant of the upload, or the reason."""
    task = use_toy_task(monkeypatch)
    exchange = MessageExchange(METHOD, "fedper", task.spec)
    server = METHOD.init(task.spec, task.initial(initial_stream(0, "w")), initial_stream(0, "m"))
    grid = LocalGrid(
        client.app, ["north"], tmp_path / "state", {"method.name": "fedper", "method.params": "layers = 1"}
    )

    def go(round_: int, policy: str = "", shift: float = 0.0, last: str = "") -> str:
        bounds = f"{policy}\nmax-broadcast-drift = 100"  # not judged here
        permits = 'methods = ["fedper"]\n[permits]\n"method.params.layers" = 1'
        (tmp_path / "policy.toml").write_text(f"{bounds}\n{permits}")
        grid.node_config = {"north": {"policy": str(tmp_path / "policy.toml")}} if policy else {}
        moved = FederatedState({name: tensor + shift for name, tensor in server.tensors.items()}, server.scalars)
        down = exchange.broadcast(moved, RoundContext(round_, "north", True, bytes(32), address=MessageAddress("r")))
        record = ArrayRecord({chunking.slice_key(0): Array("uint8", (len(down),), chunking.STYPE, down)})
        order = {"round": round_, "is-new": True, "site": "north", "run": "r", "method": "fedper"}
        order |= {"fields": json.dumps(hyperparameters_of(METHOD)), "log": "", "last": last}
        content = RecordDict({"fedveil": record, "order": ConfigRecord(order)})
        reply = grid.replies[grid._push(Message(content, 1000, "train"))]
        if reply.has_error():
            return reply.error.reason
        array_record = reply.content.array_records["fedveil"]
        upload = b"".join(array_record[name].data for name in chunking.order_slices(list(array_record)))
        variant = describe_message(upload)["variant"]
        turns.append(header.header_of_slices([upload])["turn"])
        uploads.append((variant, str(header.header_of_slices([upload])["fields"])))
        return variant

    go.uploads = uploads = []
    go.turns = turns = []
    return go


def test_a_site_serves_the_last_two_rounds_no_older_one_and_none_beyond_the_run(ask):
    assert ask(1) == "top"
    for round_ in (0, -5, -1, 5, 10**9):
        assert ask(round_).startswith("PolicyError: round: ")
    assert [ask(3), ask(1), ask(4)] == ["top"] * 3
    for round_ in (1, 2):
        assert ask(round_).startswith("PolicyError: round: this site has already served round")


def test_a_round_is_repeated_as_often_as_the_site_permits(ask):
    assert [ask(0)[:11] for _ in range(5)] == ["all", "all", "all", "PolicyError", "PolicyError"]
    assert "as often as it permits (3 times)" in ask(0)
    assert ask(0, "max-retries = 3") == "all"
    assert ask(0, "max-retries = 3").startswith(
        "PolicyError: round: this site has served round 0 as often as it permits (4 times)"
    )
    assert ask(1, "max-retries = 0") == "top"
    assert ask(1, "max-retries = 0").startswith("PolicyError")


def test_a_private_layer_leaves_a_site_once_whatever_round_the_server_names(ask):
    """A repeated round 0 gives the same fields. After later rounds the lower layers have learned what stays here."""
    assert [ask(round_) for round_ in (0, 1, 0)] == ["all", "top", "all"]
    assert len({fields for variant, fields in ask.uploads if variant == "all"}) == 1
    another = ask(0, shift=1.0)
    assert another.startswith(
        "PolicyError: round: round 0 was already served here with a different message or previous client round"
    )
    assert [ask(2)] + [ask(round_)[:11] for round_ in (-1, 0)] == ["top", "PolicyError", "PolicyError"]


def test_a_round_is_repeated_from_the_state_that_it_began_with(ask):
    """Else a server gets one upload from each of the states that a site keeps, from one message."""
    assert ask(0) == "all"
    assert ask(1, last=ask.turns[0]) == "top"
    assert (
        ask(1)
        == "PolicyError: round: round 1 was already served here with a different message or previous client round; "
        "start a new run"
    )
    assert ask(1, last=ask.turns[0]) == "top"


def test_a_damaged_count_serves_nobody(ask, tmp_path):
    ask(0)
    file = tmp_path / "state" / "r" / "north" / "served.json"
    file.write_text("{")
    assert ask(1) == "StateError at the site; see the site's log"
    with pytest.raises(StateError, match="restore it"):
        ReplayGuard(file.parent).check(1, 5, 3)
    assert file.read_text() == "{"


def test_a_turn_that_ended_before_it_took_in_the_message_is_no_serving(ask, monkeypatch):
    """Whoever mends a column is served; a turn that began with the message counts, whatever ended it."""
    with monkeypatch.context() as broken:
        broken.setattr(ClientSession, "_prepare", refuses)
        assert [ask(0)[:9] for _ in range(5)] == ["TaskError"] * 5
    assert ask(0) == "all"
    with monkeypatch.context() as broken:
        broken.setattr(decisions, "check_examples", refuses)
        assert [ask(1)[:9] for _ in range(3)] == ["TaskError"] * 3
    assert ask(1).startswith("PolicyError: round: this site has served round 1 as often as it permits (3 times)")


def test_a_serving_whose_message_was_taken_in_is_not_given_back(tmp_path):
    served = ReplayGuard.open(tmp_path, "r", "s")
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
    served = ReplayGuard.open(tmp_path, "r", "s")
    served.check(0, 2, 1)
    served.check(0, 2, 1)
    served.count(0, 2, 1)
    with pytest.raises(PolicyError):
        served.count(0, 2, 1)
    ReplayGuard.open(tmp_path, "another", "s").count(0, 2, 1)
    ReplayGuard.open(tmp_path, "r", "t").count(0, 2, 1)


def test_a_lost_file_beside_the_state_of_a_served_round_is_not_taken_for_a_new_run(ask, tmp_path):
    assert ask(0) == "all"
    (folder,) = {file.parent for file in (tmp_path / "state").rglob("served.json")}
    (folder / "served.json").unlink()
    with pytest.raises(
        StateError, match="is missing, although there is private state for the run; restore it from a backup"
    ):
        ReplayGuard(folder).check(0, 5, 3)
    assert ask(0).startswith("StateError at the site")
    for file in (*folder.glob("turn-*.safetensors"), *folder.glob("received.json")):
        file.unlink()
    assert ReplayGuard(folder).check(0, 5, 3) == 0
