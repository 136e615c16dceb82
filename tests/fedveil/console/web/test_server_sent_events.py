"""Server-sent events: what an open page hears, and how many may listen."""

from __future__ import annotations

import asyncio

import pytest
from starlette.responses import StreamingResponse

from fedveil.console.web.server_sent_events import EventStreams


def heard(streams: EventStreams, states: list[str], seen: str) -> list[str]:
    """All that a stream says while its state goes through `states`; the dashboard ends after the last."""
    remaining = list(states)
    streams._ending = lambda: not remaining

    async def listen() -> list[str]:
        answer = streams.of(lambda: remaining.pop(0), seen)
        assert isinstance(answer, StreamingResponse)
        return [str(part) async for part in answer.body_iterator]

    return asyncio.run(listen())


@pytest.fixture
def streams():
    return EventStreams(lambda: False, most=2, poll=0.0)


def test_a_page_hears_of_each_change_once(streams):
    events = heard(streams, ["a", "a", "b", "b", "a"], "a")
    assert events == ["retry: 3000\n\n", "event: changed\ndata: b\n\n", "event: changed\ndata: a\n\n"]


def test_what_changed_before_the_page_listened_is_said_at_once(streams):
    assert heard(streams, ["b"], "a")[1:] == ["event: changed\ndata: b\n\n"]


def test_a_comment_shows_that_the_client_is_still_there(streams, monkeypatch):
    monkeypatch.setattr("fedveil.console.web.server_sent_events._BEAT", 0.0)
    assert heard(streams, ["a", "a"], "a")[1:] == [": nothing new\n\n"] * 2


def test_no_more_than_so_many_listen_and_a_place_that_is_left_is_free_again(streams):
    async def run(stream, and_break: bool) -> None:
        async def send(message) -> None:
            if and_break:
                raise OSError("the client is gone")

        async def receive():
            return {"type": "http.disconnect"}

        with pytest.raises((OSError, ExceptionGroup)) if and_break else pytest.raises(StopAsyncIteration):
            await stream({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
            raise StopAsyncIteration

    first, second = streams.of(lambda: "a", ""), streams.of(lambda: "a", "")
    refused = streams.of(lambda: "a", "")
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "60"
    asyncio.run(run(first, and_break=True))
    assert streams.open == 1
    third = streams.of(lambda: "a", "")
    assert third.status_code == 200
    asyncio.run(run(second, and_break=False))
    asyncio.run(run(third, and_break=False))
    assert streams.open == 0
