"""Files encrypted under their owner's key: the state of a site whose node config names a key file.

    magic | key id | salt | role length | role            16, 8, 32, 2 and n bytes: the header, not encrypted
    chunk | tag | chunk | tag | ... | last chunk | tag    1 MiB per chunk, the last one may be shorter; 16 bytes per tag

    file key = HKDF-SHA256(key, salt)                     salt: 32 bytes from the operating system, new for every file
    chunk i  = AES-256-GCM(file key, nonce = i in 11 bytes | 1 if it is the last chunk, else 0, header)

A role says what the file is and to whom it belongs: "state/RUN/SITE". The reader names the role that it expects. The
construction is STREAM: Hoang, Reyhanitabar, Rogaway and Vizar, "Online Authenticated-Encryption and its Nonce-Reuse
Misuse-Resistance", 2015. The key file contains exactly 32 bytes; this module never changes an existing one.

Formal guarantees, as long as only the owner has the key:
- without the key, a file reveals its length, its role and which key encrypted it, but none of its content;
- the bytes that `read` returns were written under that role by someone with the key, complete and in order.

| case | result of `read` |
|---|---|
| a byte changed; chunks swapped, dropped or repeated; the file truncated | StateError |
| replaced by another encrypted file | StateError: its role is different |
| replaced by an older version of the same file | its content: this module cannot tell which version is the latest |
| encrypted under another key; encrypted, but no key is set; not encrypted, but a key is set | StateError |
| not encrypted, and no key is set | its bytes |
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from io import BufferedIOBase
from mmap import mmap
from pathlib import Path
from typing import final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedveil.errors import ConfigError, StateError

Bytes = bytes | bytearray | memoryview | mmap

KEY_BYTES = 32
VARIABLE = "FEDVEIL_KEY_FILE"  # names the key file for processes without a node config
_MAGIC = b"FedVeil sealed\n\x01"  # its last byte is the version
_ID_BYTES, _SALT_BYTES, _TAG_BYTES = 8, 32, 16
_CHUNK_BYTES = 1 << 20


@final
@dataclass(frozen=True)
class FileSeal:
    """How files are stored: encrypted under a key, or unencrypted if there is no key.

    Attributes:
        key: 32 bytes; None = unencrypted.
    """

    key: bytes | None = field(default=None, repr=False)

    @classmethod
    def from_key_file(cls, file: str | Path) -> FileSeal:
        """Return the encryption for a key file; "" means no encryption.

        Raises ConfigError if it is not a valid key file.
        """
        if not str(file):
            return cls()
        missing = "restore it from your copy; without it, encrypted files cannot be read"
        return cls(read_key_file(Path(file).expanduser(), "key-file", missing, "fedveil site key"))

    @classmethod
    def of_environment(cls) -> FileSeal:
        """Return the encryption for processes without a node config: the server, and readers of captured messages."""
        return cls.from_key_file(os.environ.get(VARIABLE, ""))

    @property
    def id(self) -> str:
        """Return 16 hex digits that identify this key; "" without a key."""
        return "" if self.key is None else _derived(self.key, None, b"fedveil key id", _ID_BYTES).hex()

    def closed(self, parts: Iterable[Bytes], role: str) -> Iterator[Bytes]:
        """Encrypt this content into a file, part by part, with at most a few MiB in memory."""
        if self.key is None:
            yield from parts
            return
        salt, name = os.urandom(_SALT_BYTES), role.encode()
        head = _MAGIC + bytes.fromhex(self.id) + salt + len(name).to_bytes(2, "big") + name
        cipher = _cipher(self.key, salt)
        yield head
        for number, (chunk, last) in enumerate(_chunks(parts)):
            yield cipher.encrypt(_nonce(number, last), chunk, head)

    def read(self, path: Path, role: str) -> bytes:
        """Return the content of a file with this role.

        Raises:
            OSError: it cannot be opened.
            StateError: it has a different role, is damaged, or is not encrypted under this key.
        """
        with path.open("rb") as file:
            return b"".join(self.opened(file, role, path))

    def opened(self, file: BufferedIOBase, role: str, path: Path) -> Iterator[bytes]:
        """Decrypt an open file chunk by chunk; the content is complete only after the last chunk."""
        sealed = file.read(len(_MAGIC) - 1) == _MAGIC[:-1]
        file.seek(0)
        if self.key is None or not sealed:
            self._require_clear(sealed, path)
            yield from iter(lambda: file.read(_CHUNK_BYTES), b"")
            return
        head, header = _head(file, path)
        if header.key != self.id:
            raise StateError(
                f"{path}: this file is encrypted under key {header.key}, not {self.id}; name that key's file, or "
                "re-encrypt the state: fedveil site seal --old-key-file"
            )
        if header.role != role:
            raise StateError(
                f"{path}: this is the encrypted file of {header.role!r}, not of {role!r}, so files were swapped; "
                "restore it from a backup"
            )
        cipher, chunk, number = _cipher(self.key, header.salt), file.read(_CHUNK_BYTES + _TAG_BYTES), 0
        while True:
            after = file.read(_CHUNK_BYTES + _TAG_BYTES)
            try:
                yield cipher.decrypt(_nonce(number, not after), chunk, head)
            except InvalidTag:
                raise StateError(
                    f"{path}: chunk {number} of the encrypted file was changed, or its end is missing; restore it "
                    "from a backup"
                ) from None
            if not after:
                return
            chunk, number = after, number + 1

    def _require_clear(self, sealed: bool, path: Path) -> None:
        if self.key is not None:
            raise StateError(
                f"{path}: this file is not encrypted under key {self.id}; if you know that it is the site's own, "
                "stop the site and run fedveil site seal"
            )
        if sealed:
            raise StateError(
                f"{path}: this file is encrypted, but no key file is set; set key-file in the node config, fedveil "
                f"site start --key-file, or {VARIABLE} on the server"
            )


def read_key_file(path: Path, named: str, missing: str, makes: str) -> bytes:
    """Return the 32 bytes of a key file. Raises ConfigError if it is not a key file, or if others can read it.

    Args:
        named: the node config key that names the file.
        missing: the remedy if the file is missing.
        makes: the command that creates a key file.
    """
    try:
        with path.open("rb") as opened:
            about, key = os.fstat(opened.fileno()), opened.read(KEY_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{named}: cannot read the key file {path} ({type(error).__name__}); {missing}") from None
    if not stat.S_ISREG(about.st_mode) or about.st_mode & 0o077:
        raise ConfigError(
            f"{named}: {path} must be readable only by its owner, but has mode {stat.S_IMODE(about.st_mode):o}; "
            "chmod 600 it, and make a new key if others could read it"
        )
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"{named}: expected {KEY_BYTES} bytes in {path}, found {'more' if len(key) > KEY_BYTES else len(key)}; "
            f"make one with {makes}"
        )
    return key


@dataclass(frozen=True)
class SealHeader:
    """Header of an encrypted file: the id of its key, its salt and its role."""

    key: str
    salt: bytes
    role: str


def is_sealed(path: Path) -> bool:
    """Return whether a file begins like an encrypted file of any version. Raises OSError."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC) - 1) == _MAGIC[:-1]


