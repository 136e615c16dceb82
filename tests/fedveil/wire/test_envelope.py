"""A message arrives whole and as declared, or is refused with field, expected and found."""

from __future__ import annotations

import contextlib
import zlib

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.contract.layout import MessageLayout, Payload, ScalarField, WireField
from fedveil.contract.param_spec import ParamSpec
from fedveil.errors import WireError
from fedveil.wire.dense import DenseCodec
from fedveil.wire.envelope import EnvelopeStamp, describe_message, pack_message, unpack_message
from fedveil.wire.header import MAGIC, PREFIX, header_of_slices
from fedveil.wire.payloads import dense_fields
from fedveil.wire.validation import message_bounds
from tools.forge import header_of, with_header

SPEC = {"w": ParamSpec((3, 5)), "b": ParamSpec((7,))}
LAYOUT = MessageLayout(dense_fields(SPEC, "up", "float32"))
STAMP = EnvelopeStamp("fedavg", 1, 4, "up")
PAYLOAD = Payload({"w": torch.arange(15.0).reshape(3, 5), "b": torch.arange(7.0)})


def packed(**changes) -> bytes:
    arguments = {"layout": LAYOUT, "stamp": STAMP, "payload": PAYLOAD, "num_examples": 3, "report": {"steps": 2}}
    return pack_message(**(arguments | changes))


def test_round_trip():
    message = unpack_message(packed(), LAYOUT, STAMP)
    assert all(torch.equal(message.payload.fields[n], PAYLOAD.fields[n]) for n in SPEC)
    assert (message.num_examples, dict(message.report)) == (3, {"steps": 2})
    assert message.field_bytes == {"w": 60, "b": 28}
    assert describe_message(packed())["payload_bytes"] == 88


def test_decoded_tensors_are_views_of_the_received_bytes():
    data = bytearray(packed())
    tensor = unpack_message(data, LAYOUT, STAMP).payload.fields["w"]
    assert tensor.data_ptr() % 4 == 0
    data[-1 - 7 - 28 :] = data[-1 - 7 - 28 :]
    before = tensor.clone()
    start = bytes(data).index(PAYLOAD.fields["w"].numpy().tobytes())
    data[start : start + 4] = torch.tensor([99.0]).numpy().tobytes()
    assert tensor[0, 0] == 99.0
    assert torch.equal(tensor.flatten()[1:], before.flatten()[1:])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("entries", [1, 262_144, 262_145, 1_100_003])
def test_the_norm_is_of_every_entry_and_a_flip_in_any_block_is_found(dtype, entries):
    layout = MessageLayout(dense_fields({"w": ParamSpec((entries,))}, "up", dtype))
    value = torch.randn(entries, generator=torch.Generator().manual_seed(2)).to(getattr(torch, dtype))
    data = bytearray(pack_message(layout, STAMP, Payload({"w": value}), num_examples=3))
    assert unpack_message(data, layout, STAMP).norms["w"] == pytest.approx(float(value.double().norm()), rel=1e-5)
    padding = -value.nbytes % 8
    for position in (len(data) - padding - value.nbytes, len(data) - padding - 1):
        data[position] ^= 1
        with pytest.raises(WireError, match="w: expected checksum"):
            unpack_message(data, layout, STAMP)
        data[position] ^= 1


def other(**changes) -> Payload:
    return Payload({**PAYLOAD.fields, **changes})


@pytest.mark.parametrize(
    "payload,layout,match",
    [
        (other(w=torch.zeros(5, 3)), LAYOUT, r"w: expected shape \(3, 5\), found \(5, 3\)"),
        (other(w=torch.zeros(3, 5, dtype=torch.float16)), LAYOUT, "float16"),
        (other(extra=torch.zeros(1)), LAYOUT, "extra: there is no such field"),
        (Payload({"w": PAYLOAD.fields["w"]}), LAYOUT, "b: this field is missing"),
        (Payload({"W": PAYLOAD.fields["w"], "b": PAYLOAD.fields["b"]}), LAYOUT, "W: there is no such field"),
    ],
)
def test_a_payload_that_is_not_declared_is_refused_on_both_sides(payload, layout, match):
    with pytest.raises(WireError, match=match):
        pack_message(layout, STAMP, payload, 3)
    fields = [WireField(n, "up", DenseCodec(v.dtype), tuple(v.shape)) for n, v in payload.fields.items()]
    foreign = pack_message(MessageLayout(tuple(fields)), STAMP, payload, 3)
    with pytest.raises(WireError, match=match):
        unpack_message(foreign, LAYOUT, STAMP)
    with pytest.raises(WireError, match=match):  # the same, from a sender who forges the digest
        unpack_message(with_header(foreign, layout=LAYOUT.digest), LAYOUT, STAMP)


