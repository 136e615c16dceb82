"""Each call of the fleet port by the site that may make it, and by one that may not, in Flower's own states."""

from __future__ import annotations

import importlib
import json
import types
from typing import Any

import pytest
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.run_pb2 import GetRunRequest
from sqlalchemy.exc import OperationalError

from fedveil.errors import ConfigError
from fedveil.guard import fleet_limits as limits
from fedveil.guard.fleet import port as fleet_port
from fedveil.guard.fleet import staging
from fedveil.guard.fleet.delivered import DeliveredInstructions
from fedveil.guard.flower import link_states, retries
from tests.fedveil.guard.fleet.conftest import RELEASE, Fleet, Refused
from tests.fedveil.guard.fleet.replies import make_reply, metadata

NORTH, SOUTH = 0, 1


def refused(call: Any, *given: Any, **more: Any) -> tuple[int, str]:
    with pytest.raises(Refused) as why:
        call(*given, **more)
    return why.value.status, why.value.reason


def objects_of(fleet: Fleet, site: int) -> list[str]:
    return sorted(fleet_port._object_ids(fleet.state.object_store.get_object_tree(fleet.superlink.sent[site])))


# Registration, activation, heartbeats


def test_no_site_registers_itself_or_leaves(fleet: Fleet) -> None:
    assert refused(fleet.call, "register_node", RegisterNodeFleetRequest(public_key=b"x"))[0] == 412
    assert refused(fleet.call, "unregister_node", UnregisterNodeFleetRequest(node_id=fleet.nodes[0]))[0] == 412


@pytest.mark.parametrize("seconds", [10.0, 30.0, 60.0])
def test_a_site_is_online_for_as_long_as_its_interval_says(fleet: Fleet, seconds: float) -> None:
    fleet.call("deactivate_node", DeactivateNodeRequest(node_id=fleet.nodes[0]))
    node = fleet.call("activate_node", ActivateNodeRequest(public_key=bytes([0]), heartbeat_interval=seconds)).node_id
    assert node == fleet.nodes[0]
    beat = SendNodeHeartbeatRequest(node=fleet.node(0), heartbeat_interval=seconds)
    assert fleet.call("send_node_heartbeat", beat).success


def test_a_member_whom_the_database_has_lost_waits_for_it(fleet: Fleet) -> None:
    """Flower's own answer ends its SuperNode: it would not come back once the keys are registered again."""
    activate = ActivateNodeRequest(public_key=b"lost", heartbeat_interval=30.0)
    status, said = refused(fleet.call, "activate_node", activate)
    assert status == 503
    answer = types.SimpleNamespace(details=lambda: json.dumps({"code": 1005, "public_details": said}))
    assert retries.own_words(answer) == said
    assert said.startswith("fedveil: this key is registered, but the server's database lacks it")
    assert fleet.lines() == []  # an honest site asks so
    again = fleet.state.create_node("us", "us", b"lost", 30.0)
    assert fleet.call("activate_node", activate).node_id == again


@pytest.mark.parametrize("seconds", [9.9, 60.1, 1800.0, 0.0, -1.0, float("nan"), float("inf")])
def test_no_site_looks_online_for_an_hour_after_its_death(fleet: Fleet, seconds: float) -> None:
    activate = ActivateNodeRequest(public_key=bytes([0]), heartbeat_interval=seconds)
    beat = SendNodeHeartbeatRequest(node=fleet.node(0), heartbeat_interval=seconds)
    said = (400, "heartbeat interval out of bounds")  # 2003: Flower's own, and never one by which the thread ends
    assert refused(fleet.call, "activate_node", activate) == said
    assert refused(fleet.call, "send_node_heartbeat", beat) == said
    assert {(line["site"], line["node"]) for line in fleet.lines()} == {("north", str(fleet.nodes[0]))}


