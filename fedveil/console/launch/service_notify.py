"""Tell systemd that a service is up, and that it still works, as sd_notify(3) does.

systemd names a Unix datagram socket in NOTIFY_SOCKET, and the watchdog's time in WATCHDOG_USEC. Both are removed from
the environment, so that no child process reports for its parent. Without them, such as in a terminal, nothing is sent.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Self

from fedveil.console.terminal import say
from fedveil.sanitize import sanitize

__all__ = ["ServiceNotifier"]

SECONDS = 60.0  # between two reports, and at most a quarter of the watchdog's time
_SOCKET, _WATCHDOG, _PROCESS = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"
_MOST_STATUS = 200  # characters


@dataclass
class ServiceNotifier:
    """Reports to the service manager that started this process.

    Attributes:
        address: its socket: a path, or a name in the abstract namespace that begins with "@"; "" = nobody to report to.
        every: seconds between reports.
        clock: a monotonic clock.
    """

    address: str = ""
    every: float = SECONDS
    clock: Callable[[], float] = time.monotonic
    _next: float = float("-inf")
    _status: str = ""
    _has_failed: bool = False

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str], process: int) -> Self:
        """Read and remove systemd's variables; `process`: this process's ID, for which the watchdog must be."""
        address, watchdog, whose = (environ.pop(name, "") for name in (_SOCKET, _WATCHDOG, _PROCESS))
        is_ours = watchdog.isascii() and watchdog.isdigit() and whose in ("", str(process))
        every = min(SECONDS, int(watchdog) / 4e6) if is_ours else SECONDS
        return cls(address if address[:1] in ("/", "@") else "", every)

    def tell_ready(self, status: str) -> None:
        """Report that the service is up; `status` is the line that `systemctl status` shows."""
        if self.address:
            self._send(f"READY=1\nSTATUS={_one_line(status)}")
            self._status = status

    def tell_alive(self, find_fault: Callable[[], str], status: str = "") -> None:
        """Report that the service works, unless `find_fault` returns a fault. Call often: most calls do nothing.

        With a fault, only the status line is sent, and the watchdog's time runs out if none of the later calls
        finds the service well.
        """
        if not self.address or self.clock() < self._next:
            return
        self._next = self.clock() + self.every
        fault = find_fault()
        text = fault or status or self._status
        self._send(f"{'' if fault else f'WATCHDOG=1{chr(10)}'}STATUS={_one_line(text)}")

    def _send(self, message: str) -> None:
        name = f"\0{self.address[1:]}" if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(5.0)
                sender.sendto(message.encode(), name)
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:  # say it once; the watchdog's time runs out meanwhile
                say(f"cannot report to systemd at {sanitize(self.address, 120)}: {error}", file=sys.stderr, flush=True)
            self._has_failed = True


def _one_line(text: str) -> str:
    return sanitize(" ".join(text.split()), _MOST_STATUS)