@pytest.mark.parametrize(
    "stamp,match",
    [
        (EnvelopeStamp("fedavg", 1, 3, "up"), "round: expected 3, found 4"),
        (EnvelopeStamp("fedavg", 2, 4, "up"), "version: expected 2, found 1"),
        (EnvelopeStamp("fedrand", 1, 4, "up"), "method: expected 'fedrand', found 'fedavg'"),
        (EnvelopeStamp("fedavg", 1, 4, "down"), "direction: expected 'down', found 'up'"),
    ],
)
def test_a_message_of_another_round_method_or_version_is_refused(stamp, match):
    with pytest.raises(WireError, match=match):
        unpack_message(packed(), LAYOUT, stamp)


def test_every_truncation_and_extension_is_refused():
    data = packed()
    for cut in range(0, len(data), 3):
        with pytest.raises(WireError, match="expected"):
            unpack_message(data[:cut], LAYOUT, STAMP)
    for longer in (data + b"\0", data * 2):
        with pytest.raises(
            WireError, match=f"message: expected {len(data)} bytes as its header declares, found {len(longer)}"
        ):
            unpack_message(longer, LAYOUT, STAMP)
    with pytest.raises(WireError, match=r"message: expected at most \d+ bytes for its layout, found"):
        unpack_message(data * 20, LAYOUT, STAMP)


def test_every_flipped_bit_is_refused():
    data = packed()
    length = int.from_bytes(data[4:8], "little")
    end = PREFIX + length
    start = end + -end % 8
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << (position % 8)
        with pytest.raises(WireError):
            unpack_message(bytes(damaged), LAYOUT, STAMP)
    damaged = bytearray(data)
    damaged[start + 5] ^= 4
    with pytest.raises(WireError, match="b: expected checksum"):
        unpack_message(bytes(damaged), LAYOUT, STAMP)


@pytest.mark.parametrize(
    "changes,match",
    [
        ({"fields": "w"}, "header.fields"),
        ({"fields": [["w", "dense float32", [3, 5], -4, "0"]]}, "header.fields"),
        ({"fields": [["w", "dense float32", [3, True], 60, "0"]]}, "header.fields"),
        ({"report": {"diagnosis": 1.0}}, "report diagnosis: unknown name; expected one of"),
        ({"report": {"steps": float("nan")}}, "report steps: expected a finite number within .*, found nan"),
        ({"report": {"steps": "3"}}, "report steps: expected a finite number"),
        ({"scalars": {"note": "x"}}, r"scalars: expected \[\], found \['note'\]"),
        ({"variant": "A"}, "variant: expected one of"),
        ({"layout": "0" * 16}, "layout: expected digest"),
    ],
)
def test_a_forged_header_is_refused(changes, match):
    with pytest.raises(WireError, match=match):
        unpack_message(with_header(packed(), **changes), LAYOUT, STAMP)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)


@pytest.mark.long
@settings(max_examples=400, deadline=None)
@given(key=st.sampled_from(sorted(header_of(packed()))), value=JSON)
def test_any_value_in_any_place_of_a_header_is_decoded_or_refused_and_never_raises_otherwise(key, value):
    with contextlib.suppress(WireError):
        message = unpack_message(with_header(packed(), **{key: value}), LAYOUT, STAMP)
        assert set(message.payload.fields) == set(SPEC)


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, 4), value=JSON)
def test_any_value_in_any_place_of_a_field_s_entry_is_decoded_or_refused(position, value):
    fields = header_of(packed())["fields"]
    fields[0][position] = value
    with contextlib.suppress(WireError):
        message = unpack_message(with_header(packed(), fields=fields), LAYOUT, STAMP)
        assert all(torch.equal(message.payload.fields[n], PAYLOAD.fields[n]) for n in SPEC)


