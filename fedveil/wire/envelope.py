"""The envelope: one message as bytes.

    offset 0   magic "FVL3" (4 bytes)
    4          length of the header (uint32, little endian)
    8          xxh3-64 of the header (uint64, little endian)
    16         digest of the address: run, attempt and, for an upload, site (16 bytes)
    32         header: zlib of JSON, see `_header`
    ...        each field's bytes, at the next multiple of 8, sorted by name; zeros between them

The header has method, version, round, direction, variant, the layout's digest, and each field's name, codec, shape,
size and xxh3-64. An upload's header also has the `turn`: the site's name for the private state that it keeps with the
upload. A receiver refuses a message that does not match its own layout, and names the field. The checksums detect
accidental damage; TLS protects against an adversary on the network. The address prevents confusion with another run,
attempt or site.

A message has exactly one encoding: the order of fields and keys, the JSON text, padding and length are fixed, and a
receiver refuses any other form. Only the zlib compression of the same text may vary between zlib versions.
"""

from __future__ import annotations

import json
import mmap
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from fedveil.contract import held_out_report
from fedveil.contract.codec import Buffer, Value
from fedveil.contract.layout import Direction, MessageLayout, Payload
from fedveil.contract.message_address import MessageAddress
from fedveil.contract.method import Method
from fedveil.contract.param_spec import LazyMapping
from fedveil.errors import WireError
from fedveil.wire import header as header_
from fedveil.wire import validation
from fedveil.wire.field_reader import FieldReadJob
from fedveil.wire.mmap_tensors import MmapTensors

__all__ = [
    "DecodedMessage",
    "EnvelopeStamp",
    "PackedMessage",
    "describe_message",
    "pack_message",
    "pack_message_parts",
    "unpack_message",
]

_PARALLEL_BYTES = 8 << 20  # below this size, a thread costs more than it saves
_POOL = ThreadPoolExecutor(2, thread_name_prefix="fedveil-wire")


@dataclass(frozen=True)
class EnvelopeStamp:
    """The values that both ends must agree on before the receiver reads a field."""

    method: str
    version: int
    round: int
    direction: Direction
    address: MessageAddress | None = MessageAddress()

    @classmethod
    def from_exchange(
        cls,
        method: Method,
        name: str,
        round_: int,
        direction: Direction,
        address: MessageAddress | None = MessageAddress(),
    ) -> EnvelopeStamp:
        """Create the stamp for a method's message; without an address, for a message from a capture."""
        return cls(name, method.version, round_, direction, address)


@dataclass(frozen=True)
class DecodedMessage:
    """A decoded message.

    Attributes:
        payload: the fields; tensors may be views of the received bytes.
        num_examples: the received number, not yet checked; None for a broadcast.
        report: metrics that the client reports; names and values are checked.
        turn: the site's name for this client round; "" if it keeps no private state, and for a broadcast.
        field_bytes: size in raw bytes by field name.
        disclosed: the message's disclosures, in the form of `describe_message`.
        norms: Euclidean norm of each floating-point field, computed along with its checksum. It is not finite if any
            value is not finite or the squares overflow.
    """

    payload: Payload
    num_examples: Any = None
    report: Mapping[str, Any] = field(default_factory=dict)
    turn: str = ""
    field_bytes: Mapping[str, int] = field(default_factory=dict)
    norms: Mapping[str, float] = field(default_factory=dict)
    disclosed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def payload_bytes(self) -> int:
        """Return the total size of all fields in raw bytes, without the envelope."""
        return sum(self.field_bytes.values())


def pack_message(
    layout: MessageLayout,
    stamp: EnvelopeStamp,
    payload: Payload,
    num_examples: int | None = None,
    report: Mapping[str, float] | None = None,
    turn: str = "",
) -> bytes:
    """Encode a message. Raises WireError for a payload that the layout does not declare."""
    return b"".join(pack_message_parts(layout, stamp, payload, num_examples, report, turn).parts)


