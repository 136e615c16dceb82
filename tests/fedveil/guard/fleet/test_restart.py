"""A SuperLink that is killed between any two steps of a reply, and the site that goes on as if nothing had been."""

from __future__ import annotations

import copy
import os
import pathlib
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.supercore import sql_mixin
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager

from fedveil.guard.flower import link_states
from tests.fedveil.guard.fleet.conftest import Fleet, make_fleet
from tests.fedveil.guard.fleet.replies import Reply, object_bytes, upload
from tests.fedveil.guard.flower.states import STATES, Superlink

NORTH = 0


def restarted(superlink: Superlink, folder: Path, patch: pytest.MonkeyPatch) -> Fleet:
    """The same database and the same spool, in a process of their own."""
    again = copy.copy(superlink)
    file = str(folder / "state.db")
    with pytest.MonkeyPatch.context() as migrations:
        migrations.setattr(sql_mixin, "run_migrations", lambda engine: None)
        again.state = STATES[1](file, NoOpFederationManager(), ObjectStoreFactory(file).store())
        again.state.initialize()
    return make_fleet(again, folder, patch)


class Killer:
    """Ends this process before or after the step of this number."""

    def __init__(self, at: int) -> None:
        self.at, self.step = at, 0

    def __call__(self, original: Any) -> Any:
        def called(*given: Any, **more: Any) -> Any:
            self.count()
            result = original(*given, **more)
            self.count()
            return result

        return called

    def count(self) -> None:
        self.step += 1
        if self.step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def send_and_die(superlink: Superlink, folder: Path, reply: Reply, answers: Path, at: int) -> bool:
    """Runs in a process of its own; false where it had fewer steps. What was answered is in the file `answers`."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    try:
        patch = pytest.MonkeyPatch()
        fleet = restarted(superlink, folder, patch)
        fleet.call("pull_messages", PullMessagesRequest(node=fleet.node(NORTH)))
        killer = Killer(at)
        for owner, name in (
            (pathlib.Path, "replace"), (shutil, "rmtree"), (type(fleet.state), "store_object"),
            (type(fleet.state), "store_message_and_object_tree"),
        ):  # fmt: skip
            patch.setattr(owner, name, killer(getattr(owner, name)))
        with answers.open("w", buffering=1) as log:
            answer = fleet.announce(NORTH, reply.request)
            log.write(answer.session_id + "\n")
            for id_ in answer.objects_to_push:
                assert fleet.push(NORTH, answer.session_id, id_, reply.objects[id_])
                log.write(id_ + "\n")
        fleet.settle()
    except BaseException:
        os._exit(3)
    os._exit(0)


def go_on(fleet: Fleet, reply: Reply, answered: list[str]) -> None:
    """As an honest SuperNode: a call that got no answer is repeated, and the session goes on."""
    if not answered:
        fleet.send(NORTH, reply)
        return
    session, *sent = answered
    for id_ in reply.objects:
        if id_ not in sent:
            assert fleet.push(NORTH, session, id_, reply.objects[id_])
    fleet.call("pull_messages", PullMessagesRequest(node=fleet.node(NORTH)))
    fleet.settle()


@pytest.mark.long
def test_killed_between_any_two_steps_the_reply_comes_whole_and_once(
    tmp_path: Path, clean_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.fedveil.guard.fleet.conftest import make_superlink

    at = 0
    while True:
        at += 1
        folder = tmp_path / str(at)
        folder.mkdir()
        superlink = make_superlink("SQL", folder, clean_database)
        superlink.state._engine.dispose()
        with monkeypatch.context() as patch:
            reply = restarted(superlink, folder, patch).reply(NORTH, content=upload(b"slice"))
        killed = send_and_die(superlink, folder, reply, folder / "answers", at)
        answers = folder / "answers"
        with monkeypatch.context() as patch:
            fleet = restarted(superlink, folder, patch)
            go_on(fleet, reply, answers.read_text().split() if answers.exists() else [])
            assert not link_states.is_object_missing(fleet.state.object_store, reply.root), at
            assert fleet.superlink.found(NORTH) == [NORTH], at
            assert fleet.files() == [], at
            assert fleet.superlink.found(NORTH) == [], at
        if not killed:
            break
    assert at > 25


def left_half(superlink: Superlink, tmp_path: Path, patch: pytest.MonkeyPatch) -> tuple[Reply, str, str]:
    """A reply that lacks one object when the process ends: the reply, its session, that object."""
    fleet = make_fleet(superlink, tmp_path, patch)
    reply = fleet.reply(NORTH)
    answer = fleet.announce(NORTH, reply.request)
    *some, last = answer.objects_to_push
    for id_ in some:
        assert fleet.push(NORTH, answer.session_id, id_, reply.objects[id_])
    return reply, answer.session_id, last


def test_half_a_reply_stays_open_in_its_session(
    sql_superlink: Superlink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply, session, last = left_half(sql_superlink, tmp_path, monkeypatch)
    fleet = restarted(sql_superlink, tmp_path, monkeypatch)
    assert list(fleet.announce(NORTH, reply.request).objects_to_push) == [last]
    assert fleet.push(NORTH, session, last, reply.objects[last])
    fleet.settle()
    assert fleet.superlink.found(NORTH) == [NORTH]


@pytest.mark.parametrize("change", ["other bytes", "cut", "a link", "a strange file", "a strange object"])
def test_files_are_checked_again(
    change: str, sql_superlink: Superlink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut leaves any bytes; another user of the machine cannot write there."""
    reply, session, last = left_half(sql_superlink, tmp_path, monkeypatch)
    folder = tmp_path / "spool" / str(sql_superlink.nodes[NORTH]) / session
    chunk = folder / reply.of_type("ArrayChunk")
    strange = folder / ("ab" * 32 if change == "a strange object" else "x")
    wrong = [last] if change.startswith("a strange") else [chunk.name, last]
    if change == "a link":
        (tmp_path / "elsewhere").write_bytes(chunk.read_bytes())
        chunk.unlink()
        chunk.symlink_to(tmp_path / "elsewhere")
    elif change.startswith("a strange"):
        strange.write_bytes(object_bytes("ArrayChunk", [], b"x"))
    else:
        chunk.write_bytes(b"" if change == "cut" else object_bytes("ArrayChunk", [], b"other"))
    fleet = restarted(sql_superlink, tmp_path, monkeypatch)
    answer = fleet.announce(NORTH, reply.request)
    assert sorted(answer.objects_to_push) == sorted(wrong)
    assert not strange.exists()
    for id_ in answer.objects_to_push:
        assert fleet.push(NORTH, session, id_, reply.objects[id_])
    fleet.settle()
    assert fleet.superlink.found(NORTH) == [NORTH]


