"""An order is taken once, whatever is copied, put back or cut off."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedveil.errors import PolicyError, StateError
from fedveil.relay.message_body import RelayRequest
from fedveil.relay.message_log import NAME, DuplicateMessageError, MessageLog

ORDER = RelayRequest(5000, 9000, 1, b"", b"", b"")


def opened_anew(book: MessageLog) -> MessageLog:
    book.release()
    return MessageLog.open(book.file.parent)


def test_an_answered_order_is_not_taken_again_also_after_a_start(tmp_path):
    book = MessageLog.open(tmp_path)
    book.require_new("a", "run", ORDER)
    book.take("a", "run", ORDER)
    book.answer("a", "reply-1.relay")
    for now in (book, opened_anew(book)):
        with pytest.raises(DuplicateMessageError, match=r"its reply is reply-1\.relay"):
            now.require_new("a", "run", ORDER)
        now.require_new("b", "run", replace(ORDER, made=5001))


def test_an_order_that_was_taken_and_not_answered_is_taken_again(tmp_path):
    book = MessageLog.open(tmp_path)
    book.take("a", "run", ORDER)
    opened_anew(book).require_new("a", "run", ORDER)


def test_an_older_order_of_the_same_run_is_refused_and_another_runs_is_not(tmp_path):
    book = MessageLog.open(tmp_path)
    book.take("a", "run", ORDER)
    older = replace(ORDER, made=4999)
    for now in (book, opened_anew(book)):
        with pytest.raises(PolicyError, match="already accepted a newer order"):
            now.require_new("b", "run", older)
        now.require_new("b", "other", older)


def test_one_process_has_it(tmp_path):
    book = MessageLog.open(tmp_path)
    with pytest.raises(StateError, match="another relay for this site is running"):
        MessageLog.open(tmp_path)
    opened_anew(book)


def test_a_log_that_was_changed_or_torn_takes_nothing(tmp_path):
    book = MessageLog.open(tmp_path)
    book.take("a", "run", ORDER)
    book.answer("a", "reply-1.relay")
    book.release()
    whole = (tmp_path / NAME).read_bytes()
    for broken in (whole[:-3], whole.replace(b'"a"', b'"b"')):
        (tmp_path / NAME).write_bytes(broken)
        with pytest.raises(StateError, match="changed or cut off"):
            MessageLog.open(tmp_path)
        (tmp_path / "relay.lock").unlink()