def test_heartbeats_above_the_rate_are_answered_without_the_database(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    original = fleet.state.acknowledge_node_heartbeat

    def counted(*given: Any) -> bool:
        asked.append(1)
        return bool(original(*given))

    monkeypatch.setattr(fleet.state, "acknowledge_node_heartbeat", counted)
    beat = SendNodeHeartbeatRequest(node=fleet.node(0), heartbeat_interval=30.0)
    rate = limits.CALLS_A_MINUTE["send_node_heartbeat"]
    assert all(fleet.call("send_node_heartbeat", beat).success for _ in range(2 * rate))
    assert rate <= len(asked) <= rate + 2


def test_a_site_that_comes_and_goes_is_told_to_wait(fleet: Fleet) -> None:
    leave = DeactivateNodeRequest(node_id=fleet.nodes[0])
    enter = ActivateNodeRequest(public_key=bytes([0]), heartbeat_interval=30.0)
    for _ in range(limits.CALLS_A_MINUTE["activate_node"]):
        fleet.call("deactivate_node", leave)
        fleet.call("activate_node", enter)
    assert refused(fleet.call, "deactivate_node", leave) == (503, "too many calls")
    assert refused(fleet.call, "activate_node", enter) == (503, "too many calls")
    fleet.call("deactivate_node", DeactivateNodeRequest(node_id=fleet.nodes[1]))  # another site has its own rate


# Pulling


def test_a_site_pulls_its_instruction_and_no_other_s(fleet: Fleet) -> None:
    assert [fleet.pull(NORTH), fleet.pull(SOUTH)] == fleet.superlink.sent
    for site in (NORTH, SOUTH):
        for object_id in objects_of(fleet, site):
            assert fleet.pull_object(site, object_id)
    others = set(objects_of(fleet, SOUTH)) - set(objects_of(fleet, NORTH))
    assert others
    for object_id in (*others, "ab" * 32, "", "x"):
        assert refused(fleet.pull_object, NORTH, object_id) == (403, "object belongs to no instruction for this site")
    line = fleet.lines()[0]
    assert (line["site"], line["call"], line["count"]) == ("north", "pull_object", 1)


def test_an_instruction_of_another_run_is_none_of_this_one(fleet: Fleet) -> None:
    fleet.pull(NORTH)
    assert refused(fleet.pull_object, NORTH, objects_of(fleet, NORTH)[0], run=fleet.run + 1)[0] == 403


def test_a_site_may_pull_before_it_was_told_where_the_server_was_restarted_meanwhile(fleet: Fleet) -> None:
    """Then nothing is remembered; and an instruction that another look handed out again counts too."""
    fleet.pull(NORTH)
    fleet.port._delivered = DeliveredInstructions()
    assert fleet.pull_object(NORTH, objects_of(fleet, NORTH)[0])
    foreign = (set(objects_of(fleet, SOUTH)) - set(objects_of(fleet, NORTH))).pop()
    assert refused(fleet.pull_object, NORTH, foreign)[0] == 403


def test_what_a_site_may_not_pull_costs_the_database_little(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(fleet.port._rates, "_monotonic", lambda: 0.0)
    original = link_states.instructions_of_node
    monkeypatch.setattr(link_states, "instructions_of_node", lambda *given: (looks.append(1), original(*given))[1])
    for _ in range(300):
        refused(fleet.pull_object, NORTH, "ab" * 32)
    assert len(looks) == limits.CALLS_A_MINUTE["get_run"]


def test_an_object_is_pulled_four_times_a_delivery(fleet: Fleet) -> None:
    fleet.pull(NORTH)
    object_id = objects_of(fleet, NORTH)[0]
    for _ in range(limits.MAX_PULLS_OF_AN_OBJECT):
        assert fleet.pull_object(NORTH, object_id)
    assert refused(fleet.pull_object, NORTH, object_id) == (403, "object pulled too often")
    fleet.port._delivered.record_delivery(fleet.nodes[NORTH], fleet.run, fleet.superlink.sent[NORTH], ())
    assert fleet.pull_object(NORTH, object_id)


def test_an_object_that_is_not_there_yet_is_asked_for_as_often_as_need_be(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.pull(NORTH)
    monkeypatch.setattr(fleet.state, "get_object", lambda run, object_id: b"")
    for _ in range(20):
        assert fleet.pull_object(NORTH, objects_of(fleet, NORTH)[0]) == b""


def test_looks_above_the_rate_find_nothing(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(fleet.port._rates._per_minute, "pull_messages", 0)  # type: ignore[index]
        assert fleet.pull(NORTH) == ""  # though one waits
    fleet.port._rates._buckets.clear()
    assert fleet.pull(NORTH) == fleet.superlink.sent[NORTH]


def test_a_run_is_told_to_the_sites_that_it_asks(fleet: Fleet) -> None:
    request = GetRunRequest(node=fleet.node(NORTH), run_id=fleet.run)
    assert fleet.call("get_run", request).run.run_id == fleet.run
    fleet.state.delete_messages({fleet.superlink.sent[SOUTH]})
    other = GetRunRequest(node=fleet.node(SOUTH), run_id=fleet.run)
    assert refused(fleet.call, "get_run", other) == (403, "no instruction of this run for this site")
    fab = GetFabRequest(node=fleet.node(SOUTH), run_id=fleet.run, hash_str="0")
    assert refused(fleet.call, "get_fab", fab) == (403, "no instruction of this run for this site")
    strange = GetRunRequest(node=fleet.node(NORTH), run_id=fleet.run + 1)
    assert refused(fleet.call, "get_run", strange)[0] == 403
    calls = (refused(fleet.call, "get_run", other) for _ in range(5 * limits.CALLS_A_MINUTE["get_run"]))
    assert (503, "too many calls") in calls  # a busy machine makes fewer of them in a minute


def test_a_bundle_is_given_to_a_site_that_has_an_instruction(fleet: Fleet) -> None:
    """The state has none; what counts is that Flower was asked."""
    fleet.pull(NORTH)
    fab = GetFabRequest(node=fleet.node(NORTH), run_id=fleet.run, hash_str="0")
    if RELEASE.speaks == "gRPC":
        with pytest.raises(ValueError, match="no FAB"):  # Flower's servicer makes an answer of it
            fleet.call("get_fab", fab)
    else:
        assert refused(fleet.call, "get_fab", fab)[0] == 403
    assert fleet.lines() == []


def test_a_site_that_asks_for_another_bundle_than_its_run_s_has_a_line_in_the_log(fleet: Fleet) -> None:
    """Flower refuses it too, of which the control log would say nothing; one of 1,000 sequences did nothing else."""
    fleet.pull(NORTH)
    fab = GetFabRequest(node=fleet.node(NORTH), run_id=fleet.run, hash_str="ab" * 32)
    assert refused(fleet.call, "get_fab", fab) == (403, "not the bundle of this run")
    (line,) = fleet.lines()
    assert (line["site"], line["call"], line["value"]) == ("north", "get_fab", "ab" * 32)


def test_a_site_confirms_its_own_instruction_and_no_other_s(fleet: Fleet) -> None:
    """Flower deletes whatever root is named, also another site's, and another's reply."""
    root = fleet.pull(NORTH)
    for foreign in (fleet.superlink.sent[SOUTH], "ab" * 32, "", objects_of(fleet, NORTH)[0]):
        if foreign != root:
            assert refused(fleet.confirm, NORTH, foreign) == (403, "no open instruction for this site")
    assert refused(fleet.confirm, NORTH, root, run=fleet.run + 1)[0] == 403
    assert fleet.superlink.sent[SOUTH] in fleet.state.object_store
    assert root in fleet.state.object_store
    fleet.confirm(NORTH, root)
    assert root not in fleet.state.object_store


def test_a_second_confirmation_does_not_reach_flower(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    root = fleet.pull(NORTH)
    fleet.confirm(NORTH, root)
    fleet.state.delete_messages({root})  # the ServerApp has taken the reply meanwhile
    monkeypatch.setattr(fleet.state.object_store, "delete", None)
    fleet.confirm(NORTH, root)


# Replies


def test_a_reply_reaches_the_server_app(fleet: Fleet) -> None:
    fleet.pull(NORTH)
    fleet.send(NORTH, fleet.reply(NORTH))
    assert fleet.superlink.found(NORTH) == [NORTH]


def test_no_site_answers_for_another(fleet: Fleet) -> None:
    """The attack that decided a whole model in everybody's name."""
    fleet.pull(NORTH)
    to_south = fleet.reply(NORTH, instruction=SOUTH)
    assert refused(fleet.announce, NORTH, to_south.request) == (403, "no open instruction for this site")
    as_south = fleet.reply(SOUTH)
    assert refused(fleet.announce, NORTH, as_south.request) == (403, "wrong source or destination")
    assert fleet.superlink.found(NORTH, SOUTH) == []


@pytest.mark.parametrize("destination", ["the ServerApp", "the other site"])
def test_no_site_gives_orders(fleet: Fleet, destination: str) -> None:
    reply = fleet.reply(NORTH)
    about = reply.request.messages_list[0].metadata
    about.reply_to_message_id, about.src_node_id = "", SUPERLINK_NODE_ID
    about.dst_node_id = SUPERLINK_NODE_ID if destination == "the ServerApp" else fleet.nodes[SOUTH]
    before = fleet.state.get_message_ids_from_run_id(fleet.run)
    assert refused(fleet.announce, NORTH, reply.request)[0] == 403
    assert fleet.state.get_message_ids_from_run_id(fleet.run) == before


def test_forty_thousand_objects_are_refused_before_the_database_sees_them(fleet: Fleet) -> None:
    reply, before = fleet.reply(NORTH), len(fleet.state.object_store)
    reply.request.message_object_trees[0].children[0].children.extend(
        ObjectTree(object_id=f"{number:064x}") for number in range(40_000)
    )
    assert refused(fleet.announce, NORTH, reply.request) == (403, "tree too large")
    assert len(fleet.state.object_store) == before


def test_an_instruction_has_one_reply(fleet: Fleet) -> None:
    first, second = fleet.reply(NORTH), fleet.reply(NORTH, ago=3.0)
    fleet.send(NORTH, first)
    assert refused(fleet.announce, NORTH, second.request) == (403, "instruction already has a reply")
    fleet.announce(NORTH, first.request)  # whose answer was lost


def test_announcements_above_the_rate_wait(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fleet.port._rates._per_minute, "announced bytes", 2000)  # type: ignore[index]
    reply = fleet.reply(NORTH)
    assert 700 < reply.request.ByteSize() < 1500
    fleet.announce(NORTH, reply.request)
    fleet.announce(NORTH, reply.request)
    assert refused(fleet.announce, NORTH, reply.request) == (503, "too many calls")


# What goes wrong on the server's side


@pytest.mark.parametrize(
    "error", [OperationalError("x", {}, Exception("database is locked")), OSError("no space"), KeyError("x")]
)
def test_no_error_of_the_server_ends_a_site_s_loop(
    fleet: Fleet, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_given: Any, **_more: Any) -> Any:
        raise error

    monkeypatch.setattr(fleet.state, "get_message_ins", fails)
    monkeypatch.setattr(fleet.state, "acknowledge_node_heartbeat", fails)
    assert refused(fleet.pull, NORTH)[0] == 503
    beat = SendNodeHeartbeatRequest(node=fleet.node(0), heartbeat_interval=30.0)
    assert refused(fleet.call, "send_node_heartbeat", beat)[0] == 503


@pytest.mark.long
def test_a_push_that_fails_for_a_reason_of_ours_is_not_repeated_for_ever(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "read_announcement", lambda *given: 1 / 0)
    assert refused(fleet.announce, NORTH, fleet.reply(NORTH).request) == (403, "server error")


def test_a_site_whose_name_cannot_be_read_is_refused_all_the_same(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(**_given: Any) -> Any:
        raise OperationalError("x", {}, Exception("database is locked"))

    monkeypatch.setattr(fleet.state, "get_node_info", fails)
    assert refused(fleet.pull_object, NORTH, "ab" * 32)[0] == 403
    assert fleet.lines()[0]["site"] == ""


# The seam


def test_every_call_has_a_check_of_its_own() -> None:
    assert len(set(fleet_port.FLEET_CALLS)) == 12
    for call in fleet_port.FLEET_CALLS:
        assert callable(getattr(fleet_port.FleetPort, f"_{call}"))


def _gone(module: Any) -> None:
    del module.push_object


def _renamed(module: Any) -> None:
    module.push_object = lambda message, state: None


def _more(module: Any) -> None:
    module.push_object = lambda request, state, context: None


def _without_store(module: Any) -> None:
    module.pull_messages = lambda request, state: None


@pytest.mark.parametrize("change", [_gone, _renamed, _more, _without_store])
def test_a_flower_that_moved_a_function_does_not_run_unguarded(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module(fleet_port.FLEET_MODULES[RELEASE.speaks])
    module = types.ModuleType("moved")
    module.__dict__.update({call: getattr(real, call) for call in fleet_port.FLEET_CALLS})
    before = dict(module.__dict__)
    change(module)
    monkeypatch.setattr(fleet_port.importlib, "import_module", lambda name: module)
    with pytest.raises(ConfigError, match=r"moved\.(push_object|pull_messages): it must take the arguments .*request"):
        fleet_port.install_fleet_port(RELEASE, None)  # type: ignore[arg-type]
    assert all(
        getattr(module, call, None) in (before[call], module.__dict__.get(call)) for call in fleet_port.FLEET_CALLS
    )
    assert module.register_node is before["register_node"]


def test_a_flower_without_the_module_does_not_run_unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fleet_port.FLEET_MODULES, RELEASE.speaks, "flwr.nowhere")
    with pytest.raises(ConfigError, match=r"this Flower has no module flwr\.nowhere"):
        fleet_port.install_fleet_port(RELEASE, None)  # type: ignore[arg-type]


def test_a_forged_metadata_helper_is_honest_otherwise() -> None:
    """The tests above change one thing each."""
    assert make_reply(about=metadata()).announcement()
