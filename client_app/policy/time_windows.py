"""Time windows in a policy's `hours`: "20:00-06:00", by the site's clock, including the start but not the end."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import datetime

from fedveil.errors import PolicyError

WINDOW = r"^([01]\d|2[0-3]):[0-5]\d-(([01]\d|2[0-3]):[0-5]\d|24:00)$"


def is_within_windows(windows: Iterable[str], now: datetime) -> bool:
    """Return whether `now` is in one of the windows; a window that ends before it begins spans midnight."""
    return any(_in_one(window, 60 * now.hour + now.minute) for window in windows)


def require_hour(windows: Sequence[str] | None, now: datetime) -> None:
    """Raise PolicyError for a time outside all windows; None = no restriction."""
    if windows is not None and not is_within_windows(windows, now):
        raise PolicyError(f"hours: this site trains only at {windows}, and it is {now:%H:%M} there; try again then")


def _in_one(window: str, minute: int) -> bool:
    first, last = (60 * int(h) + int(m) for h, m in re.findall(r"(\d\d):(\d\d)", window))
    return first <= minute < last if first < last else minute >= first or minute < last
