"""Whose an instruction is, asked of Flower's own states of a SuperLink."""

from __future__ import annotations

import pytest

from fedveil.guard.flower import link_states
from tests.fedveil.guard.flower.states import Superlink

pytestmark = pytest.mark.filterwarnings("ignore:No path_separator:DeprecationWarning")  # Flower's, of a new database


def test_an_instruction_is_its_site_s_before_and_after_it_was_delivered(superlink: Superlink) -> None:
    message_id, node = superlink.sent[0], superlink.nodes[0]
    before = link_states.find_instruction(superlink.state, message_id)
    assert before is not None
    assert (before.message_id, before.run_id, before.node_id) == (message_id, superlink.run, node)
    assert (before.message_type, before.group_id, before.ttl, before.reply_id) == ("train", "", 100.0, "")
    superlink.state.get_message_ins(node_id=node, limit=1)
    assert link_states.find_instruction(superlink.state, message_id) == before
    assert before.expires == before.created_at + 100.0


def test_a_reply_is_named_with_its_instruction(superlink: Superlink) -> None:
    reply = superlink.reply(0)
    superlink.answer(0, reply)
    row = link_states.find_instruction(superlink.state, superlink.sent[0])
    assert row is not None
    assert row.reply_id == reply.metadata.message_id


def test_nobody_has_an_instruction_that_was_taken_back(superlink: Superlink) -> None:
    superlink.state.delete_messages({superlink.sent[0]})
    assert link_states.find_instruction(superlink.state, superlink.sent[0]) is None
    assert link_states.find_instruction(superlink.state, "ab" * 32) is None


@pytest.mark.long
def test_the_instructions_of_a_site_are_those_of_the_run_and_no_other_s(superlink: Superlink) -> None:
    second = superlink.send(0)
    state, (node, other) = superlink.state, superlink.nodes
    own = link_states.instructions_of_node(state, node, superlink.run)
    assert [row.message_id for row in own] == [superlink.sent[second], superlink.sent[0]]
    others = link_states.instructions_of_node(state, other, superlink.run)
    assert [row.message_id for row in others] == [superlink.sent[1]]
    assert link_states.instructions_of_node(state, node, superlink.run + 1) == []
    assert link_states.instructions_of_node(state, 12345, superlink.run) == []


def test_runs_with_objects_are_known_until_they_are_tidied_up(superlink: Superlink) -> None:
    assert link_states.runs_with_objects(superlink.state) == {superlink.run}
    superlink.state.cleanup_run(superlink.run)
    assert link_states.runs_with_objects(superlink.state) == set()
