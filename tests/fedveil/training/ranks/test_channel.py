"""The channel between two ranks delivers each message completely or not at all."""

from __future__ import annotations

import socket
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedveil.data.batches import LabelledBatch, TokenExample, collate_batch
from fedveil.training.ranks.channel import RankChannel, RankMessage, batch_message, message_batch


@pytest.fixture
def ends():
    one, other = map(RankChannel, socket.socketpair())
    yield one, other
    one.close()
    other.close()


def test_a_message_comes_as_it_was_said_also_one_that_no_buffer_holds(ends):
    one, other = ends
    large = {"w": torch.randn(700, 1000), "none": torch.empty(0, 3), "b": torch.tensor([True, False])}
    message = RankMessage({"do": "x", "n": [1, 2.5, None, "ü"]}, large)
    speaker = threading.Thread(target=one.say, args=(message,))
    speaker.start()
    heard = other.hear()
    speaker.join()
    assert heard.head == message.head
    assert heard.tensors.keys() == large.keys()
    assert all(torch.equal(heard.tensors[name], tensor) for name, tensor in large.items())


def test_messages_keep_their_order(ends):
    one, other = ends
    for i in range(5):
        one.say(RankMessage({"i": i}))
    assert [other.hear().head["i"] for _ in range(5)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("bytes_", [b"", b"\x05", (5).to_bytes(8, "little") + (0).to_bytes(8, "little") + b'{"a"'])
def test_an_end_that_closes_is_heard_as_none_also_within_a_message(bytes_):
    raw, end = socket.socketpair()
    raw.sendall(bytes_)
    raw.close()
    channel = RankChannel(end)
    assert channel.hear() is None
    channel.close()


def test_saying_to_an_end_that_is_closed_is_an_oserror(ends):
    one, other = ends
    other.close()
    with pytest.raises(OSError):
        one.say(RankMessage({}))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.booleans())
def test_a_batch_of_tokens_is_the_same_on_the_other_side(lengths, whole):
    rows = [TokenExample(list(range(10 * i, 10 * i + n)), n // 2) for i, n in enumerate(lengths)]
    batch = collate_batch(rows, 99, whole)
    object.__setattr__(batch, "inputs", {"pixel_values": torch.randn(len(rows), 3, 2, 2)})
    message = batch_message(batch, {"do": "gradient", "terms": 7})
    received_batch = message_batch(message)
    assert (message.head["do"], message.head["terms"]) == ("gradient", 7)
    assert (received_batch.tokens, received_batch.terms) == (batch.tokens, batch.terms)
    for name in ("ids", "mask", "positions", "wanted"):
        assert torch.equal(getattr(received_batch, name), getattr(batch, name))
    assert torch.equal(received_batch.inputs["pixel_values"], batch.inputs["pixel_values"])


def test_a_batch_of_images_is_the_same_on_the_other_side():
    batch = LabelledBatch(torch.randn(2, 3, 4, 4), torch.tensor([1, 0]))
    received_batch = message_batch(batch_message(batch, {}))
    assert torch.equal(received_batch.inputs, batch.inputs)
    assert torch.equal(received_batch.labels, batch.labels)
