"""Content of a relay message ("letter"): an order with everything that a SuperNode would request, or a reply.

    JSON length       4 bytes, big endian
    JSON              {"version": 2, "sizes": {part: bytes}, ...}, at most 16 KiB
    parts             in name order

| content | other keys in the JSON | parts |
|---|---|---|
| Order | made, expires (ms since 1970 by the server's clock), node | bundle (Flower's Fab), message, run: protobuf |
| Reply | order (a letter's id), code, reason, log, signature, seconds | upload |

An order comes from the other end, and its parts are parsed like parts from a SuperLink. A reply contains the
bytes of an upload and a few texts of limited size. No Flower objects are parsed from it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedveil.errors import StateError, WireError
from fedveil.federation.message_signatures import claims
from fedveil.records.audit_log import LogHead
from fedveil.sanitize import sanitize

_VERSION = 2
_LENGTH, _LONGEST = 4, 16_384
_MOST_MS = 31 * 86_400_000  # between `made` and `expires`: a round lasts at most 30 days
_REASON = 2000  # characters; the same limit as the guard's
_CODES = range(1, 9)  # Flower's ErrorCode
_SIGNATURE = re.compile(r"([0-9a-f]{16}:[0-9a-f]{128})?")


@dataclass(frozen=True)
class RelayRequest:
    """A message from the server, with its run and its bundle.

    Attributes:
        made, expires: ms since 1970 by the writer's clock; after `expires`, the server no longer waits.
        node: Flower's ID for the site's node.
        bundle, message, run: protobuf.
    """

    made: int
    expires: int
    node: int
    bundle: bytes
    message: bytes
    run: bytes

    def packed(self) -> list[bytes]:
        """Encode the content of the letter, in parts."""
        return _packed(
            {"made": self.made, "expires": self.expires, "node": self.node},
            {"bundle": self.bundle, "message": self.message, "run": self.run},
        )

    @classmethod
    def from_bytes(cls, content: bytes) -> RelayRequest:
        """Parse an order. Raises WireError if `content` is not a valid order."""
        about, parts = _unpacked(content, {"made": int, "expires": int, "node": int}, ("bundle", "message", "run"))
        order = cls(**about, bundle=parts["bundle"], message=parts["message"], run=parts["run"])
        if not 0 < order.made < order.expires <= order.made + _MOST_MS or not 0 < order.node < 1 << 64:
            raise WireError(
                f"order: it must expire within 31 days and name a node; it was made at {order.made}, expires at "
                f"{order.expires} and names node {order.node}; both ends need the same version"
            )
        return order


@dataclass(frozen=True)
class RelayReply:
    """A site's answer: an upload with its log's anchor, or the reason why there is no upload.

    Attributes:
        order: id of the order's letter.
        code: 0 if there is an upload; otherwise Flower's error code.
        reason: "" if there is an upload.
        log: anchor of the site's audit log; "" if there is none.
        signature: key and signature of the site's signature record, as "KEY:SIGNATURE" in hex; "" if there is none.
        seconds: running time of the site's client process, as reported by its SuperNode.
        upload: b"" if there is an error.
    """

    order: str
    code: int
    reason: str
    log: str
    signature: str
    seconds: float
    upload: bytes

    def packed(self) -> list[bytes]:
        """Encode the content of the letter, in parts."""
        about = {"order": self.order, "code": self.code, "reason": self.reason, "log": self.log}
        about |= {"signature": self.signature, "seconds": self.seconds}
        return _packed(about, {"upload": self.upload})

    @property
    def signature_record(self) -> dict[str, str | int] | None:
        """Return the reply's signature record as made by the site's guard; None if there is none."""
        key, _, signature = self.signature.partition(":")
        return {"version": claims.VERSION, "key": key, "signature": signature} if key else None

    @classmethod
    def from_bytes(cls, content: bytes) -> RelayReply:
        """Parse a reply. Raises WireError if `content` is not a valid reply."""
        kinds = {"order": str, "code": int, "reason": str, "log": str, "signature": str, "seconds": float}
        about, parts = _unpacked(content, kinds, ("upload",))
        reply = cls(**about, upload=parts["upload"])
        if not re.fullmatch("[0-9a-f]{32}", reply.order):
            raise WireError(
                f"reply: order: expected 32 hex digits, found {sanitize(reply.order, 80)}; ask for it again"
            )
        if bool(reply.code) == bool(reply.upload) or reply.code not in (0, *_CODES) or len(reply.reason) > _REASON:
            raise WireError(
                f"reply: it must have an upload, or a code in {_CODES} and a reason of at most {_REASON} characters, "
                f"but has {len(reply.upload)} bytes, code {reply.code} and {len(reply.reason)} characters; ask for it "
                "again"
            )
        if not math.isfinite(reply.seconds) or reply.seconds < 0:
            raise WireError(f"reply: seconds: expected 0 or more, found {reply.seconds}; ask for it again")
        try:
            anchor = str(LogHead.parse(reply.log)) if reply.log else ""
        except StateError as error:
            raise WireError(f"reply: log: {error}") from None
        if not _SIGNATURE.fullmatch(reply.signature):
            raise WireError(
                f"reply: signature: expected a key and a signature in hex, or nothing, found "
                f"{sanitize(reply.signature, 80)}; ask for it again"
            )
        return replace(reply, reason=sanitize(reply.reason, _REASON), log=anchor)


def _packed(about: Mapping[str, Any], parts: Mapping[str, bytes]) -> list[bytes]:
    sizes = {name: len(part) for name, part in parts.items()}
    head = json.dumps({**about, "version": _VERSION, "sizes": sizes}).encode()
    return [len(head).to_bytes(_LENGTH, "big"), head, *(parts[name] for name in sorted(parts))]


def _unpacked(
    content: bytes, kinds: Mapping[str, type], names: tuple[str, ...]
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Parse content that must have exactly these values and parts. Raises WireError."""
    length = int.from_bytes(content[:_LENGTH], "big")
    try:
        about = json.loads(content[_LENGTH : _LENGTH + length]) if length <= _LONGEST else None
        if not isinstance(about, dict) or set(about) != {*kinds, "version", "sizes"}:
            raise ValueError("wrong names")
        version, sizes = about.pop("version"), about.pop("sizes")
        if type(version) is not int or version != _VERSION:
            raise WireError(
                f"relay file: expected version {_VERSION}, found {sanitize(version, 20)}; update the end that has the "
                "older version of FedVeil"
            )
        if any(type(about[name]) is not kind for name, kind in kinds.items()) or set(sizes) != set(names):
            raise ValueError("wrong types")
        if any(type(size) is not int or size < 0 for size in sizes.values()):
            raise ValueError("wrong sizes")
        start = _LENGTH + length
        if start + sum(sizes.values()) != len(content):
            raise ValueError("wrong length")
    except (ValueError, TypeError, RecursionError) as error:
        raise WireError(
            f"relay file: it does not consist of {', '.join(kinds)} and {', '.join(names)} "
            f"({sanitize(error, 80)}); both ends need the same version"
        ) from None
    parts = {}
    for name in sorted(names):
        parts[name] = content[start : start + sizes[name]]
        start += sizes[name]
    return about, parts