@pytest.mark.parametrize("why", ["instruction gone", "no call", "torn call", "another reply", "not a session"])
def test_what_nobody_waits_for_is_removed(
    why: str, sql_superlink: Superlink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, session, _ = left_half(sql_superlink, tmp_path, monkeypatch)
    folder = tmp_path / "spool" / str(sql_superlink.nodes[NORTH]) / session
    if why == "instruction gone":
        sql_superlink.state.delete_messages({sql_superlink.sent[NORTH]})
    elif why == "no call":
        (folder / "reply.json").unlink()
    elif why == "torn call":
        (folder / "reply.json").write_text('{"request": "')
    elif why == "another reply":
        sql_superlink.answer(NORTH)
    else:
        folder.rename(folder.with_name("x"))
        (folder.parent / "link").symlink_to(tmp_path)
        (folder.parent.parent / "file").write_text("x")
    fleet = restarted(sql_superlink, tmp_path, monkeypatch)
    fleet.pull(1)
    assert fleet.files() == []
    assert fleet.staged(NORTH) == []
    assert (tmp_path / "state.db").exists()


def test_a_database_that_is_locked_at_the_start_is_asked_again(
    sql_superlink: Superlink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sqlalchemy.exc import OperationalError

    from tests.fedveil.guard.fleet.test_port import refused

    reply, _, last = left_half(sql_superlink, tmp_path, monkeypatch)
    fleet = restarted(sql_superlink, tmp_path, monkeypatch)

    def fails(*_given: Any) -> Any:
        raise OperationalError("x", {}, Exception("database is locked"))

    with monkeypatch.context() as patch:
        patch.setattr(link_states, "find_instruction", fails)
        assert refused(fleet.pull, 1) == (503, "database or disk failure")
    assert len(fleet.files()) == len(reply.objects)  # reply.json, and all objects but one
    assert list(fleet.announce(NORTH, reply.request).objects_to_push) == [last]


def test_folders_and_files_are_their_owner_s_alone(
    sql_superlink: Superlink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_half(sql_superlink, tmp_path, monkeypatch)
    found = [tmp_path / "spool", *(tmp_path / "spool").rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in found} == {0o700, 0o600}
    assert all((path.stat().st_mode & 0o777 == 0o700) == path.is_dir() for path in found)
