"""Replies on their way through the staging: honest ones in every order, hostile ones, races, and no room."""

from __future__ import annotations

import logging
import random
import shutil
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Error
from flwr.common.constant import SubStatus
from flwr.supercore.constant import OBJECT_PUSH_SESSION_TTL_SECONDS
from flwr.supercore.error import FlowerError
from flwr.supercore.logger import LOGGER_NAME
from sqlalchemy.exc import OperationalError

from fedveil.guard import fleet_limits as limits
from fedveil.guard.flower import keepalive, link_states
from fedveil.guard.minute_log import RefusalLineFilter
from tests.fedveil.guard.fleet.conftest import Fleet, Refused
from tests.fedveil.guard.fleet.replies import object_bytes, object_id, upload
from tests.fedveil.guard.fleet.test_port import NORTH, SOUTH, refused


def is_whole(fleet: Fleet, root: str) -> bool:
    return not link_states.is_object_missing(fleet.state.object_store, root)


def half(fleet: Fleet, site: int = NORTH, **more: Any) -> tuple[Any, Any, list[str]]:
    """A reply of which all objects but one were sent: the reply, the answer, and the ids that were sent."""
    reply = fleet.reply(site, **more)
    answer = fleet.announce(site, reply.request)
    sent = list(answer.objects_to_push)[:-1]
    for id_ in sent:
        assert fleet.push(site, answer.session_id, id_, reply.objects[id_])
    return reply, answer, sent


# Honest sites


@pytest.mark.parametrize(
    "content",
    [None, upload(b"\0" * 900, b"\0" * 900), upload(*(bytes([i]) * 50 for i in range(20))), Error(2, "it failed")],
    ids=["two slices", "equal slices", "twenty", "an error"],
)
def test_a_whole_reply_reaches_the_server_app_and_leaves_nothing(fleet: Fleet, content: Any) -> None:
    reply = fleet.reply(NORTH, content=content)
    fleet.send(NORTH, reply)
    assert is_whole(fleet, reply.root)
    assert fleet.superlink.found(NORTH) == [-1 if isinstance(content, Error) else NORTH]
    assert fleet.files() == []
    assert fleet.lines() == []


def test_flower_learns_of_nothing_before_all_is_there(fleet: Fleet) -> None:
    """An id that was announced and never sent made the server's next push fail."""
    before = len(fleet.state.object_store)
    reply, answer, _ = half(fleet)
    assert len(fleet.state.object_store) == before
    assert fleet.superlink.found(NORTH) == []
    row = link_states.find_instruction(fleet.state, fleet.superlink.sent[NORTH])
    assert row is not None
    assert row.reply_id == ""
    assert set(answer.objects_to_push) == set(reply.objects)


def test_what_another_site_has_sent_is_asked_for_all_the_same(fleet: Fleet) -> None:
    """Else a site learns whether these very bytes are stored."""
    same = upload(b"the same bytes")
    fleet.send(NORTH, fleet.reply(NORTH, content=same))
    reply = fleet.reply(SOUTH, content=same)
    answer = fleet.announce(SOUTH, reply.request)
    assert set(answer.objects_to_push) == set(reply.objects)
    fleet.send(SOUTH, reply)
    assert fleet.superlink.found(NORTH, SOUTH) == [NORTH, SOUTH]


@pytest.mark.parametrize("seed", range(4))
def test_announcements_and_objects_twice_in_any_order(fleet: Fleet, seed: int) -> None:
    rng, reply = random.Random(seed), fleet.reply(NORTH)
    answer = fleet.announce(NORTH, reply.request)
    again = list(answer.objects_to_push) * 2
    rng.shuffle(again)
    for id_ in again:
        assert fleet.push(NORTH, answer.session_id, id_, reply.objects[id_])
        if rng.random() < 0.3:
            repeated = fleet.announce(NORTH, reply.request)
            assert repeated.session_id == answer.session_id
            assert id_ not in repeated.objects_to_push
    fleet.settle()
    for _ in range(2):  # after the end
        repeated = fleet.announce(NORTH, reply.request)
        assert list(repeated.objects_to_push) == []
        for id_ in again:
            assert fleet.push(NORTH, answer.session_id, id_, reply.objects[id_])
    assert fleet.superlink.found(NORTH) == [NORTH]
    fleet.announce(NORTH, reply.request)  # the ServerApp has taken it, and the instruction is gone
    assert fleet.lines() == []


