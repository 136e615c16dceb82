"""A slow line between a site and its server: a TCP relay on this machine with bandwidth, delay, stalls and breaks.

    with ShapedLine(LineSpeed(up=20_000, down=20_000, delay=0.15), server_port) as line:
        connect("127.0.0.1", line.port)

The relay forwards bytes without interpreting them. All connections share the line's bandwidth, as in a hospital. Per
direction and connection, it holds at most `QUEUE_BYTES` plus the bytes that are in transit for `delay`; then it stops
reading, and the sender's flow control makes it wait.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

QUEUE_BYTES = 64 * 1024
_PACKET_BYTES = 1_400
_LONGEST_PACKET_SECONDS = 0.02  # packets are larger on a fast line, where 1,400 bytes per step would cost too much CPU


@dataclass(frozen=True)
class LineSpeed:
    """The speed of a line.

    Args:
        up: bytes per second from the site to the server.
        down: bytes per second from the server to the site.
        delay: seconds that a byte takes in one direction; half of a round trip.
        break_every: interval in seconds at which all open connections are reset; 0 means never.
    """

    up: float
    down: float
    delay: float = 0.0
    break_every: float = 0.0

    def __post_init__(self) -> None:
        if not (self.up > 0 and self.down > 0 and self.delay >= 0 and self.break_every >= 0):
            raise ValueError(f"line: expected positive bytes per second and no negative seconds, found {self}")


class ShapedLine:
    """A relay from its own port to `server_port` on this machine. It runs in a thread while the context is active."""

    def __init__(self, speed: LineSpeed, server_port: int) -> None:
        self.speed = speed
        self.carried: Counter[str] = Counter()  # bytes "up" and "down", "connections", "breaks"
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        _limit_socket(self._listener)  # each connection inherits the limits
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True, name=f"line-{self.port}")
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._free = {"up": 0.0, "down": 0.0}  # the time at which the line will have sent everything it holds
        self._stopped: asyncio.Event | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(10.0)

    def stall(self, seconds: float) -> None:
        """Stop forwarding for this many seconds; connections stay open."""

        def hold() -> None:
            until = self._loop.time() + seconds
            self._free = {way: max(free, until) for way, free in self._free.items()}

        self._loop.call_soon_threadsafe(hold)

    def reset(self) -> None:
        """Reset all open connections."""
        self._loop.call_soon_threadsafe(self._break_off)

    def _stop(self) -> None:
        if self._stopped is not None:
            self._stopped.set()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._run())
        self._loop.close()

    async def _run(self) -> None:
        self._stopped = asyncio.Event()
        server = await asyncio.start_server(self._connect, sock=self._listener, limit=QUEUE_BYTES)
        if self.speed.break_every:
            self._start(self._break_again())
        await self._stopped.wait()
        server.close()
        self._break_off()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _break_again(self) -> None:
        while True:
            await asyncio.sleep(self.speed.break_every)
            self._break_off()

    def _break_off(self) -> None:
        self.carried["breaks"] += bool(self._writers)
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(2 * self.speed.delay)  # the round trip of the handshake
        far = socket.socket()
        _limit_socket(far)
        far.setblocking(False)
        try:
            await self._loop.sock_connect(far, ("127.0.0.1", self._server_port))
        except OSError:
            far.close()
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection(sock=far, limit=QUEUE_BYTES)
        self.carried["connections"] += 1
        self._writers |= {writer, far_writer}
        self._start(self._carry("up", self.speed.up, reader, far_writer))
        self._start(self._carry("down", self.speed.down, far_reader, writer))

    async def _carry(self, way: str, rate: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read as fast as the line sends, and write each packet when it would arrive."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        arriving = self._loop.create_task(self._arrive(under_way, writer))
        size = max(_PACKET_BYTES, int(rate * _LONGEST_PACKET_SECONDS))
        try:
            while packet := await reader.read(size):
                sent = max(self._free[way], self._loop.time()) + len(packet) / rate
                self._free[way] = sent
                self.carried[way] += len(packet)
                under_way.put_nowait((sent + self.speed.delay, packet))
                await asyncio.sleep(sent - self._loop.time())
        except (ConnectionError, asyncio.IncompleteReadError):
            writer.transport.abort()
        finally:
            under_way.put_nowait((self._loop.time() + self.speed.delay, b""))
            await arriving

    async def _arrive(self, under_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        """Write each packet at its time; an empty packet ends the connection."""
        try:
            while True:
                when, packet = await under_way.get()
                await asyncio.sleep(when - self._loop.time())
                if not packet:
                    break
                writer.write(packet)
                await writer.drain()
            writer.close()
        except ConnectionError:
            writer.transport.abort()
        finally:
            self._writers.discard(writer)


def _limit_socket(end: socket.socket) -> None:
    """Give a socket the buffer of a line, and the segments of Ethernet: those of loopback are 64 KiB, and a window that
    opens by so much at a time stays shut for longer than TCP's user timeout."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, QUEUE_BYTES)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _PACKET_BYTES)


__all__ = ["QUEUE_BYTES", "LineSpeed", "ShapedLine"]
