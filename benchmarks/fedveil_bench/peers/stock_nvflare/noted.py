"""Record, at the server, what each site sends and when each round ends, without changing anything."""

import itertools
import json
import time
from pathlib import Path

from nvflare.apis.dxo import DXO
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.app_event_type import AppEventType


class Noted(DXOFilter):
    """Records the results of the task "train".

    Args:
        out: the folder to which `server.json` is written at the end of the run, with the seconds of each round and the
            array names in each upload.
    """

    def __init__(self, out: str) -> None:
        super().__init__(supported_data_kinds=None, data_kinds_to_filter=None)
        self.out = out
        self.times: list[float] = []
        self.seen: list[list[str]] = []

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO | None:
        """Return None, which leaves the result unchanged."""
        self.seen.append(list(dxo.data))
        return None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Record times: the first round begins with the run's first task, and each round ends with its aggregation."""
        if event_type == AppEventType.AFTER_AGGREGATION or (
            event_type == AppEventType.ROUND_STARTED and not self.times
        ):
            self.times.append(time.monotonic())
        elif event_type == EventType.END_RUN:
            seconds = [later - earlier for earlier, later in itertools.pairwise(self.times)]
            (Path(self.out) / "server.json").write_text(json.dumps({"seconds": seconds, "seen": self.seen}))