def test_an_instruction_handed_out_again_before_it_was_confirmed_is_answered(fleet: Fleet) -> None:
    root = fleet.pull(NORTH)
    fleet.send(NORTH, fleet.reply(NORTH))
    fleet.confirm(NORTH, root)
    fleet.confirm(NORTH, root)
    assert fleet.superlink.found(NORTH) == [NORTH]


def test_two_instructions_of_one_site_are_answered_side_by_side(fleet: Fleet) -> None:
    """The setup of a round of secure aggregation, and the next question."""
    second = fleet.superlink.send(NORTH)
    replies = [fleet.reply(NORTH), fleet.reply(NORTH, instruction=second, content=upload(b"second"))]
    answers = [fleet.announce(NORTH, reply.request) for reply in replies]
    for reply, answer in zip(replies, answers, strict=True):
        for id_ in answer.objects_to_push:
            assert fleet.push(NORTH, answer.session_id, id_, reply.objects[id_])
    fleet.settle()
    assert fleet.superlink.found(NORTH, second) == [NORTH, second]


def test_a_client_that_died_in_the_middle_is_replaced_by_its_error(fleet: Fleet) -> None:
    half(fleet)
    fleet.send(NORTH, fleet.reply(NORTH, content=Error(8, "the client has died")))
    assert fleet.superlink.found(NORTH) == [-1]
    assert fleet.files() == []


@pytest.mark.long
def test_a_site_that_was_killed_three_times_is_not_locked_out(fleet: Fleet) -> None:
    for number in range(3):
        half(fleet, instruction=fleet.superlink.send(NORTH), content=upload(bytes([number]) * 9))
    assert len(fleet.staged(NORTH)) == limits.MAX_OPEN_REPLIES
    fleet.send(NORTH, fleet.reply(NORTH))
    assert fleet.superlink.found(NORTH) == [NORTH]
    half(fleet, SOUTH)
    assert len(fleet.staged(SOUTH)) == 1


# Hostile sites


def test_a_session_is_its_site_s_alone(fleet: Fleet) -> None:
    reply, answer, sent = half(fleet)
    last = next(id_ for id_ in reply.objects if id_ not in sent)
    said = (403, "unknown session")
    for session in (answer.session_id, "", "x", "../" + answer.session_id):
        assert refused(fleet.push, SOUTH, session, last, reply.objects[last]) == said
    assert refused(fleet.push, NORTH, answer.session_id, last, reply.objects[last], run=fleet.run + 1) == said
    assert refused(fleet.push, NORTH, "", last, reply.objects[last]) == said  # Flower takes any session then
    assert fleet.superlink.found(NORTH) == []


def test_an_object_that_was_not_announced_is_refused_before_and_after_the_end(fleet: Fleet) -> None:
    reply, answer, sent = half(fleet)
    strange = object_bytes("ArrayChunk", [], b"strange")
    said = (403, "object not announced")
    assert refused(fleet.push, NORTH, answer.session_id, object_id(strange), strange) == said
    last = next(id_ for id_ in reply.objects if id_ not in sent)
    assert refused(fleet.push, NORTH, answer.session_id, last, strange) == (403, "object does not match its hash")
    assert fleet.push(NORTH, answer.session_id, last, reply.objects[last])
    fleet.settle()
    assert refused(fleet.push, NORTH, answer.session_id, object_id(strange), strange) == said


def test_a_reply_that_is_whole_is_not_replaced(fleet: Fleet) -> None:
    fleet.send(NORTH, fleet.reply(NORTH))
    other = fleet.reply(NORTH, content=upload(b"another"))
    assert refused(fleet.announce, NORTH, other.request) == (403, "instruction already has a reply")
    assert fleet.superlink.found(NORTH) == [NORTH]


