r"""A relay message ("letter"): an encrypted, signed file that any carrier takes from one end of a relay to the other.

    "FedVeil relay 1\n"    16 bytes
    body                   the content, encrypted by fedveil/encrypted_files.py with the letter's own key and the role
                           "KIND/ID"
    header                 JSON of `MessageHeader`, at most 1,024 bytes
    signature              64 bytes: Ed25519 by the sender, over "fedveil relay 1", "letter" and the header
    header length          4 bytes, big endian

    ephemeral   = X25519 key pair, new for every letter; the header contains its public half
    letter's key = HKDF-SHA256(X25519(ephemeral, recipient's key), [version, "letter", kind, id, sender, recipient])
    body        = SHA-256 of the encrypted body, in the header, so that the signature covers every byte

The signature is at the end, so that a letter can be written in one pass. A truncated file has no signature.

Formal guarantees, if only this end has its relay.key, and the peer file really comes from the other end:

- The carrier of a letter sees its kind, its size and both ends' ids, but none of its content. This holds
  even if the sender's relay.key leaks later, because the ephemeral private key is not stored.
- Anything that `decrypt_message` returns was written by the other end, for this end, with this kind and id,
  and is complete.

| case | result of `decrypt_message` |
|---|---|
| truncated at any byte, or still being copied | IncompleteMessageError |
| a byte changed, added or removed; parts of two letters joined | WireError |
| wrong sender, recipient or kind | WireError, naming the actual value |
| more than `most_bytes` | WireError, before any byte is read |
| the same letter a second time | decrypted again: the receiver must remember letter ids |
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from fedveil.encrypted_files import Bytes, FileSeal
from fedveil.errors import StateError, WireError
from fedveil.federation.secagg import crypto as ciphers
from fedveil.relay.keys import EndpointSecret, PeerKeys, context_bytes
from fedveil.sanitize import sanitize

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

ORDER, REPLY = "order", "reply"
_MAGIC = b"FedVeil relay 1\n"
_SIGNATURE, _LENGTH, _LONGEST_HEAD = 64, 4, 1024
_FORMS = {"kind": "order|reply", "id": "[0-9a-f]{32}", "sender": "[0-9a-f]{16}", "recipient": "[0-9a-f]{16}",
          "ephemeral": "[0-9a-f]{64}", "body": "[0-9a-f]{64}"}  # fmt: skip
_PIECE = 1 << 20


class IncompleteMessageError(WireError):
    """Raised for an incomplete letter: the file was truncated, or is still being copied."""


@dataclass(frozen=True)
class MessageHeader:
    """The unencrypted header of a relay message.

    Attributes:
        kind: ORDER or REPLY.
        id: 32 hex digits, drawn by the sender.
        sender, recipient: ids of the two ends' keys.
        ephemeral: the message's own X25519 key, hex.
        body: SHA-256 of the encrypted body, hex.
    """

    kind: str
    id: str
    sender: str
    recipient: str
    ephemeral: str
    body: str

    def to_bytes(self) -> bytes:
        """Return the header as canonical JSON."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()


def encrypt_message(
    content: Iterable[Bytes], kind: str, id_: str, own: EndpointSecret, peer: PeerKeys
) -> Iterator[Bytes]:
    """Encrypt and sign this content as a relay message; yield its bytes part by part."""
    private = os.urandom(ciphers.KEY_BYTES)
    key = ciphers.agree_secret(private, peer.sealing, context_bytes("letter", kind, id_, own.public.id, peer.id))
    digest = hashlib.sha256()
    yield _MAGIC
    for part in FileSeal(key).closed(content, f"{kind}/{id_}"):
        digest.update(part)
        yield part
    head = MessageHeader(
        kind, id_, own.public.id, peer.id, ciphers.public_key_of(private).hex(), digest.hexdigest()
    ).to_bytes()
    yield head
    yield ciphers.sign_bytes(own.signing, context_bytes("letter") + head)
    yield len(head).to_bytes(_LENGTH, "big")


