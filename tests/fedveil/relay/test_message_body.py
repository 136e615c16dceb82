"""What is in a letter comes back as it was, and everything else is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from fedveil.errors import WireError
from fedveil.relay.message_body import RelayReply, RelayRequest

ORDER = RelayRequest(1000, 2000, 77, b"bundle", b"", b"run")
REPLY = RelayReply("ab" * 16, 0, "", f"12:{'0f' * 32}", f"{'0a' * 8}:{'0b' * 64}", 1.5, b"upload")
FAILED = replace(REPLY, code=2, reason="PolicyError: no", log="", signature="", upload=b"")


def changed(content: list[bytes], **changes: Any) -> bytes:
    """The content with other JSON in front."""
    head = json.dumps({**json.loads(content[1]), **changes}).encode()
    return len(head).to_bytes(4, "big") + head + b"".join(content[2:])


def test_both_come_back_as_they_were():
    assert RelayRequest.from_bytes(b"".join(ORDER.packed())) == ORDER
    assert RelayReply.from_bytes(b"".join(REPLY.packed())) == REPLY
    assert RelayReply.from_bytes(b"".join(FAILED.packed())) == FAILED


@pytest.mark.parametrize(
    "changes",
    [{"version": 1}, {"version": True}, {"made": 0}, {"made": 1.0}, {"expires": 1000},
     {"expires": 1000 + 32 * 86_400_000},
     {"node": 0}, {"node": 1 << 64}, {"node": True}, {"more": 1}, {"sizes": {"bundle": 6, "message": 0}},
     {"sizes": {"bundle": 6, "message": -3, "run": 6}}, {"sizes": {"bundle": 6, "message": 1, "run": 3}},
     {"sizes": {"bundle": 6, "message": 0.0, "run": 3}}, {"sizes": [6, 0, 3]}],
    ids=str,
)  # fmt: skip
def test_an_order_that_is_none_is_refused(changes):
    with pytest.raises(WireError, match="(order|reply|relay file): "):
        RelayRequest.from_bytes(changed(ORDER.packed(), **changes))


@pytest.mark.parametrize(
    "changes",
    [{"order": "ab"}, {"order": "../" * 10 + "ab"}, {"code": 1}, {"code": 9}, {"code": -1}, {"code": True},
     {"reason": 1}, {"reason": "x" * 2001}, {"log": "head"}, {"log": "x" * 5000}, {"seconds": 1}, {"seconds": -1.0},
     {"seconds": float("nan")}, {"seconds": float("inf")}, {"version": 0}, {"signature": "ab"}, {"signature": 1},
     {"signature": f"{'0A' * 8}:{'0b' * 64}"}, {"signature": f"{'0a' * 8}:{'0b' * 64}:"}],
    ids=lambda changes: str(changes)[:40],
)  # fmt: skip
def test_a_reply_that_is_none_is_refused(changes):
    with pytest.raises(WireError, match="(order|reply|relay file): "):
        RelayReply.from_bytes(changed(REPLY.packed(), **changes))


def test_a_signature_comes_back_as_the_record_that_the_guard_made():
    assert REPLY.signature_record == {"version": 1, "key": "0a" * 8, "signature": "0b" * 64}
    assert FAILED.signature_record is None


def test_a_reply_without_an_upload_or_a_code_is_refused():
    with pytest.raises(WireError, match="it must have an upload, or a code"):
        RelayReply.from_bytes(b"".join(replace(REPLY, upload=b"").packed()))


def test_a_reason_is_shown_as_text():
    assert RelayReply.from_bytes(b"".join(replace(FAILED, reason="a\x1b[2Jb\nc").packed())).reason == "a\\x1b[2Jb\\nc"


@pytest.mark.parametrize(
    "content", [b"", b"\0\0\0\1", b"\0\0\0\2[]", b"\xff\xff\xff\xff{}", b"\0\0\0\4nope", b"\0\0\x20\0" + b"[" * 8192],
)  # fmt: skip
def test_bytes_that_are_neither_are_refused(content):
    for kind in (RelayRequest, RelayReply):
        with pytest.raises(WireError, match="relay file: "):
            kind.from_bytes(content)
