"""Compute slow results in the background, such as an epsilon, a verdict on a log, or the sites that Flower sees."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from fedveil.errors import FedVeilError
from fedveil.sanitize import sanitize

T = TypeVar("T")
_MOST = 256  # number of cached answers
_PATIENCE = 2.0  # seconds that a page waits for an answer; after that, it is shown without it and refreshed later
_OLD = 30.0  # seconds after which an outdated answer counts as missing


@dataclass(frozen=True)
class CachedAnswer(Generic[T]):
    """A cached answer and its age.

    `value`: None until there is an answer; `why`: the error that occurred instead; `is_new`: whether the answer is
    for the current state; `at`: time of the query, in seconds since 1970.
    """

    value: T | None = None
    why: str = ""
    is_new: bool = False
    at: float = field(default=0.0, compare=False)

    @property
    def since(self) -> str:
        """Return the time of an outdated answer, as in "As of 17:12:03 UTC"."""
        return f"As of {datetime.fromtimestamp(self.at, UTC):%H:%M:%S} UTC"


@dataclass
class _Asked:
    stamp: Hashable = None
    is_under_way: bool = False
    answer: CachedAnswer[Any] = CachedAnswer()
    done: threading.Event = field(default_factory=threading.Event)


class BackgroundQueries:
    """Runs queries by key, one of each lane at a time, to leave the cores to training."""

    def __init__(self, patience: float = _PATIENCE) -> None:
        self.answered = 0  # number of answers so far; pages are rendered again when it increases
        self._patience, self._asked = patience, OrderedDict[Hashable, _Asked]()
        self._lock, self._lanes = threading.Lock(), defaultdict[Hashable, threading.Lock](threading.Lock)

    def ask(
        self,
        key: Hashable,
        stamp: Hashable,
        find: Callable[[], T],
        patience: float | None = None,
        lane: Hashable = None,
    ) -> CachedAnswer[T]:
        """Return the answer to `key` as of `stamp`, or the previous answer meanwhile.

        The previous answer keeps a page from waiting long. A page that is being watched gets a recent answer
        immediately and is then refreshed. A page that has not been watched for a while waits for the current
        answer, as on its first load.

        Args:
            key: identifies the query.
            stamp: version of the answer's inputs; a different stamp starts a new query.
            find: computes the answer.
            patience: seconds to wait for this query.
            lane: queries of another lane do not wait for this one; name a lane only for a query that uses little CPU
                time and may wait for another program. Lanes are kept, so there must be few.
        """
        end = time.monotonic() + (self._patience if patience is None else patience)
        while True:
            with self._lock:
                asked = self._begun(key, stamp, find, lane)
                answer = asked.answer
                is_settled = asked.stamp == stamp and not asked.is_under_way
            left = end - time.monotonic()
            known = (answer.value is not None or answer.why) and time.time() - answer.at < _OLD
            if is_settled or known or left <= 0:
                return answer if is_settled else replace(answer, is_new=False)
            asked.done.wait(left)

    def _begun(self, key: Hashable, stamp: Hashable, find: Callable[[], T], lane: Hashable) -> _Asked:
        """Return the query, starting it if its answer has another stamp."""
        asked = self._asked.setdefault(key, _Asked())
        self._asked.move_to_end(key)
        if asked.stamp != stamp and not asked.is_under_way:
            asked.stamp, asked.is_under_way, asked.answer = stamp, True, replace(asked.answer, is_new=False)
            asked.done.clear()
            threading.Thread(target=self._find, args=(asked, find, self._lanes[lane]), daemon=True).start()
        while len(self._asked) > _MOST:
            self._asked.popitem(last=False)
        return asked

    def _find(self, asked: _Asked, find: Callable[[], T], lane: threading.Lock) -> None:
        with lane:
            began = time.time()
            try:
                answer: CachedAnswer[T] = CachedAnswer(find(), is_new=True, at=began)
            except (FedVeilError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                why = error if isinstance(error, FedVeilError | OSError) else repr(error)
                answer = CachedAnswer(why=sanitize(why), is_new=True, at=began)
        with self._lock:
            asked.answer, asked.is_under_way, self.answered = answer, False, self.answered + 1
            asked.done.set()