@dataclass(frozen=True)
class PackedMessage:
    """A message to send.

    Attributes:
        parts: bytes to concatenate. Dense fields are views of the payload's tensors, not copies.
        disclosed: the message's disclosures, in the form of `describe_message`.
    """

    parts: list[Buffer]
    disclosed: Mapping[str, Any]


def pack_message_parts(
    layout: MessageLayout,
    stamp: EnvelopeStamp,
    payload: Payload,
    num_examples: int | None = None,
    report: Mapping[str, float] | None = None,
    turn: str = "",
) -> PackedMessage:
    """Encode the same message as `pack_message`, but in parts."""
    declared = layout.fields_of(stamp.direction, payload.variant)
    validation.check_names(layout, stamp.direction, payload.variant, payload.fields)
    validation.check_scalars(layout, stamp.direction, payload.scalars)
    validation.check_report(report or {})
    entries: list[list[Any]] = []
    parts: list[Buffer] = []
    for name, value in sorted(payload.fields.items()):
        codec, shape = declared[name].codec, declared[name].codec.shape(value)
        validation.check_shape(declared[name], shape)
        encoded = codec.encode(value)
        size, checksum = sum(len(p) for p in encoded), xxhash.xxh3_64()
        for part in encoded:
            checksum.update(part)
        entries.append([name, codec.name, list(shape), size, checksum.hexdigest()])
        parts += [*encoded, bytes(-size % 8)]
    words = {"turn": turn, "num_examples": num_examples, "report": dict(report or {})}
    header = _header(layout, stamp, payload, entries, words)
    prefix = header_.MAGIC + len(header).to_bytes(4, "little") + xxhash.xxh3_64_digest(header)[::-1]
    prefix += (stamp.address or MessageAddress()).digest
    parts = [prefix, header, bytes(-(header_.PREFIX + len(header)) % 8), *parts]
    return PackedMessage(
        parts, _disclosed(payload.variant, entries, payload.scalars, report or {}, sum(map(len, parts)))
    )


def _header(
    layout: MessageLayout, stamp: EnvelopeStamp, payload: Payload, entries: list[list[Any]], words: Mapping[str, Any]
) -> bytes:
    content = {
        "method": stamp.method, "version": stamp.version, "round": stamp.round, "direction": stamp.direction,
        "variant": payload.variant, "layout": layout.digest, "fields": entries, "scalars": dict(payload.scalars),
        **words,
    }  # fmt: skip
    return zlib.compress(header_.write_header(content), 6)


