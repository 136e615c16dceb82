"""Make pushes of message parts idempotent: a repeated part is stored once, and both pushes succeed.

If a connection ends while the answer to a part is in transit, the sender gets no answer and pushes the part again.
Flower's store accepts each part only once, so it refuses the second push, and the sender gives up on the whole message.
For 200 MB in parts of 1.25 MB, one lost answer costs the entire message.

| pushed | Flower's behavior | here |
|---|---|---|
| once | stored | stored |
| again in the same session, within `SECONDS` | refused | "stored", and nothing is stored |
| again while the first push is still being stored | refused | waits for the first push and gets its answer |
| again after `SECONDS`, or `MOST` other parts | refused | refused |
| in another session or for another run | treated by that session's rules | as in Flower |
| without a session (a SuperNode from before sessions) | accepted or refused by Flower | as in Flower |

`SECONDS` is less than the three minutes after which Flower forgets an idle push session, so a part reported
as stored is still there. Only a client that knows the session can ask, and it does not learn anything new.
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
MOST = 1 << 16  # about 10 MB; covers the last 80 MB of each of 1,000 sites
_STRIPES = 64


def patch_duplicate_pushes() -> None:
    """Patch the state of this process's SuperLink or SuperNode so that repeated pushes succeed."""
    for module, name in (("sql_corestate", "SqlCoreState"), ("in_memory_corestate", "InMemoryCoreState")):
        state = getattr(importlib.import_module(f"flwr.supercore.corestate.{module}"), name)
        state.store_object = store_once(state.store_object)


def store_once(
    original: Callable[..., bool], clock: Callable[[], float] = time.monotonic, most: int = MOST
) -> Callable[..., bool]:
    """Wrap Flower's `store_object` to answer a repeated push like the first one."""
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
