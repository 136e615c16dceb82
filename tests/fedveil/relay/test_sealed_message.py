"""A letter is opened by the end it is for, whole and from the other end, or not at all."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable

import pytest

from fedveil.errors import WireError
from fedveil.relay.keys import EndpointSecret, PeerKeys, context_bytes
from fedveil.relay.sealed_message import (
    ORDER,
    REPLY,
    IncompleteMessageError,
    MessageHeader,
    decrypt_message,
    encrypt_message,
)
from tests.fedveil.relay.two import SERVER, SITE, STRANGER

ID = "0f" * 16
MOST = 1 << 23
CONTENT = b"what the server asks"


def letter(
    content: Iterable[bytes] = (CONTENT,),
    kind: str = ORDER,
    id_: str = ID,
    own: EndpointSecret = SERVER,
    peer: EndpointSecret = SITE,
) -> bytes:
    return b"".join(map(bytes, encrypt_message(content, kind, id_, own, peer.public)))


def read(
    data: bytes, kind: str = ORDER, own: EndpointSecret = SITE, peer: PeerKeys = SERVER.public, most: int = MOST
) -> bytes:
    return decrypt_message(io.BytesIO(data), "x.relay", kind, own, peer, most)[1]


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3_000_000])
def test_what_was_closed_is_opened(size):
    content = os.urandom(size)
    data = letter([content[: size // 3], content[size // 3 :]])
    head, payload = decrypt_message(io.BytesIO(data), "x.relay", ORDER, SITE, SERVER.public, MOST)
    assert payload == content
    assert (head.kind, head.id, head.sender, head.recipient) == (ORDER, ID, SERVER.public.id, SITE.public.id)


def test_who_carries_it_reads_nothing_and_no_two_letters_are_alike():
    first, second = letter(), letter()
    assert CONTENT not in first
    assert len(first) == len(second)
    at = len(first) - len(CONTENT) - 600  # heads apart, nothing of the encrypted body is in both
    assert first[100:at] != second[100:at] or at <= 100
    assert head_of(first).ephemeral != head_of(second).ephemeral


def test_every_byte_that_is_changed_is_found():
    data = letter()
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1
        with pytest.raises(WireError):
            read(bytes(changed))


def test_a_letter_cut_off_anywhere_says_so():
    data = letter()
    for end in range(len(data)):
        with pytest.raises(IncompleteMessageError, match="copy it again"):
            read(data[:end])


def test_a_letter_with_more_behind_it_or_two_in_one_is_refused():
    data = letter()
    for more in (b"\0", b"x" * 68, data):
        with pytest.raises(WireError):
            read(data + more)


def head_of(data: bytes) -> MessageHeader:
    length = int.from_bytes(data[-4:], "big")
    return MessageHeader(**json.loads(data[-68 - length : -68]))


def with_head(data: bytes, signer: EndpointSecret, **changes: str) -> bytes:
    """The letter with another head, signed anew."""
    from fedveil.federation.secagg import crypto

    length = int.from_bytes(data[-4:], "big")
    head = MessageHeader(**{**json.loads(data[-68 - length : -68]), **changes}).to_bytes()
    signature = crypto.sign_bytes(signer.signing, context_bytes("letter") + head)
    return data[: -68 - length] + head + signature + len(head).to_bytes(4, "big")


@pytest.mark.parametrize(
    "data,said",
    [
        (letter(own=STRANGER), "sender: expected"),
        (with_head(letter(own=STRANGER), STRANGER, sender=SERVER.public.id), "no valid signature by the other end"),
        (letter(peer=STRANGER), "recipient: expected"),
        (with_head(letter(peer=STRANGER), SERVER, recipient=SITE.public.id), "it was not encrypted for this end"),
        (letter(kind=REPLY), "kind: expected order, found reply"),
        (with_head(letter(kind=REPLY), SERVER, kind=ORDER), "it was not encrypted for this end"),
        (with_head(letter(), SERVER, id="ab" * 16), "it was not encrypted for this end"),
        (with_head(letter(), SERVER, ephemeral="00" * 32), "low order"),
        (b"#!/bin/sh\nrm -rf /\n" + bytes(300), "it is not a relay file of version 1"),
    ],
    ids=["a stranger's", "a stranger's in the server's name", "another site's", "another site's with this one's name",
         "a reply", "a reply called an order", "another id", "a key that agrees with everybody's", "something else"],
)  # fmt: skip
def test_what_is_not_from_the_other_end_for_this_one_is_refused_in_words(data, said):
    with pytest.raises(WireError, match=said):
        read(data)


def test_the_body_of_one_letter_with_the_head_of_another_is_refused():
    first, second = letter(), letter([b"another question ...."[: len(CONTENT)]])
    tail = 68 + int.from_bytes(first[-4:], "big")
    assert len(first) == len(second)
    with pytest.raises(WireError, match="its bytes are not the signed ones"):
        read(second[:-tail] + first[-tail:])


def test_the_sender_cannot_open_it_again():
    with pytest.raises(WireError, match="sender: expected"):
        read(letter(), own=SERVER, peer=SITE.public)
    mine = with_head(letter(), SERVER, sender=SITE.public.id, recipient=SERVER.public.id)
    with pytest.raises(WireError):
        read(mine, own=SERVER, peer=SITE.public)


def test_a_letter_above_the_bound_is_refused_before_a_byte_is_read():
    class Large(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise AssertionError("read")

    with pytest.raises(WireError, match="it has 11 bytes; at most 10 are allowed"):
        decrypt_message(Large(bytes(11)), "x.relay", ORDER, SITE, SERVER.public, 10)


def test_a_head_that_is_no_head_is_refused():
    data = letter()
    length = int.from_bytes(data[-4:], "big")
    for head in (b"{}", b"[1]", b"{" * 900, b'{"kind": 1}', data[-68 - length : -68].replace(b'"order"', b'"bread"')):
        with pytest.raises(WireError, match="it has no header"):
            read(data[: -68 - length] + head + bytes(64) + len(head).to_bytes(4, "big"))