def test_the_bytes_for_one_instruction_are_bounded_over_all_tries(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "DEFAULT_REPLY_BYTES", 10_000)
    monkeypatch.setattr(limits, "EXTRA_REPLY_BYTES", 0)
    sent, reasons = 0, list[str]()
    for number in range(20):
        reply = fleet.reply(NORTH, content=upload(bytes([number]) * 9000))
        answer = fleet.announce(NORTH, reply.request)
        chunk = reply.of_type("ArrayChunk")
        try:
            fleet.push(NORTH, answer.session_id, chunk, reply.objects[chunk])
            sent += len(reply.objects[chunk])
        except Refused as why:
            reasons.append(why.reason)
    assert set(reasons) == {"too many bytes for one instruction"}
    assert 7 * 10_000 < sent <= 8 * 10_000


def test_the_sum_of_a_reply_is_bounded(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DEFAULT_REPLY_BYTES", 1000)
    monkeypatch.setattr(limits, "EXTRA_REPLY_BYTES", 0)
    reply = fleet.reply(NORTH, content=upload(b"x" * 990))
    answer = fleet.announce(NORTH, reply.request)
    reasons = []
    for id_ in answer.objects_to_push:
        try:
            fleet.push(NORTH, answer.session_id, id_, reply.objects[id_])
        except Refused as why:
            reasons.append(why.reason)
    assert set(reasons) == {"reply too large"}
    assert fleet.superlink.found(NORTH) == []


# No room


@pytest.mark.parametrize("of_disk", [False, True])
def test_a_reply_without_room_waits(fleet: Fleet, of_disk: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = fleet.reply(NORTH)
    if not of_disk:
        half(fleet, NORTH, instruction=fleet.superlink.send(NORTH), content=upload(b"another"))
    before = fleet.files()
    with monkeypatch.context() as patch:
        if of_disk:
            patch.setattr(fleet.port._staging._spool, "free_bytes", lambda: 1 << 30)
        else:
            patch.setattr(limits, "MAX_SPOOL_BYTES", 1 << 30)
        assert refused(fleet.announce, NORTH, reply.request) == (503, "no room for the reply")
        assert fleet.files() == before
    fleet.send(NORTH, reply)
    assert fleet.superlink.found(NORTH) == [NORTH]


def test_room_is_promised_to_whole_replies(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later it would leave all sites with halves."""
    monkeypatch.setattr(limits, "MAX_SPOOL_BYTES", limits.DEFAULT_REPLY_BYTES + 2 * limits.EXTRA_REPLY_BYTES)
    for site in (NORTH, SOUTH):
        half(fleet, site, instruction=fleet.superlink.send(site), content=upload(bytes([site])))
    half(fleet, NORTH)  # north's second reply takes the space that all second ones share
    reply = fleet.reply(SOUTH)
    assert refused(fleet.announce, SOUTH, reply.request)[0] == 503
    fleet.send(NORTH, fleet.reply(NORTH, content=upload(b"whole")))
    fleet.send(SOUTH, reply)
    assert fleet.superlink.found(NORTH, SOUTH) == [NORTH, SOUTH]


def test_several_registrations_of_one_member_leave_room_for_another_sites_reply(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them held a reply of 1 GiB open until the deadline, so eight of them shut all others out."""
    monkeypatch.setattr(limits, "MAX_SPOOL_BYTES", limits.DEFAULT_REPLY_BYTES)
    half(fleet, SOUTH)
    second = fleet.reply(SOUTH, instruction=fleet.superlink.send(SOUTH), content=upload(b"second"))
    assert refused(fleet.announce, SOUTH, second.request) == (503, "no room for the reply")
    fleet.send(NORTH, fleet.reply(NORTH))
    assert fleet.superlink.found(NORTH) == [NORTH]


# Replies that the server has ended


def end_by_hand_over(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Flower takes nothing of the reply, as after the end of its run."""

    def fails(*_given: Any) -> None:
        raise FlowerError(2007, "the run has ended")

    monkeypatch.setattr(fleet.port._hand_over, "_flower", SimpleNamespace(push_messages=fails))
    reply, answer, sent = half(fleet)
    last = next(id_ for id_ in reply.objects if id_ not in sent)
    assert fleet.push(NORTH, answer.session_id, last, reply.objects[last])
    fleet.settle()
    return reply, answer


def end_by_sweep(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """It was idle for too long."""
    reply, answer, _ = half(fleet)
    monkeypatch.setattr(limits, "IDLE_SECONDS", -1.0)
    fleet.port._staging.sweep(fleet.state, lambda _node: True)
    return reply, answer


def end_at_start(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The next process finds its instruction over."""
    reply, answer, _ = half(fleet)
    staging = fleet.port._staging
    staging._open.clear()
    monkeypatch.setattr(staging, "_clock", lambda: time.time() + 1e6)
    staging.recover(fleet.state)
    return reply, answer


@pytest.mark.parametrize("end", [end_by_hand_over, end_by_sweep, end_at_start])
def test_a_site_that_goes_on_with_a_reply_which_the_server_has_ended_is_no_rogue(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, end: Any
) -> None:
    """A SuperNode pushes the other objects of a reply too before it gives the reply up."""
    reply, answer = end(fleet, monkeypatch)
    for _ in range(10):
        for id_, content in reply.objects.items():
            said = refused(fleet.push, NORTH, answer.session_id, id_, content)
            assert said == (403, "reply was dropped: late, idle or replaced")
    assert fleet.lines("rogue") == []
    assert refused(fleet.push, SOUTH, answer.session_id, *next(iter(reply.objects.items())))[1] == "unknown session"


def test_a_reply_after_its_instructions_end_is_late_and_no_rogue(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = fleet.reply(NORTH)
    monkeypatch.setattr(fleet.port._staging, "_clock", lambda: time.time() + 1e6)
    for _ in range(30):
        assert refused(fleet.announce, NORTH, reply.request) == (403, "instruction has ended")
    assert refused(fleet.announce, SOUTH, reply.request)[1] != "instruction has ended"
    assert fleet.lines("rogue") == []


def test_no_more_dropped_replies_of_a_site_are_remembered_than_it_needs(fleet: Fleet) -> None:
    for number in range(20):
        half(fleet, content=upload(bytes([number])))
    remembered = fleet.port._staging._dropped[fleet.nodes[NORTH]]
    assert len(remembered) == limits.REMEMBERED_DROPPED_REPLIES


@pytest.mark.parametrize("error", [OSError(28, "no space left"), OperationalError("x", {}, Exception("locked"))])
def test_a_disk_that_fails_is_asked_again_ten_times(
    fleet: Fleet, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_given: Any) -> None:
        raise error

    reply = fleet.reply(NORTH)
    answer = fleet.announce(NORTH, reply.request)
    id_ = reply.of_type("ArrayChunk")
    with monkeypatch.context() as patch:
        patch.setattr(fleet.port._staging._spool, "put_object", fails)
        said = [refused(fleet.push, NORTH, answer.session_id, id_, reply.objects[id_]) for _ in range(12)]
    assert said[:10] == [(503, "database or disk failure")] * 10
    assert said[10:] == [(403, "reply could not be stored")] * 2
    monkeypatch.setattr(fleet.port._staging._spool, "add_reply", fails)
    other = fleet.reply(SOUTH)
    assert [refused(fleet.announce, SOUTH, other.request)[0] for _ in range(11)] == [503] * 10 + [403]


# Races


def test_equal_announcements_at_once_are_one_session(fleet: Fleet) -> None:
    reply, sessions = fleet.reply(NORTH), list[str]()
    start = threading.Barrier(8)

    def announce() -> None:
        start.wait()
        sessions.append(fleet.announce(NORTH, reply.request).session_id)

    _run([announce] * 8)
    assert len(sessions) == 8
    assert len(set(sessions)) == 1
    assert len(fleet.staged(NORTH)) == 1


def test_the_last_object_at_once_queues_the_reply_once(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    reply, answer, sent = half(fleet)
    last = next(id_ for id_ in reply.objects if id_ not in sent)
    queued: list[Any] = []
    original = fleet.port._hand_over.add_reply
    monkeypatch.setattr(fleet.port._hand_over, "add_reply", lambda whole: (queued.append(whole), original(whole)))
    start, answers = threading.Barrier(8), list[bool]()

    def push() -> None:
        start.wait()
        answers.append(fleet.push(NORTH, answer.session_id, last, reply.objects[last]))

    _run([push] * 8)
    fleet.settle()
    assert answers == [True] * 8
    assert len(queued) == 1
    assert fleet.superlink.found(NORTH) == [NORTH]


def test_two_sites_and_their_repetitions_at_once(fleet: Fleet) -> None:
    replies = [fleet.reply(site, content=upload(*(bytes([site, i]) * 40 for i in range(6)))) for site in (NORTH, SOUTH)]
    errors: list[Exception] = []

    def send(site: int, seed: int) -> None:
        try:
            answer = fleet.announce(site, replies[site].request)
            ids = list(replies[site].objects)
            random.Random(seed).shuffle(ids)
            for id_ in ids:
                assert fleet.push(site, answer.session_id, id_, replies[site].objects[id_])
        except Exception as error:
            errors.append(error)

    _run([lambda site=site, seed=seed: send(site, seed) for site in (NORTH, SOUTH) for seed in range(4)])
    fleet.settle()
    assert errors == []
    assert fleet.superlink.found(NORTH, SOUTH) == [NORTH, SOUTH]
    assert fleet.files() == []


def test_a_reply_that_is_dropped_while_an_object_is_written_leaves_nothing(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool, reply = fleet.port._staging._spool, fleet.reply(NORTH)
    answer = fleet.announce(NORTH, reply.request)
    original = spool.put_object

    def slow(*given: Any) -> None:
        original(*given)
        fleet.announce(NORTH, fleet.reply(NORTH, content=Error(8, "died")).request)

    monkeypatch.setattr(spool, "put_object", slow)
    id_ = reply.of_type("ArrayChunk")
    assert refused(fleet.push, NORTH, answer.session_id, id_, reply.objects[id_]) == (
        403,
        "reply was dropped: late, idle or replaced",
    )
    (staged,) = fleet.staged(NORTH)
    assert [path.parent.name for path in fleet.files()] == [staged.session]


@pytest.mark.parametrize("writes_first", [True, False])
def test_an_object_whose_reply_reaches_flower_while_it_is_written_again_is_stored(
    fleet: Fleet, writes_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the repetition of a push whose answer was lost: an honest site must not be refused for it."""
    reply, answer, sent = half(fleet)
    last = next(id_ for id_ in reply.objects if id_ not in sent)
    spool = fleet.port._staging._spool
    original = spool.put_object

    def slow(*given: Any) -> None:
        monkeypatch.setattr(spool, "put_object", original)
        if writes_first:
            original(*given)
        assert fleet.push(NORTH, answer.session_id, last, reply.objects[last])
        fleet.settle()
        if not writes_first:
            original(*given)

    monkeypatch.setattr(spool, "put_object", slow)
    assert fleet.push(NORTH, answer.session_id, last, reply.objects[last])
    assert fleet.files() == []
    assert fleet.superlink.found(NORTH) == [NORTH]


def test_a_spool_that_somebody_removes_is_an_error_of_the_disk(fleet: Fleet) -> None:
    reply, answer, sent = half(fleet)
    last = next(id_ for id_ in reply.objects if id_ not in sent)
    shutil.rmtree(fleet.port._staging._spool.folder)
    assert refused(fleet.push, NORTH, answer.session_id, last, reply.objects[last]) == (503, "database or disk failure")


# The hand-over


def test_a_run_that_ends_before_the_hand_over_takes_nothing(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    reply, answer, sent = half(fleet)
    fleet.state.finish_task(fleet.state.get_run_info(run_ids=[fleet.run])[0].primary_task_id, SubStatus.COMPLETED, "")
    last = next(id_ for id_ in reply.objects if id_ not in sent)
    assert fleet.push(NORTH, answer.session_id, last, reply.objects[last])
    fleet.settle()
    assert fleet.files() == []
    assert fleet.staged(NORTH) == []
    fleet.port.sweep()
    assert len(fleet.state.object_store) == 0


def test_an_instruction_that_is_taken_back_before_the_hand_over_takes_nothing(fleet: Fleet) -> None:
    reply, answer, sent = half(fleet)
    fleet.state.delete_messages({fleet.superlink.sent[NORTH]})
    last = next(id_ for id_ in reply.objects if id_ not in sent)
    assert fleet.push(NORTH, answer.session_id, last, reply.objects[last])
    fleet.settle()
    assert fleet.files() == []
    assert reply.root not in fleet.state.object_store


# The sweep


def test_a_half_reply_is_kept_for_a_while_after_the_last_object(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    reply, answer, sent = half(fleet)
    staging = fleet.port._staging
    (staged,) = fleet.staged(NORTH)
    staged.last_call = time.monotonic() - limits.IDLE_SECONDS + 20
    monkeypatch.setattr(fleet.port, "_site_of", lambda key: "north")
    fleet.port.sweep()
    assert len(fleet.staged(NORTH)) == 1
    staged.active_calls, staged.last_call = 1, time.monotonic() - limits.IDLE_SECONDS - 1
    fleet.port.sweep()
    assert len(fleet.staged(NORTH)) == 1  # a slow line is still sending it
    staged.active_calls = 0
    fleet.port.sweep()
    assert fleet.staged(NORTH) == []
    assert fleet.files() == []
    assert staging.open_replies() == 0
    assert OBJECT_PUSH_SESSION_TTL_SECONDS < limits.IDLE_SECONDS
    # a part may still be on its way, or its site is about to find that the line is dead
    assert limits.IDLE_SECONDS > limits.MAX_BODY_SECONDS > keepalive.SECONDS + keepalive.DATA_TIMEOUT
    assert sent
    assert refused(fleet.push, NORTH, answer.session_id, reply.root, reply.objects[reply.root])[0] == 403


@pytest.mark.parametrize("why", ["run ended", "instruction gone", "key revoked", "expired"])
def test_a_half_reply_goes_with_what_it_is_for(fleet: Fleet, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    half(fleet, NORTH)
    half(fleet, SOUTH)
    if why == "run ended":
        task = fleet.state.get_run_info(run_ids=[fleet.run])[0].primary_task_id
        fleet.state.finish_task(task, SubStatus.COMPLETED, "")
    elif why == "instruction gone":
        fleet.state.delete_messages({fleet.superlink.sent[NORTH]})
    elif why == "key revoked":
        monkeypatch.setattr(fleet.port, "_site_of", lambda key: "" if key == bytes([0]) else "south")
    else:
        later = time.time() + 200
        monkeypatch.setattr(fleet.port._staging, "_clock", lambda: later)
    fleet.port.sweep()
    gone_for_all = why in ("run ended", "expired")
    assert (len(fleet.staged(NORTH)), len(fleet.staged(SOUTH))) == (0, 0 if gone_for_all else 1)
    assert len({path.parent for path in fleet.files()}) == (0 if gone_for_all else 1)


def test_what_is_remembered_of_a_reply_goes_with_its_instruction(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.send(NORTH, fleet.reply(NORTH))
    staging = fleet.port._staging
    fleet.port.sweep()
    assert staging._finished[fleet.nodes[NORTH]]
    assert staging._uploaded
    later = time.time() + 200
    monkeypatch.setattr(staging, "_clock", lambda: later)
    fleet.port.sweep()
    assert not staging._finished[fleet.nodes[NORTH]]
    assert not staging._uploaded


def _run(calls: list[Any]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_a_site_that_announces_reply_after_reply_fills_no_log(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    logger, handler = logging.getLogger(LOGGER_NAME), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "filters", [RefusalLineFilter()])
    for number in range(30):
        fleet.announce(NORTH, fleet.reply(NORTH, content=upload(bytes([number]) * 10)).request)
    assert len(fleet.staged(NORTH)) == 1
    dropped = [line for line in lines if "dropped" in line]
    assert len(dropped) == 1
    fleet.announce(SOUTH, fleet.reply(SOUTH, content=upload(b"1")).request)
    fleet.announce(SOUTH, fleet.reply(SOUTH, content=upload(b"2")).request)
    assert len([line for line in lines if "dropped" in line]) == 2  # of another site
