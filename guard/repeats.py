"""A part of a message that is pushed a second time is stored once, and both times the answer is that it is stored.

A connection that ends while a part's answer is on its way leaves the sender without one, and Flower's sender pushes the
part again. Flower's store knows a part only until it has it, so the second push is refused, and the sender gives up the
whole message: of 200 MB in parts of 1.25 MB, all of it for one answer.

| pushed | Flower's own | here |
|---|---|---|
| once | stored | stored |
| again in the same session, within `SECONDS` | refused | "stored", and nothing is stored |
| again while the first push is still being stored | refused | waits for it, then the first one's answer |
| again after `SECONDS`, or `MOST` other parts | refused | refused |
| in another session, or of another run | as that session has it | the same |
| without a session (a SuperNode before sessions) | as Flower has it | the same |

`SECONDS` is less than the three minutes after which Flower forgets a session that nobody pushes to, so a part that is
called stored has not been forgotten. Only who knows a session may ask; what it learns is what it was told before.
"""

from __future__ import annotations

import hashlib
import importlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

SECONDS = 120.0
MOST = 1 << 16  # some 10 MB; of 1,000 sites the last 80 MB of each
_STRIPES = 64


def of_flower() -> None:
    """From now on the state of a SuperLink or SuperNode of this process stores a part so."""
    for module, name in (("sql_corestate", "SqlCoreState"), ("in_memory_corestate", "InMemoryCoreState")):
        state = getattr(importlib.import_module(f"flwr.supercore.corestate.{module}"), name)
        state.store_object = once(state.store_object)


def once(
    original: Callable[..., bool], clock: Callable[[], float] = time.monotonic, most: int = MOST
) -> Callable[..., bool]:
    """`original`, Flower's `store_object`, which answers a repeated push as it answered the first."""
    stored: OrderedDict[bytes, float] = OrderedDict()  # oldest first
    changing, stripes = threading.Lock(), [threading.Lock() for _ in range(_STRIPES)]

    def store_object(self: Any, run_id: int, session_id: str, object_id: str, object_content: bytes) -> bool:
        if not session_id:
            return original(self, run_id, session_id, object_id, object_content)
        key = hashlib.sha256(repr((run_id, session_id, object_id)).encode()).digest()
        with stripes[key[0] % _STRIPES]:
            with changing:
                if clock() - stored.get(key, float("-inf")) < SECONDS:
                    return True
            if not original(self, run_id, session_id, object_id, object_content):
                return False
            with changing:
                stored[key] = clock()
                stored.move_to_end(key)
                while len(stored) > most or clock() - next(iter(stored.values())) >= SECONDS:
                    stored.popitem(last=False)
            return True

    return store_object
