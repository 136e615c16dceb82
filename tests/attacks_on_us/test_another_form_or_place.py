"""A message counts once, in the place for which it was made, and in one form."""

from __future__ import annotations

import json
import zlib

import pytest
import torch

from fedveil import rng
from fedveil.contract.message_address import MessageAddress
from fedveil.contract.method import RoundContext
from fedveil.contract.param_spec import ParamSpec
from fedveil.errors import WireError
from fedveil.wire.header import PREFIX
from tests.attacks_on_us.test_one_site_ends_the_run import attacked, bytes_of, sent  # noqa: F401  # a fixture
from tests.conftest import ToyTrainer
from tools.forge import header_of, with_compressed, with_header, with_text

STREAM = rng.initial_stream(1, "method init")
SPEC = {"w": ParamSpec((3, 5)), "b": ParamSpec((7,))}
HOME = MessageAddress("study-1a2b3c4d", 1, "east")
CTX = RoundContext(4, "east", True, bytes(32), address=HOME)


@pytest.mark.parametrize(
    "address",
    [
        MessageAddress("study-5e6f7a8b", 1, "east"),
        MessageAddress("study-1a2b3c4d", 0, "east"),
        MessageAddress(HOME.run, 1, "north"),
    ],
)
def test_a_message_of_another_run_attempt_or_site_is_refused_on_both_ends(address, exchange, upload, random_weights):
    assert exchange.receive(upload, 4, HOME).num_examples == 3
    with pytest.raises(WireError, match="address: expected .* this message is of another run, attempt or site"):
        exchange.receive(upload, 4, address)
    server = exchange.method.init(SPEC, random_weights(SPEC, 1), STREAM)
    down = exchange.broadcast(server, CTX)
    elsewhere = RoundContext(4, "east", True, bytes(32), address=address)
    if address.site == HOME.site:  # a broadcast is equal for all sites of an attempt, and is made and sent once
        with pytest.raises(WireError, match="address: expected"):
            exchange.participate(down, None, ToyTrainer(SPEC), elsewhere)


def test_a_site_cannot_send_another_site_s_upload_as_its_own(attacked):  # noqa: F811
    seen = []

    def replayed(message, reply):
        site = message.content.config_records["order"]["site"]
        seen.append(bytes_of(reply))
        return reply if site == "east" else sent(message, seen[0])

    (record,) = attacked(replayed, ("east", "north"))
    assert record.accepted == ["east", "south"]
    assert record.failed["north"].startswith("refused: address: expected MessageAddress(run='run-")


@pytest.mark.long
def test_an_upload_of_the_attempt_before_is_refused(attacked):  # noqa: F811
    seen = []

    def replayed(message, reply):
        seen.append(bytes_of(reply))
        if message.content.config_records["order"]["site"] == "north":
            return None if len(seen) == 2 else reply  # the first attempt stays below the quorum
        return sent(message, seen[0])

    first, second = attacked(replayed, ("east", "north"), ("east", "north"), 1)
    assert first.accepted == ["east"]
    assert second.accepted == ["north"]
    assert second.failed["east"].startswith("refused: address: expected")


def reordered(data: bytes) -> bytes:
    """The same fields in the other order, header and bytes."""
    fields = header_of(data)["fields"]
    sizes = [size + -size % 8 for _, _, _, size, _ in fields]
    body = data[-sum(sizes) :]
    head = data[: -sum(sizes)]
    return with_header(head, fields=fields[::-1]) + body[sizes[0] :] + body[: sizes[0]]


def padded(at: int):
    """One bit of padding set."""

    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[at] |= 1
        return bytes(changed)

    return change


def text_of(data: bytes) -> bytes:
    return json.dumps(header_of(data), separators=(",", ":")).encode()


FORMS = {
    "spaces in the JSON": lambda d: with_text(d, json.dumps(header_of(d)).encode()),
    "keys in another order": lambda d: with_text(
        d, json.dumps(dict(reversed(header_of(d).items())), separators=(",", ":")).encode()
    ),
    "a key twice": lambda d: with_text(d, text_of(d).replace(b'{"method"', b'{"method":"other","method"')),
    "an escaped letter": lambda d: with_text(d, text_of(d).replace(b'"fedavg"', b'"fed\\u0061vg"')),
    "report in another order": lambda d: with_header(d, report=dict(reversed(header_of(d)["report"].items()))),
    "a number in another form": lambda d: with_text(d, text_of(d).replace(b"0.25", b"2.5e-1")),
    "bytes after the zlib stream": lambda d: with_compressed(d, zlib.compress(text_of(d)) + b"more"),
    "a zlib stream without its end": lambda d: with_compressed(d, zlib.compress(text_of(d))[:-2]),
    "a trailing byte": lambda d: d + b"\0",
    "eight trailing bytes": lambda d: d + bytes(8),
    "a bit in the last padding": padded(-1),
    "fields in another order": reordered,
}


@pytest.mark.parametrize("kind", FORMS)
def test_another_form_of_the_same_message_is_refused(kind, exchange, upload):
    with pytest.raises(WireError, match="header: |message: |fields: |the padding after it"):
        exchange.receive(FORMS[kind](upload), 4, HOME)


def test_a_bit_in_the_padding_of_the_header_is_refused(exchange, upload):
    for spare in range(8):  # a header of another length, until there is padding after it
        text = text_of(upload).replace(b"0.25", b"0.25" + b"1" * spare)
        changed = with_compressed(upload, zlib.compress(text))
        end = PREFIX + int.from_bytes(changed[4:8], "little")
        if end % 8:
            break
    assert exchange.receive(changed, 4, HOME).num_examples == 3
    damaged = bytearray(changed)
    damaged[end] |= 1
    with pytest.raises(WireError, match="header: the padding after it must be zero bytes, found 01"):
        exchange.receive(bytes(damaged), 4, HOME)


def test_the_order_of_the_fields_is_not_the_senders_to_choose(exchange):
    fields = {"w": torch.zeros(3, 5), "b": torch.zeros(7)}
    server = exchange.method.init(SPEC, fields, STREAM)
    backwards = exchange.method.init(SPEC, dict(reversed(fields.items())), STREAM)
    assert exchange.broadcast(server, CTX) == exchange.broadcast(backwards, CTX)
