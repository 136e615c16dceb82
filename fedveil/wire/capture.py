"""Message capture: records the bytes on the wire, which are exactly the data that the other side could see.

    <folder>/index.jsonl            one line per message: round, attempt, site, direction, file, accepted
    <folder>/00003.0.site-1.up      the message, byte for byte; encrypted if there is a key file
    (fedveil.encrypted_files)

Capture is off unless `run.capture-messages` is set, because a capture is as sensitive as the messages. Attacks use
only a capture and the knowledge that they declare.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fedveil import paths
from fedveil.contract.codec import Buffer
from fedveil.contract.layout import Direction
from fedveil.encrypted_files import FileSeal
from fedveil.errors import StateError

__all__ = ["CapturedMessage", "MessageCapture"]


@dataclass(frozen=True)
class CapturedMessage:
    """One captured message. `accepted` is None for a broadcast."""

    round: int
    attempt: int
    site: str
    direction: Direction
    file: str
    accepted: bool | None = None


class MessageCapture:
    """A folder of recorded messages that a run appends to and attacks read."""

    def __init__(self, folder: Path, seal: FileSeal = FileSeal()) -> None:
        self.folder, self._seal = folder, seal

    def write(
        self, data: Buffer, round_: int, attempt: int, site: str, direction: Direction, accepted: bool | None = None
    ) -> None:
        """Append one message. The first message creates the folder, which only its owner can read.

        A resumed run repeats messages. An identical message is stored only once; a different message is stored next
        to the first one.
        """
        paths.private_folder(self.folder)
        safe_site = re.sub(r"[^A-Za-z0-9_.-]", "_", site)
        seen = CapturedMessage(
            round_, attempt, site, direction, f"{round_:05d}.{attempt}.{safe_site}.{direction}", accepted
        )
        name, again = seen.file, 1
        while (self.folder / seen.file).exists():
            if self.read(seen) == data and (self.folder / "index.jsonl").exists() and seen in self.messages():
                return
            again += 1
            seen = replace(seen, file=f"{name}.{again}")
        with (self.folder / seen.file).open("wb") as file:
            file.writelines(self._seal.closed([data], self._role(seen)))
        with (self.folder / "index.jsonl").open("a") as index:
            index.write(json.dumps(asdict(seen)) + "\n")

    def messages(self) -> Iterator[CapturedMessage]:
        """Yield every message in recorded order. Raises StateError if there is no capture or the index is damaged."""
        index = self.folder / "index.jsonl"
        if not index.is_file():
            raise StateError(
                f"{self.folder}: there are no captured messages (index.jsonl); run with run.capture-messages = true"
            )
        for number, line in enumerate(index.read_text().splitlines(keepends=True), 1):
            if not line.endswith("\n"):
                return  # the line is still being written, or its writer was killed
            try:
                yield CapturedMessage(**json.loads(line))
            except (ValueError, TypeError, RecursionError):
                raise StateError(
                    f"{index}, line {number}: this is not a message's entry but {line[:40]!r}; it was damaged"
                ) from None

    def read(self, seen: CapturedMessage) -> bytes:
        """Return one message's bytes. Raises StateError for a file that is not encrypted as expected."""
        return self._seal.read(self.folder / seen.file, self._role(seen))

    def _role(self, seen: CapturedMessage) -> str:
        return f"tap/{self.folder.absolute().parent.name}/{seen.file}"
