"""Server-sent events: notify an open page that its content has changed, so that it refreshes itself.

    GET events?seen=STATE      text/event-stream: `event: changed` with the new state; a comment now and then

So content is rendered in only one place. Without its script, a page is complete but does not refresh.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from starlette.concurrency import run_in_threadpool
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

MOST = 16  # concurrent streams
_LIFE = 3600.0  # seconds, after which the browser reconnects
_POLL = 1.0
_BEAT = 15.0  # seconds between comments, which detect a client that has gone


class EventStreams:
    """A dashboard's open streams. `ending` returns whether the dashboard is about to end."""

    def __init__(self, ending: Callable[[], bool], most: int = MOST, poll: float = _POLL) -> None:
        self._ending, self._most, self._poll = ending, most, poll
        self.open = 0

    def of(self, state: Callable[[], str], seen: str) -> Response:
        """Return a stream that reports when `state` differs from `seen`, and every later change."""
        if self.open >= self._most:
            return PlainTextResponse("too many pages are open at once; close one\n", 503, {"Retry-After": "60"})
        self.open += 1
        return _Stream(self._told(state, seen), self._close)

    def _close(self) -> None:
        self.open -= 1

    async def _told(self, state: Callable[[], str], seen: str) -> AsyncIterator[str]:
        end = beat = time.monotonic()
        end += _LIFE
        yield "retry: 3000\n\n"
        while not self._ending() and time.monotonic() < end:
            now = await run_in_threadpool(state)
            if now != seen:
                seen, beat = now, time.monotonic()
                yield f"event: changed\ndata: {now}\n\n"
            elif time.monotonic() - beat >= _BEAT:
                beat = time.monotonic()
                yield ": nothing new\n\n"
            await asyncio.sleep(self._poll)


class _Stream(StreamingResponse):
    def __init__(self, content: AsyncIterator[str], close: Callable[[], None]) -> None:
        super().__init__(content, media_type="text/event-stream")
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()
