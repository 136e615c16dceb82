"""What takes seconds to find out, found out beside the pages: an epsilon, a verdict on a log, whom Flower sees."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from fedveil.errors import FedVeilError
from fedveil.foreign import shown

T = TypeVar("T")
_MOST = 256  # answers that are kept
_PATIENCE = 2.0  # seconds that a page waits for an answer; it is shown without it then, and anew once it is there


@dataclass(frozen=True)
class Answer(Generic[T]):
    """What is known. `value`: None until something is; `why`: the error that came instead; `is_new`: of this state."""

    value: T | None = None
    why: str = ""
    is_new: bool = False


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

    def ask(self, key: Hashable, stamp: Hashable, find: Callable[[], T]) -> Answer[T]:
        """The answer to `key` as of `stamp`; meanwhile what was known before, so that no page waits long.

        Args:
            key: of the question.
            stamp: of what the answer follows from; another stamp asks anew.
            find: gives the answer.
        """
        with self._lock:
            asked = self._asked.setdefault(key, _Asked())
            self._asked.move_to_end(key)
            if asked.stamp != stamp and not asked.is_under_way:
                asked.stamp, asked.is_under_way, asked.answer = stamp, True, replace(asked.answer, is_new=False)
                asked.done.clear()
                threading.Thread(target=self._find, args=(asked, find), daemon=True).start()
            while len(self._asked) > _MOST:
                self._asked.popitem(last=False)
            known = asked.answer.value is not None or asked.answer.why
        if not known:
            asked.done.wait(self._patience)
        return asked.answer

    def _find(self, asked: _Asked, find: Callable[[], T]) -> None:
        with self._alone:
            try:
                answer: Answer[T] = Answer(find(), is_new=True)
            except (FedVeilError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                why = error if isinstance(error, FedVeilError | OSError) else repr(error)
                answer = Answer(why=shown(why), is_new=True)
        with self._lock:
            asked.answer, asked.is_under_way, self.answered = answer, False, self.answered + 1
        asked.done.set()
