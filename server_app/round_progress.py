"""Write progress.json in the run folder: the current round, its start, the requests and the replies so far.

    {"round": 1, "attempt": 0, "phase": "round", "since": 1795383097.1, "deadline_seconds": 600.0, "quorum": 2,
     "asked": 4, "accepted": 2, "failed": 1, "waiting": ["south"], "reasons": {"west": "refused: ..."}}

| phase | meaning |
|---|---|
| "waiting" | no message of the attempt has been sent: the server waits for sites, or asks them for keys |
| "round" | messages have been sent; once `waiting` is empty, the server aggregates and scores |
| "done" | the attempt is recorded in metrics.jsonl |

While too few sites take part, `there` is their number. The run waits for more sites until `until`, but not for those
in `refused`:

    {..., "phase": "waiting", "until": 1795383397.1, "there": 2, "refused": {"west": "its policy"}}

`"unseen": true` marks secure aggregation, in which the server asks the sites for shares after all have answered.
`round` and `attempt` count from 0; `since` is the time of the last message to a site, in seconds since 1970. The
file is small: it names at most `NAMED` missing sites, and as many reasons. Flower allows one reply per message, so
only the site itself knows how far its training has progressed (`fedveil site status`).

The file is for monitoring only. It is replaced atomically but not synced, and a disk error does not stop the round.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from itertools import islice
from logging import WARNING, getLogger
from pathlib import Path
from typing import Any, final

from fedveil.server_app.metrics.samples import Sizes

log = getLogger("flwr").log  # Flower's own logger; a run in one process has no Flower

NAME = "progress.json"
NAMED = 20


@final
class RoundProgressFile:
    """Writes one run folder's progress file. It receives the same events as the folder."""

    def __init__(self, folder: Path) -> None:
        self.deadline_seconds, self.quorum, self.unseen = 0.0, 0, False
        self._file, self._writes = folder / NAME, True
        self._at = (-1, -1)
        self._phase, self._since = "waiting", time.time()
        self._waiting: dict[str, bool] = {}  # an ordered set: every value is True
        self._accepted = 0
        self._failed: dict[str, str] = {}
        self._sizes: dict[str, dict[str, int]] = {}
        self._awaited: dict[str, Any] = {}

    @property
    def sizes(self) -> Sizes:
        """Return the bytes by site for the current attempt, or the last one."""
        return self._sizes

    def waits(self, round_: int) -> None:
        """Record that a round begins and that no site has been asked yet."""
        self._begin((round_, 0), [])
        self._phase = "waiting"
        self._write()

    def awaits(self, there: int, seconds: float, refused: Mapping[str, str]) -> None:
        """Record that only `there` sites take part, and how long the run waits for others that have not refused."""
        named = dict(islice(refused.items(), NAMED))
        self._awaited = {"until": round(time.time() + seconds, 3), "there": there, "refused": named}
        self._phase = "waiting"
        self._write()

    def asked(self, round_: int, attempt: int, cohort: list[str], site: str, size: int) -> None:
        """Record that a message to one of the cohort's sites is about to be sent."""
        if self._phase != "round" or self._at != (round_, attempt):
            self._begin((round_, attempt), cohort)
            self._phase = "round"
        self._add(site, "download_bytes", size)
        self._since = time.time()
        self._write()

    def accepted(self, site: str, size: int) -> None:
        """Record that a site's upload passed validation."""
        self._accepted += self._waiting.pop(site, False)
        self._add(site, "upload_bytes", size)
        self._write()

    def failed(self, site: str, reason: str, size: int) -> None:
        """Record that the attempt continues without a site."""
        self._waiting.pop(site, None)
        self._failed[site] = reason
        self._add(site, "upload_bytes", size)
        self._write()

    def done(self) -> None:
        """Record that the attempt is over."""
        self._phase = "done"
        self._write()

    def _begin(self, at: tuple[int, int], cohort: list[str]) -> None:
        self._at, self._since = at, time.time()
        self._waiting, self._accepted, self._failed, self._sizes = dict.fromkeys(cohort, True), 0, {}, {}
        self._awaited = {}

    def _add(self, site: str, name: str, size: int) -> None:
        of = self._sizes.setdefault(site, {"upload_bytes": 0, "download_bytes": 0})
        of[name] += size

    def _content(self) -> Mapping[str, Any]:
        round_, attempt = self._at
        return {
            "round": round_, "attempt": attempt, "phase": self._phase, "since": round(self._since, 3),
            "deadline_seconds": self.deadline_seconds, "quorum": self.quorum,
            "asked": len(self._waiting) + self._accepted + len(self._failed), "accepted": self._accepted,
            "failed": len(self._failed), "waiting": list(islice(self._waiting, NAMED)),
            "reasons": dict(islice(self._failed.items(), NAMED)),
            **(self._awaited if self._phase == "waiting" else {}), **({"unseen": True} if self.unseen else {}),
        }  # fmt: skip

    def _write(self) -> None:
        if not self._writes:
            return
        partial = self._file.with_name(f".{NAME}.part")
        try:
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump(self._content(), file)
            partial.replace(self._file)
        except OSError as error:
            self._writes = False
            log(WARNING, "%s: cannot be written (%s); the rounds continue without it", self._file, error)