def unpack_message(
    data: Buffer, layout: MessageLayout, stamp: EnvelopeStamp, device: torch.device | None = None
) -> DecodedMessage:
    """Decode the message in `data`, which must have this stamp and layout.

    No field is copied: dense fields are views of `data`, which must not change. For a message in a file
    (`mmap_tensors`), each access to a field releases the pages read for other fields. With a `device`, fields
    with device-decodable codecs are decoded there, again at every access. Such an access raises WireError for
    faults that only decoding reveals.

    Raises:
        WireError: the message is refused; the error names the field and what is wrong with it.
    """
    whole = memoryview(data).cast("B")
    bounds = validation.message_bounds(layout, stamp.direction)
    if len(whole) > bounds.message:
        raise WireError(f"message: expected at most {bounds.message} bytes for its layout, found {len(whole)}")
    header, offset = header_.read_header(whole, bounds.header)
    for key in ("method", "version", "round", "direction"):
        _expect(key, getattr(stamp, key), header.get(key))
    if stamp.address is not None and whole[16 : header_.PREFIX] != stamp.address.digest:
        raise WireError(f"address: expected {stamp.address}; this message is of another run, attempt or site")
    if header.get("layout") != (expected := layout.digest):
        _explain_layout(layout, stamp.direction, header)
        raise WireError(
            f"layout: expected digest {expected}, found {header_.short_value(header['layout'])}; run one version "
            "on both ends"
        )
    if stamp.direction == "down":
        _expect("turn", "", header["turn"])
    variant = header.get("variant")
    if variant not in layout.variants(stamp.direction):
        raise WireError(f"variant: expected one of {layout.variants(stamp.direction)}, found {variant!r}")
    validation.check_names(layout, stamp.direction, variant, [entry[0] for entry in header["fields"]])
    validation.check_scalars(layout, stamp.direction, header["scalars"])
    validation.check_report(header["report"])
    _check_length(header["fields"], offset, len(whole))
    declared = layout.fields_of(stamp.direction, variant)
    _expect("fields", sorted(declared), [entry[0] for entry in header["fields"]])
    jobs, sizes = [], {}
    for entry in header["fields"]:
        name, size = entry[0], entry[3]
        jobs.append(FieldReadJob(whole[offset : offset + size], declared[name], entry, device))
        sizes[name] = size
        end = offset + size + -size % 8
        header_.check_padding(name, whole[offset + size : end])
        offset = end
    read = list(_POOL.map(FieldReadJob.read, jobs)) if offset > _PARALLEL_BYTES else [job.read() for job in jobs]
    readers = {job.name: give for job, (give, _) in zip(jobs, read, strict=True)}
    norms = {job.name: norm for job, (_, norm) in zip(jobs, read, strict=True) if norm is not None}
    made = LazyMapping(declared, lambda name: readers[name]())  # in the layout's order
    fields: Mapping[str, Value] = dict(made) if device is None else made
    payload = Payload(MmapTensors(fields, data) if isinstance(data, mmap.mmap) else fields, variant, header["scalars"])
    disclosed = _disclosed(variant, header["fields"], header["scalars"], header["report"], len(whole))
    return DecodedMessage(payload, header["num_examples"], header["report"], header["turn"], sizes, norms, disclosed)


def _check_length(entries: list[list[Any]], offset: int, found: int) -> None:
    expected = offset + sum(size + -size % 8 for _, _, _, size, _ in entries)
    if found != expected:
        raise WireError(f"message: expected {expected} bytes as its header declares, found {found}")


def _expect(key: str, expected: object, found: object) -> None:
    if expected != found:
        raise WireError(f"{key}: expected {expected!r}, found {found!r}")


def _explain_layout(layout: MessageLayout, direction: Direction, header: Mapping[str, Any]) -> None:
    """Raise a WireError that names the first differing field, if the difference is in the fields that were sent."""
    variant = header["variant"]
    if variant in layout.variants(direction):
        validation.check_names(layout, direction, variant, [entry[0] for entry in header["fields"]])
        for name, declared in layout.fields_of(direction, variant).items():
            for field_name, codec_name, shape, _, _ in header["fields"]:
                if field_name == name:
                    _expect(f"{name}: codec", declared.codec.name, codec_name)
                    validation.check_shape(declared, tuple(shape))


def describe_message(data: Buffer) -> dict[str, Any]:
    """Return a message's disclosures, from its header only, for the run folder's disclosure record.

    The keys are bytes (of the whole message), payload_bytes, variant, scalars, fields as [name, codec,
    shape, bytes], and, if the run has held-out scores, figures: their bytes by name.
    """
    whole = memoryview(data).cast("B")
    header, _ = header_.read_header(whole)
    return _disclosed(header["variant"], header["fields"], header["scalars"], header["report"], len(whole))


def _disclosed(
    variant: str,
    entries: Sequence[Sequence[Any]],
    scalars: Mapping[str, Any],
    report: Mapping[str, Any],
    total_bytes: int,
) -> dict[str, Any]:
    return {
        "variant": variant,
        "bytes": total_bytes,
        "payload_bytes": sum(entry[3] for entry in entries),
        "fields": [list(entry[:4]) for entry in entries],
        "scalars": dict(scalars),
        "figures": {name: len(json.dumps(value)) for name, value in held_out_report.held_out_metrics(report).items()},
    }
