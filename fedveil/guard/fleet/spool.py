"""Incomplete replies on the server's disk.

    <folder>/<node>/<session>/reply.json      the site's call, in the form that Flower gets
                              <object id>     the object's bytes

Formal guarantees:
- a reply file is either complete or absent, even if a process is killed (`put_object` renames files);
- no other user on the machine can read a reply: folders have mode 0700, and files have mode 0600;
- site input cannot choose a path: the server generates the session name, and ids are 64 hex digits.

| present at startup | result |
|---|---|
| a folder with a readable reply.json | its reply; the caller checks the reply and each of its objects again |
| a folder without a readable reply.json, a link, any other file | removed |
| a partial file from a killed process | removed |

After a power failure, a file can contain wrong bytes. Then its hash does not match, and the caller removes the file.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path

from flwr.supercore import log

from fedveil.guard import fleet_limits as limits
from fedveil.paths import private_folder
from fedveil.wire.flower_objects import is_object_id

_NAME = "reply.json"
_NODE = re.compile(r"[0-9]{1,20}")
_SESSION = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_MAX_JSON_BYTES = 2 * limits.MAX_ANNOUNCEMENT_CALL_BYTES


@dataclass(frozen=True)
class SpooledReply:
    """A reply left by an earlier process: the call that announced it, and the stored objects."""

    node_id: int
    session: str
    request: bytes
    object_ids: tuple[str, ...]


class ReplySpool:
    """The reply files in `folder`. Every method raises OSError if the disk fails."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add_reply(self, node_id: int, session: str, request: bytes) -> None:
        """Create the folder for a reply."""
        private_folder(self._of(node_id, session))
        content = {"request": base64.b64encode(request).decode()}
        self._write(self._of(node_id, session) / _NAME, json.dumps(content).encode())

    def put_object(self, node_id: int, session: str, object_id: str, content: bytes) -> None:
        """Write an object of a reply, replacing an earlier file for the same object."""
        self._write(self._of(node_id, session) / object_id, content)

    def read_object(self, node_id: int, session: str, object_id: str) -> bytes:
        """Return the bytes of an object."""
        return (self._of(node_id, session) / object_id).read_bytes()

    def remove_object(self, node_id: int, session: str, object_id: str) -> None:
        """Remove an object if it exists."""
        (self._of(node_id, session) / object_id).unlink(missing_ok=True)

    def remove_reply(self, node_id: int, session: str) -> None:
        """Remove all files of a reply; with the site's last reply, also remove the site's folder."""
        shutil.rmtree(self._of(node_id, session), ignore_errors=True)  # leftovers are removed at the next start
        with contextlib.suppress(OSError):  # the site still has other replies
            (self.folder / str(node_id)).rmdir()

    def free_bytes(self) -> int:
        """Return the free bytes on the disk."""
        private_folder(self.folder)
        return shutil.disk_usage(self.folder).free

    def read_replies(self) -> Iterator[SpooledReply]:
        """Yield the replies left by an earlier process, and remove everything else in the folder."""
        private_folder(self.folder)
        for node in sorted(self.folder.iterdir()):
            if not _NODE.fullmatch(node.name) or node.is_symlink() or not node.is_dir():
                _remove(node)
                continue
            for session in sorted(node.iterdir()):
                reply = self._read(node, session)
                if reply is None:
                    _remove(session)
                else:
                    yield reply

    def _read(self, node: Path, session: Path) -> SpooledReply | None:
        if not _SESSION.fullmatch(session.name) or session.is_symlink() or not session.is_dir():
            return None
        for file in session.iterdir():
            if file.is_symlink() or not file.is_file() or not (file.name == _NAME or is_object_id(file.name)):
                _remove(file)
        try:
            with (session / _NAME).open("rb") as call:
                content = json.loads(call.read(_MAX_JSON_BYTES))
            request = base64.b64decode(content["request"], validate=True)
        except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError) as error:
            log(WARNING, "%s: not a readable reply (%s); removing it", session, type(error).__name__)
            return None
        objects = tuple(sorted(file.name for file in session.iterdir() if file.name != _NAME))
        return SpooledReply(int(node.name), session.name, request, objects)

    def _of(self, node_id: int, session: str) -> Path:
        return self.folder / str(node_id) / session

    @staticmethod
    def _write(file: Path, content: bytes) -> None:
        partial = file.with_name(f".{file.name}.{os.urandom(8).hex()}.part")
        try:
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as to:
                to.write(content)
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