def read_seal_header(path: Path) -> SealHeader:
    """Return an encrypted file's header, unverified. Raises OSError, or StateError for a file that is not encrypted."""
    with path.open("rb") as file:
        return _head(file, path)[1]


def make_key(path: Path) -> FileSeal:
    """Create a key file that only its owner can read. Raises ConfigError if the file already exists."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(os.urandom(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(
            f"key file: cannot create {path} ({type(error).__name__}); choose a new name in an existing folder"
        ) from None
    return FileSeal.from_key_file(path)


def _head(file: BufferedIOBase, path: Path) -> tuple[bytes, SealHeader]:
    fixed = len(_MAGIC) + _ID_BYTES + _SALT_BYTES + 2
    head = file.read(fixed)
    size = int.from_bytes(head[-2:], "big")
    role = file.read(size) if len(head) == fixed else b""
    if head[: len(_MAGIC)] != _MAGIC or len(head) != fixed or len(role) != size:
        raise StateError(
            f"{path}: not an encrypted file of version {_MAGIC[-1]}, or its header is truncated; restore it from a "
            "backup"
        )
    key, salt = head[len(_MAGIC) :][:_ID_BYTES], head[len(_MAGIC) + _ID_BYTES : -2]
    return head + role, SealHeader(key.hex(), salt, role.decode(errors="replace"))


def _chunks(parts: Iterable[Bytes]) -> Iterator[tuple[bytes, bool]]:
    """Yield pairs of a chunk and whether it is the last.

    Chunks have equal size; the last one may be full, shorter or empty.
    """
    buffer = bytearray()
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), _CHUNK_BYTES):
            buffer += view[start : start + _CHUNK_BYTES]
            if len(buffer) > _CHUNK_BYTES:
                yield bytes(buffer[:_CHUNK_BYTES]), False
                del buffer[:_CHUNK_BYTES]
    yield bytes(buffer), True


def _nonce(number: int, last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([last])


def _cipher(key: bytes, salt: bytes) -> AESGCM:
    return AESGCM(_derived(key, salt, b"fedveil sealed file", KEY_BYTES))


def _derived(key: bytes, salt: bytes | None, purpose: bytes, length: int) -> bytes:
    return HKDF(SHA256(), length, salt, purpose).derive(key)
