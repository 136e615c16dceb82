"""What takes seconds to find out, found out beside the pages: an epsilon, a verdict on a log, whom Flower sees."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from fedveil.errors import FedVeilError
from fedveil.foreign import shown

T = TypeVar("T")
_MOST = 256  # answers that are kept
_PATIENCE = 2.0  # seconds that a page waits for an answer; it is shown without it then, and anew once it is there
_OLD = 30.0  # seconds after which an answer of another state is waited for like none


@dataclass(frozen=True)
class Answer(Generic[T]):
    """What is known. `value`: None until something is; `why`: the error that came instead; `is_new`: of this state;
    `at`: when it was looked into, in seconds since 1970.
    """

    value: T | None = None
    why: str = ""
    is_new: bool = False
    at: float = field(default=0.0, compare=False)

    @property
    def since(self) -> str:
        """From when an answer is that is not new: "As of 17:12:03 UTC"."""
        return f"As of {datetime.fromtimestamp(self.at, UTC):%H:%M:%S} UTC"


@dataclass
class _Asked:
    stamp: Hashable = None
    is_under_way: bool = False
    answer: Answer[Any] = Answer()
    done: threading.Event = field(default_factory=threading.Event)


class Later:
    """Questions by key. One is looked into at a time, so that a machine that trains keeps its cores."""

    def __init__(self, patience: float = _PATIENCE) -> None:
        self.answered = 0  # how many answers came; pages are made anew when it grows
        self._patience, self._asked = patience, OrderedDict[Hashable, _Asked]()
        self._lock, self._alone = threading.Lock(), threading.Lock()

    def ask(self, key: Hashable, stamp: Hashable, find: Callable[[], T], patience: float | None = None) -> Answer[T]:
        """The answer to `key` as of `stamp`; meanwhile what was known before, so that no page waits long.

        A page that somebody watches gets what was found a moment ago at once, and is made anew. One that nobody has
        watched for a while waits, as the first one does, for what is there now.

        Args:
            key: of the question.
            stamp: of what the answer follows from; another stamp asks anew.
            find: gives the answer.
            patience: seconds that this question is waited for.
        """
        end = time.monotonic() + (self._patience if patience is None else patience)
        while True:
            with self._lock:
                asked = self._begun(key, stamp, find)
                answer = asked.answer
                is_settled = asked.stamp == stamp and not asked.is_under_way
            left = end - time.monotonic()
            known = (answer.value is not None or answer.why) and time.time() - answer.at < _OLD
            if is_settled or known or left <= 0:
                return answer if is_settled else replace(answer, is_new=False)
            asked.done.wait(left)

    def _begun(self, key: Hashable, stamp: Hashable, find: Callable[[], T]) -> _Asked:
        """The question, which is looked into where its answer is of another stamp."""
        asked = self._asked.setdefault(key, _Asked())
        self._asked.move_to_end(key)
        if asked.stamp != stamp and not asked.is_under_way:
            asked.stamp, asked.is_under_way, asked.answer = stamp, True, replace(asked.answer, is_new=False)
            asked.done.clear()
            threading.Thread(target=self._find, args=(asked, find), daemon=True).start()
        while len(self._asked) > _MOST:
            self._asked.popitem(last=False)
        return asked

    def _find(self, asked: _Asked, find: Callable[[], T]) -> None:
        with self._alone:
            began = time.time()
            try:
                answer: Answer[T] = Answer(find(), is_new=True, at=began)
            except (FedVeilError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                why = error if isinstance(error, FedVeilError | OSError) else repr(error)
                answer = Answer(why=shown(why), is_new=True, at=began)
        with self._lock:
            asked.answer, asked.is_under_way, self.answered = answer, False, self.answered + 1
            asked.done.set()