def test_a_declared_size_that_does_not_fit_the_shape_is_refused():
    data = packed()
    fields = header_of(data)["fields"]
    fields[0][3] += 4
    with pytest.raises(WireError, match=r"b: expected 28 bytes for shape \(7,\), found 32"):
        unpack_message(with_header(data, fields=fields), LAYOUT, STAMP)


@pytest.mark.parametrize("data", [b"", MAGIC, b"PK\x03\x04" + bytes(40), MAGIC + b"\xff" * 40])
def test_foreign_bytes_are_refused(data):
    with pytest.raises(WireError, match="expected"):
        unpack_message(data, LAYOUT, STAMP)


def test_a_header_that_inflates_without_end_is_refused():
    bomb = zlib.compress(b"[" + b" " * (32 << 20) + b"]")
    prefix = MAGIC + len(bomb).to_bytes(4, "little") + xxhash.xxh3_64_digest(bomb)[::-1]
    data = prefix.ljust(PREFIX, b"\0") + bomb
    assert len(bomb) < 40_000
    with pytest.raises(WireError, match="message: expected at most"):
        unpack_message(data, LAYOUT, STAMP)
    with pytest.raises(WireError, match="header: it is not zlib data of at most"):
        header_of_slices([data])  # as a site's guard reads it, which knows no layout


def test_words_are_required_and_one_of_their_choices():
    layout = MessageLayout(LAYOUT.fields, (ScalarField("next", "up", ("A", "B")),))
    message = pack_message(layout, STAMP, Payload(PAYLOAD.fields, "", {"next": "B"}), 3)
    assert unpack_message(message, layout, STAMP).payload.scalars == {"next": "B"}
    with pytest.raises(WireError, match="scalars: expected"):
        pack_message(layout, STAMP, PAYLOAD, 3)


def test_digest_changes_with_every_part_of_a_layout():
    field = LAYOUT.fields[0]
    layouts = [
        LAYOUT,
        MessageLayout(LAYOUT.fields[:1]),
        MessageLayout((WireField(field.name, "down", field.codec, field.shape), LAYOUT.fields[1])),
        MessageLayout((WireField(field.name, "up", DenseCodec(torch.float16), field.shape), LAYOUT.fields[1])),
        MessageLayout((WireField(field.name, "up", field.codec, (5, 3)), LAYOUT.fields[1])),
        MessageLayout((WireField(field.name, "up", field.codec, field.shape, variants=("A",)), LAYOUT.fields[1])),
        MessageLayout(LAYOUT.fields, (ScalarField("next", "up", ("A",)),)),
    ]
    assert len({layout.digest for layout in layouts}) == len(layouts)
    assert MessageLayout(LAYOUT.fields[::-1]).digest == LAYOUT.digest


def test_layouts_that_differ_in_their_largest_shape_alone_have_bounds_of_their_own():
    """The digest does not hold it."""
    short, long = (MessageLayout((WireField("x", "up", DenseCodec(), (None,), most=(n,)),)) for n in (10, 1000))
    assert (short.digest, hash(short)) == (long.digest, hash(long))
    assert short != long
    assert [message_bounds(each, "up").message - message_bounds(short, "up").message for each in (short, long)] == [
        0,
        3960,
    ]


def test_header_of_many_fields_stays_small():
    """448 LoRA factors of an 8B model: under 1 % of their bytes, and a few bytes a field."""
    spec = {
        f"model.layers.{i}.self_attn.{m}_proj.lora_{s}": ParamSpec((8, 64))
        for i in range(32)
        for m in "qkvogud"
        for s in "AB"
    }
    payload = Payload({n: torch.zeros(t.shape) for n, t in spec.items()})
    data = pack_message(MessageLayout(dense_fields(spec, "up", "float32")), STAMP, payload, 3)
    assert len(data) - describe_message(data)["payload_bytes"] < 16 * len(spec)