def decrypt_message(
    file: BinaryIO, name: str, kind: str, own: EndpointSecret, peer: PeerKeys, most_bytes: int
) -> tuple[MessageHeader, bytes]:
    """Decrypt and verify one relay message of this kind; return its header and content.

    Args:
        file: a seekable binary file; only read at offsets.
        name: the file's name, for error messages.

    Raises:
        WireError, IncompleteMessageError: as in the module's table.
    """
    size = file.seek(0, os.SEEK_END)
    if size > most_bytes:
        raise WireError(f"{name}: it has {size:,} bytes; at most {most_bytes:,} are allowed; see --most-mb")
    head, signature, start, end = _tail(file, size, name)
    header = _read(head, name)
    for what, expected, value in (
        ("kind", kind, header.kind),
        ("sender", peer.id, header.sender),
        ("recipient", own.public.id, header.recipient),
    ):
        if value != expected:
            raise WireError(f"{name}: {what}: expected {expected}, found {value}; it is for another relay")
    if not ciphers.is_signed(peer.verifying, signature, context_bytes("letter") + head):
        raise WireError(f"{name}: it has no valid signature by the other end, {peer.id}; ask for the file again")
    if _digest(file, start, end) != header.body:
        raise WireError(f"{name}: its bytes are not the signed ones; ask for it again")
    purpose = context_bytes("letter", kind, header.id, header.sender, header.recipient)
    key = ciphers.agree_secret(own.opening, bytes.fromhex(header.ephemeral), purpose)
    body = io.BufferedReader(_Part(file, start, end), _PIECE)
    try:
        return header, b"".join(FileSeal(key).opened(body, f"{kind}/{header.id}", Path(name)))
    except StateError:
        raise WireError(
            f"{name}: it does not decrypt, so it was not encrypted for this end; ask for it again"
        ) from None


def _tail(file: BinaryIO, size: int, name: str) -> tuple[bytes, bytes, int, int]:
    """Return header, signature, and the offsets where the body begins and ends."""
    file.seek(0)
    if not _MAGIC.startswith(begin := file.read(len(_MAGIC))):
        raise WireError(f"{name}: it is not a relay file of version 1; skip it")
    file.seek(max(0, size - _LENGTH))
    length = int.from_bytes(file.read(_LENGTH), "big")
    end = size - _LENGTH - _SIGNATURE - length
    if len(begin) < len(_MAGIC) or not 0 < length <= _LONGEST_HEAD or end < len(_MAGIC):
        raise IncompleteMessageError(f"{name}: only the beginning of the file is here; copy it again")
    file.seek(end)
    return file.read(length), file.read(_SIGNATURE), len(_MAGIC), end


def _read(head: bytes, name: str) -> MessageHeader:
    try:
        content = json.loads(head)
        if not isinstance(content, dict) or set(content) != {field.name for field in fields(MessageHeader)}:
            raise ValueError
        if not all(isinstance(value, str) and re.fullmatch(_FORMS[key], value) for key, value in content.items()):
            raise ValueError
        header = MessageHeader(**content)
        if header.to_bytes() != head:
            raise ValueError
    except (ValueError, RecursionError):
        raise IncompleteMessageError(
            f"{name}: it has no header at its end, but {sanitize(head[:40])}; copy it again"
        ) from None
    return header


def _digest(file: BinaryIO, start: int, end: int) -> str:
    digest = hashlib.sha256()
    file.seek(start)
    while (left := end - file.tell()) > 0 and (piece := file.read(min(_PIECE, left))):
        digest.update(piece)
    return digest.hexdigest()


class _Part(io.RawIOBase):
    """A section of a file as a separate file object."""

    def __init__(self, file: BinaryIO, start: int, end: int) -> None:
        self._file, self._start, self._size, self._at = file, start, end - start, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        self._file.seek(self._start + self._at)
        piece = self._file.read(max(0, min(len(view), self._size - self._at)))
        view[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)
